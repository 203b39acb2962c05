"""JSON bodies: bytes to an object of bounded depth and size, and that to the fields of a route.

    bytes ──parse──> JSON ──read(CompletionBody, ...)──> its fields, or an error that names one

What cannot be done is refused, never ignored: a field of OpenAI's or vLLM's API that has no counterpart here
may only have the value that changes nothing (`NEUTRAL`), or be one that never changes a result (`HARMLESS`).
null is the same as leaving a field out. Not here: the fields of each route (bodies.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from silva.rendering.tool_calls import finite_json
from silva.wire.guard import HttpError

DEPTH = 64
CONTAINERS = 200_000  # arrays and objects in one body
SHOWN = 512  # characters of a name in a message

HARMLESS = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "request_id",
     "cache_salt", "priority"}
)  # fmt: skip
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "detokenize": (True,),
    "frequency_penalty": (0,),
    "function_call": (),
    "functions": (),
    "guided_json": (),
    "include_stop_str_in_output": (False,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "prediction": (),
    "presence_penalty": (0,),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": (),
}
T = TypeVar("T", bound="Body")


class Body(BaseModel):
    """Numbers are numbers and true is none of them; unknown fields are refused."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


def parse(data: bytes) -> dict[str, Any]:
    """The JSON object in a body.

    Raises:
        HttpError: it is none, or too deep, or holds what JSON or Unicode cannot.
    """
    if data.count(b"[") + data.count(b"{") > CONTAINERS:
        raise HttpError(400, f"the body holds too many arrays and objects, expected at most {CONTAINERS}")
    try:
        text = data.decode()
        value = finite_json(text)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate is valid JSON and no text
    except UnicodeError:
        raise HttpError(400, "the body is not valid Unicode, expected JSON in UTF-8") from None
    except RecursionError:
        raise HttpError(400, f"the body is nested too deeply, expected at most {DEPTH} levels") from None
    except ValueError as error:
        raise HttpError(400, f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise HttpError(400, f"the body: got {shown(value)}, expected a JSON object")
    if _deeper(value, DEPTH):
        raise HttpError(400, f"the body is nested too deeply, expected at most {DEPTH} levels")
    return value


def read(kind: type[T], body: Mapping[str, Any]) -> T:
    """The fields of a route.

    Raises:
        HttpError: names the field, what was got and what was expected.
    """
    fields: dict[str, Any] = {}
    for name, value in body.items():
        if value is None or (name not in kind.model_fields and name in HARMLESS):
            continue
        if name not in kind.model_fields:
            _check_neutral(name, value, kind)
            continue
        fields[name] = value
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in fault["loc"]) or "the body"
        said = fault["msg"].removeprefix("Value error, ")
        got = "" if fault["type"] in ("missing", "value_error") else f" (got {shown(fault['input'])})"
        raise HttpError(400, f"{where}: {said}{got}") from None


def _check_neutral(name: str, value: Any, kind: type[Body]) -> None:
    if name not in NEUTRAL:
        raise HttpError(
            400, f"{name[:SHOWN]}: unknown field, expected one of {', '.join(sorted(kind.model_fields))}"
        )
    if not any(type(value) in (type(each), float) and value == each for each in NEUTRAL[name]):
        allowed = " or ".join(json.dumps(each) for each in NEUTRAL[name])
        instead = f"; expected {allowed}, or to leave it out" if allowed else "; leave it out"
        raise HttpError(400, f"{name}: got {shown(value)}, which this server does not support{instead}")


def _deeper(value: Any, depth: int) -> bool:
    """Whether there are more levels; without recursion, which the body could exhaust."""
    level = [value]
    while level and depth:
        depth -= 1
        level = [
            inner
            for each in level
            for inner in (each.values() if isinstance(each, dict) else each)
            if isinstance(inner, dict | list)
        ]
    return bool(level)


def shown(value: Any) -> str:
    """A value in a message; never all of a large one."""
    if isinstance(value, list | dict):
        return f"{'an array' if isinstance(value, list) else 'an object'} of {len(value)}"
    if isinstance(value, str):
        return json.dumps(value[:40]) + ("..." if len(value) > 40 else "")
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 200:
        return "a huge number"
    return json.dumps(value)
