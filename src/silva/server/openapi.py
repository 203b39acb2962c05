"""The OpenAPI document of the inference server, made of the fields in bodies.py."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import silva
from silva.server.bodies import TOKEN_FORMAT
from silva.server.parsing import Body

REFERENCE = "#/components/schemas/"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def document(
    routes: Mapping[tuple[str, str], tuple[type[Body] | None, str]], *, vocabulary: int
) -> dict[str, Any]:
    """OpenAPI 3.1.

    Args:
        routes: by method and path, the body and what the route is for.
        vocabulary: how many tokens there are.
    """
    schemas: dict[str, Any] = {"Error": _ERROR}
    paths: dict[str, dict[str, Any]] = {}
    failed = {"description": "an error", "content": _json({"$ref": f"{REFERENCE}Error"})}
    for (method, path), (body, summary) in routes.items():
        text = path == "/metrics"
        done = {"text/plain": {"schema": {"type": "string"}}} if text else _json({"type": "object"})
        if body is not None and "stream" in body.model_fields:
            done |= {"text/event-stream": {"schema": {"type": "string"}}}
        operation: dict[str, Any] = {
            "summary": summary,
            "responses": {"200": {"description": "done", "content": done}, "default": failed},
        }
        if body is not None:
            schemas |= _schemas(body)
            content = _json({"$ref": f"{REFERENCE}{body.__name__}"})
            operation["requestBody"] = {"required": bool(body.model_fields), "content": content}
        path = path.replace(":path}", "}")  # Starlette's way to say that a name may hold slashes
        if names := re.findall(r"{(\w+)}", path):
            operation["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
            ]
        paths.setdefault(path, {})[method.lower()] = operation
    for node in _nodes(schemas):
        if node.get("format") == TOKEN_FORMAT:
            node.pop("exclusiveMaximum", None)
            node["maximum"] = vocabulary - 1
    return {
        "openapi": "3.1.0",
        "info": {"title": "Silva inference", "version": silva.__version__},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _schemas(body: type[Body]) -> dict[str, Any]:
    """The schema of a body and those that it refers to; null stands for each field that may be left out."""
    schema = body.model_json_schema(ref_template=REFERENCE + "{model}")
    parts = schema.pop("$defs", {})
    required = schema.get("required", [])
    for name, field in schema.get("properties", {}).items():
        if name not in required and {"type": "null"} not in field.get("anyOf", []):
            schema["properties"][name] = {"anyOf": [field, {"type": "null"}]}
    return {**parts, body.__name__: schema}


def _nodes(value: Any) -> Iterator[dict[str, Any]]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for each in inner:
        yield from _nodes(each)
    if isinstance(value, dict):
        yield value
