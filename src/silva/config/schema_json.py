"""JSON Schema of a run's TOML file, for editors that complete and check while one types."""

from __future__ import annotations

from typing import Any

from silva.config import plugins, shape
from silva.config.schema import Registries, run_config
from silva.config.shape import Model


def json_schema(registries: Registries) -> dict[str, Any]:
    """JSON Schema (draft 2020-12); descriptions come from the attribute docstrings.

    Differs from pydantic's in what TOML needs: null is the string "null", `extends` is a key, `type`
    is required of all but the default variant, and environments of one's own are let through.
    """
    model = run_config(registries)
    schema = _short_types(_toml_nulls(model.model_json_schema()))
    _require_types(model, schema["$defs"])
    texts: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
    schema["properties"] = {
        "extends": {"description": "File or files this one builds on, relative to it.", **texts},
        **schema["properties"],
    }
    worlds = schema["properties"]["environments"]
    known = worlds["items"].pop("oneOf", None) or [dict(worlds["items"])]
    installed = sorted({*plugins.entry_points()} - {*registries.environments})
    own: list[dict[str, Any]] = [{"pattern": ":"}, *([{"enum": installed}] if installed else [])]
    stranger = {
        "type": "object",
        "description": "An environment of your own: file.py:Class, package.module:Class or an entry point.",
        "properties": {"type": {"type": "string", "anyOf": own}},
        "required": ["type"],
    }
    worlds["items"] = {"oneOf": [*known, stranger]}
    # A file may leave anything to the files it extends and to the command line.
    schema.pop("required", None)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "Silva run"}


def _toml_nulls(node: Any) -> Any:
    if isinstance(node, dict):
        if node == {"type": "null"}:
            return {"const": "null"}
        unset = "default" in node and node["default"] is None
        return {key: _toml_nulls(item) for key, item in node.items() if not (unset and key == "default")}
    return [_toml_nulls(item) for item in node] if isinstance(node, list) else node


def _short_types(node: Any) -> Any:
    """In place of a section with types and a default, the name of a type will do."""
    if isinstance(node, list):
        return [_short_types(item) for item in node]
    if not isinstance(node, dict):
        return node
    node = {key: _short_types(item) for key, item in node.items()}
    if "discriminator" in node and "default" in node:
        names = list(node["discriminator"]["mapping"])
        node = {**node, "oneOf": [*node["oneOf"], {"enum": names}]}
    return node


def _require_types(model: Model, definitions: dict[str, Any]) -> None:
    """A table without `type` is the default variant alone, or `oneOf` would match several."""
    for _, field, _ in shape.fields(model):
        inner = shape.element(field.annotation, 0)
        models = shape.sections(field.annotation) + (shape.sections(inner) if inner is not None else [])
        variants = [each for each in models if shape.tag(each) is not None]
        for variant in variants if len(models) > 1 or inner is not None else []:
            definition = definitions.get(variant.__name__)
            if definition is not None and shape.tag(variant) != shape.default_tag(field):
                definition["required"] = sorted({*definition.get("required", []), "type"})
