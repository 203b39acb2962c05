"""The fields of each route, with a limit on every number and list, and what they say of sampling.

Sizes are limited here before anything is made of them. Not here: limits that depend on the model
(engine.py), and the messages and tools of a chat (dialogue.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic import WithJsonSchema as Shown

from silva.server.parsing import Body, shown
from silva.types import SamplingParams

PROMPTS = 1024
CHOICES = 128
MAX_TOKENS = 1 << 20  # of an answer; the context of the model ends it earlier
STOPS = 64
STOP_CHARACTERS = 1024
MESSAGES = 4096
TOOLS = 128
TOOL_BYTES = 1 << 18  # of all tools together
TEXT = 1 << 23  # characters; bodies are smaller
NAME = 512
COOLEST = 1e-4  # a temperature below it, other than 0, overflows float32
HOTTEST = 1000.0


def _as_prompts(value: Any) -> list[str] | list[list[int]]:
    """One prompt or many, each a text or token ids."""
    prompts = value if isinstance(value, list) and value and isinstance(value[0], str | list) else [value]
    if len(prompts) > PROMPTS:
        raise ValueError(f"got {len(prompts)} prompts, expected at most {PROMPTS}")
    kind = type(prompts[0])
    for prompt in prompts:
        if type(prompt) is not kind or not isinstance(prompt, str | list):
            raise ValueError("expected a text, token ids, an array of texts or an array of token ids")
        if not prompt:
            raise ValueError("got an empty prompt, expected at least one token")
        if isinstance(prompt, list) and set(map(type, prompt)) != {int}:
            raise ValueError("token ids must be whole numbers")
    return prompts


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _sound_temperature(value: float) -> float:
    if 0 < value < COOLEST:
        raise ValueError(f"got {value:g}, expected 0 (greedy) or {COOLEST:g} to {HOTTEST:g}")
    return value


Temperature = Annotated[float, Field(ge=0, le=HOTTEST), AfterValidator(_sound_temperature)]
TOKEN_FORMAT = "token"  # in the schema: a number below the size of the vocabulary
_ID = {"type": "integer", "minimum": 0, "format": TOKEN_FORMAT}
_IDS = {"type": "array", "items": _ID, "minItems": 1}
_TEXT = {"type": "string", "minLength": 1}
Prompts = Annotated[
    Any,
    AfterValidator(_as_prompts),
    Shown(
        {"anyOf": [_TEXT, _IDS, {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": PROMPTS},
                   {"type": "array", "items": _IDS, "minItems": 1, "maxItems": PROMPTS}]}
    ),
]  # fmt: skip
Token = Annotated[int, Field(ge=0, lt=1 << 31, json_schema_extra={"format": TOKEN_FORMAT})]
Tokens = Annotated[list[Token], Field(min_length=1, max_length=1 << 22, fail_fast=True)]
StopString = Annotated[str, Field(min_length=1, max_length=STOP_CHARACTERS)]
Stops = Annotated[list[StopString], Field(max_length=STOPS, fail_fast=True), BeforeValidator(_as_list)]
Name = Annotated[str, Field(max_length=NAME)]


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool = False  # there is none in either case
    continuous_usage_stats: Literal[False] = False


class SamplingBody(Body):
    """What completions and chat completions have in common."""

    model: Name | None = None
    temperature: Temperature = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] = 0
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    stop: Stops = Field(default_factory=list)
    stop_token_ids: Annotated[list[Token], Field(max_length=STOPS, fail_fast=True)] | None = None
    ignore_eos: bool = False
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    n: Annotated[int, Field(ge=1, le=CHOICES)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False

    def params(
        self, max_tokens: int, *, stop: Sequence[str], ends: Sequence[int], seed: int
    ) -> SamplingParams:
        """Of one completion.

        Args:
            stop, ends: where it stops.
        """
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(self.top_k, 0),  # vLLM's way to switch it off is -1
            min_p=self.min_p,
            stop=tuple(stop),
            stop_token_ids=tuple(ends),
            seed=seed,
        )


class CompletionBody(SamplingBody):
    prompt: Prompts
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] = 16
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool = False
    best_of: Annotated[int, Field(ge=1, le=CHOICES)] | None = None


class ScoreBody(Body):
    tokens: Tokens
    start: Annotated[int, Field(ge=1, lt=1 << 31)]


class FolderBody(Body):
    path: Annotated[str, Field(min_length=1, max_length=4096)]
    digest: Annotated[str, Field(min_length=1, max_length=128)]


class LoadBody(Body):
    version: Annotated[int, Field(ge=0, lt=1 << 62)]
    folder: FolderBody
    owner: Annotated[str, Field(max_length=4096)] = ""


class UpdateBody(Body):
    weight_dir: Annotated[str, Field(min_length=1, max_length=4096)]


class EmptyBody(Body):
    pass


def _as_text(value: Any) -> str:
    """A content: a text, or parts of type text."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or len(value) > MESSAGES:
        raise ValueError("expected a text or an array of text parts")
    for part in value:
        if not isinstance(part, dict) or part.get("type") not in ("text", "input_text"):
            kind = part.get("type") if isinstance(part, dict) else part
            raise ValueError(
                f"got a part of type {shown(kind)}, expected text: there are no images or sounds"
            )
        if set(part) != {"type", "text"} or not isinstance(part["text"], str):
            raise ValueError('expected each part as {"type": "text", "text": "..."}')
    return "".join(part["text"] for part in value)


_PART = {"type": "object", "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
         "required": ["type", "text"], "additionalProperties": False}  # fmt: skip
Content = Annotated[
    str,
    BeforeValidator(_as_text),
    Shown({"anyOf": [{"type": "string"}, {"type": "array", "items": _PART, "maxItems": MESSAGES}]}),
]
ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class CalledBody(Body):
    name: ToolName
    arguments: Annotated[str, Field(max_length=TEXT)]


class CallBody(Body):
    id: Name = ""
    type: Literal["function"] = "function"
    index: int | None = None
    function: CalledBody


class MessageBody(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    reasoning_content: Annotated[str, Field(max_length=TEXT)] | None = None
    reasoning: Annotated[str, Field(max_length=TEXT)] | None = None
    tool_calls: Annotated[list[CallBody], Field(max_length=TOOLS, fail_fast=True)] | None = None
    tool_call_id: Name | None = None
    name: Name | None = None
    refusal: Name | None = None
    annotations: Annotated[list[Any], Field(max_length=TOOLS)] | None = None
    audio: None = None
    function_call: None = None


class FunctionBody(Body):
    name: ToolName
    description: Annotated[str, Field(max_length=TOOL_BYTES)] | None = None
    parameters: dict[str, Any] | None = None
    strict: Literal[False] | None = None


class ToolBody(Body):
    type: Literal["function"]
    function: FunctionBody


class ChatBody(SamplingBody):
    messages: Annotated[list[MessageBody], Field(min_length=1, max_length=MESSAGES, fail_fast=True)]
    tools: Annotated[list[ToolBody], Field(max_length=TOOLS, fail_fast=True)] = Field(default_factory=list)
    tool_choice: Literal["auto", "none"] = "auto"
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
