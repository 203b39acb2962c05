"""For hostile.py: the trainer's routes as an OpenAPI document, made of the types that cross its border."""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
from served import BINARY

from silva.algorithms.losses import LOSSES
from silva.trainer.remote import Open, ServedTrainer
from silva.types import LossSpec, Turn
from silva.wire import rpc
from silva.wire.codec import hints

FITS = {"tokens": 0, "loss_weights": 1, "temperatures": 3, "versions": 4}
"""Arrays of peers/trainer_calls.py that fit a field; 2 fits the others."""
ARRAYS = 16


def document(folder: Path, session: str) -> dict[str, Any]:
    """OpenAPI 3.1 of a trainer whose run is in `folder`."""
    calls = [
        {
            "type": "object", "additionalProperties": False, "required": ["method", "record"],
            "properties": {"method": {"const": method}, "record": _arguments(signature, method, folder)},
        }
        for method, signature in rpc.methods(ServedTrainer).items()
    ]  # fmt: skip
    opened = {"type": "object", "properties": {"record": _schema(Open, "", folder)}, "required": ["record"]}
    named = {"name": "session", "in": "path", "required": True,
             "schema": {"anyOf": [{"const": session}, {"type": "string", "minLength": 1}]}}  # fmt: skip
    return {
        "openapi": "3.1.0",
        "info": {"title": "Silva trainer", "version": "0"},
        "paths": {
            "/alive": {"get": _operation()},
            "/open": {"post": _operation(opened)},
            "/sessions/{session}": {"post": {**_operation({"oneOf": calls}), "parameters": [named]}},
        },
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}],
    }


def _operation(body: dict[str, Any] | None = None) -> dict[str, Any]:
    found: dict[str, Any] = {"responses": {"default": {"description": "an answer or an error"}}}
    if body is not None:
        found["requestBody"] = {"required": True, "content": {BINARY: {"schema": body}}}
    return found


def _arguments(signature: inspect.Signature, method: str, folder: Path) -> dict[str, Any]:
    known = get_type_hints(getattr(ServedTrainer, method))
    names = [name for name in signature.parameters if name != "self"]
    return _object({name: _schema(known[name], name, folder) for name in names})


def _schema(hint: Any, name: str, folder: Path) -> dict[str, Any]:
    """What the codec reads as a value of this type; half of the arrays, names and paths are right ones."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is np.ndarray:
        return {"anyOf": [{"const": FITS.get(name, 2)}, {"enum": list(range(ARRAYS))}]}
    if hint is LossSpec:
        params = {"type": "object", "additionalProperties": {"type": ["number", "string", "null"]}}
        return _object({"name": {"anyOf": [{"enum": sorted(LOSSES)}, {"type": "string"}]}, "params": params})
    if hint is Path or name == "folder":
        paths = [str(folder), str(folder / "weights"), "/etc/passwd", str(folder.parent), "../..", "\0"]
        return {"anyOf": [{"enum": paths}, {"type": "string"}]}
    if dataclasses.is_dataclass(hint) and hint is not Turn:
        return _object({each: _schema(kind, each, folder) for each, kind in hints(hint).items()})  # type: ignore[arg-type]
    if origin is Literal:
        return {"enum": list(args)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema(each, name, folder) for each in args]}
    if origin in (Sequence, frozenset) or (origin is tuple and args[-1] is Ellipsis):
        return {"type": "array", "items": _schema(args[0], name, folder), "maxItems": 4}
    if origin is tuple:
        return {"type": "array", "prefixItems": [_schema(each, name, folder) for each in args],
                "minItems": len(args), "maxItems": len(args)}  # fmt: skip
    if origin is Mapping:
        return {"type": "object", "additionalProperties": _schema(args[1], name, folder)}
    plain = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
    return {"type": plain[hint]} if hint in plain else {}


def _object(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": dict(properties), "required": list(properties),
            "additionalProperties": False}  # fmt: skip
