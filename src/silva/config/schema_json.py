"""JSON Schema of a run's TOML file, for editors that complete and check while one types."""

from __future__ import annotations

from typing import Any

from silva.config import field_types, plugins
from silva.config.schema import Registries, run_config


def json_schema(registries: Registries) -> dict[str, Any]:
    """JSON Schema (draft 2020-12); descriptions come from the attribute docstrings.

    Differs from pydantic's in what TOML needs: null is the string "null", `extends` is a key, `type`
    is required of all but the default variant, and environments of one's own are let through.
    """
    model = run_config(registries)
    schema = _short_types(_toml_nulls(model.model_json_schema()))
    for _, field, _ in field_types.fields(model):
        variants = field_types.held(field)
        if len(variants) > 1 or not field_types.sections(field):  # without `type`, oneOf would match several
            for variant in variants:
                definition = schema["$defs"].get(variant.__name__, {})
                if field_types.tag(variant) not in (None, field_types.default_tag(field)):
                    definition["required"] = sorted({*definition.get("required", []), "type"})
    texts: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
    extends = {"description": "File or files this one builds on, relative to it.", **texts}
    environments = schema["properties"]["environments"]
    known = environments["items"].pop("oneOf", None) or [dict(environments["items"])]
    installed = sorted({*plugins.entry_points()} - {*registries.environments})
    own: list[dict[str, Any]] = [{"pattern": ":"}, *([{"enum": installed}] if installed else [])]
    stranger = {
        "type": "object",
        "description": "An environment of your own: file.py:Class, package.module:Class or an entry point.",
        "properties": {"type": {"type": "string", "anyOf": own}},
        "required": ["type"],
    }
    environments["items"] = {"oneOf": [*known, stranger]}
    schema.pop("required", None)  # a file may leave it to the files it extends and to the command line
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "properties": {"extends": extends, **schema["properties"]},
        "title": "Silva run",
    }


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
