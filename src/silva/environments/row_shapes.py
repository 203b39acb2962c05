"""What a row of a data set asks: the shapes of TRL, verl, ARPO, PRIME-RL, ShareGPT and plain tables.

    {"prompt": "2 + 2?" or [{"role": ..., "content": ...}], "answer": "4", ...}          TRL, PRIME-RL
    {"question" | "problem" | "query" | "instruction" [+ "input"]: ..., "answer" | ...}  plain tables
    {"prompt": [...], "reward_model": {"ground_truth": ...}, "data_source": ..., ...}    verl, ARPO
    {"messages": [..., {"role": "assistant", "content": "4"}]}                           a dialogue
    {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", ...}]}           ShareGPT

The last answer of a dialogue is the answer that is expected; earlier ones belong to the prompt. Names of
columns are compared without regard to case. All other columns are passed on as they are, for rewards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from silva.environments.rows import Row
from silva.errors import ConfigError
from silva.types import Message, Role

PROMPTS = ("prompt", "question", "problem", "query", "instruction")
ANSWERS = ("answer", "solution", "ground_truth", "final answer", "target", "completion", "response", "output",
           "label")  # fmt: skip
GROUND_TRUTH = "reward_model.ground_truth"
AFTER = "####"  # stands before the number in GSM8K's answers
_SPEAKERS: Mapping[str, Role] = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    "chatgpt": "assistant", "bot": "assistant", "tool": "tool", "function": "tool", "observation": "tool",
}  # fmt: skip


class Problem(NamedTuple):
    """`columns` are the others of the row; `answer` is None if the row has none."""

    messages: tuple[Message, ...]
    answer: Any
    columns: Mapping[str, Any]


@dataclass(frozen=True)
class Shape:
    """Where prompt and answer stand, as dotted keys.

    Attributes:
        answer: "" if rows have none; the prompt's own key if it is the last answer of a dialogue.
        more: a column that is added to the prompt, on a line of its own.
        after: the answer is what follows the last occurrence of this text.
    """

    name: str
    prompt: str
    answer: str = ""
    more: str = ""
    after: str = ""

    def __str__(self) -> str:
        prompt = " and ".join(filter(None, (self.prompt, self.more)))
        if self.answer == self.prompt:
            return f"{self.name}: the dialogue in `{self.prompt}`, whose last answer is expected"
        answer = f"answer in `{self.answer}`" if self.answer else "no answer"
        return f"{self.name}: prompt in `{prompt}`, {answer}" + (f" after {self.after}" if self.after else "")


def recognised(row: Row, prompt: str = "", answer: str = "", after: str = "") -> Shape:
    """The shape of rows such as this one. What is given by key is not guessed.

    Raises:
        ConfigError: no column looks like a prompt, or a given key is not there.
    """
    found = _guessed(row) if not prompt else Shape("keys", prompt, _answer_in(row, prompt))
    found = Shape(found.name, found.prompt, answer or found.answer, found.more, after or found.after)
    for key in filter(None, (found.prompt, found.answer)):
        _at(row, key)
    return found


def problem(row: Row, shape: Shape) -> Problem:
    """What a row asks.

    Raises:
        ConfigError: prompt or answer is missing or is of another kind; it names file, line and key.
    """
    messages, answer = _messages(row, shape.prompt), None
    if shape.more and (more := row.values.get(shape.more)):
        last = messages[-1]
        messages = (*messages[:-1], Message(last.role, f"{last.content}\n{more}"))
    if shape.answer == shape.prompt:
        if len(messages) < 2 or messages[-1].role != "assistant":
            raise _wrong(row, shape.prompt, "a dialogue that ends with an answer", messages[-1].role)
        messages, answer = messages[:-1], messages[-1].content
    elif shape.answer:
        answer = _at(row, shape.answer)
    if shape.after:
        if not isinstance(answer, str) or shape.after not in answer:
            raise _wrong(row, shape.answer, f"text with {shape.after!r}", answer)
        answer = answer.rpartition(shape.after)[2].strip()
    if shape.answer and (answer is None or answer == ""):
        raise _wrong(row, shape.answer, "an answer", answer)
    used = {key.partition(".")[0] for key in (shape.prompt, shape.more)} | {shape.answer}
    return Problem(messages, answer, {k: v for k, v in row.values.items() if k not in used})


def _guessed(row: Row) -> Shape:
    values = row.values
    reward_model = values.get("reward_model")
    if isinstance(reward_model, Mapping) and "ground_truth" in reward_model and "prompt" in values:
        return Shape("verl", "prompt", GROUND_TRUTH)
    for key in ("conversations", "messages"):
        if isinstance(values.get(key), list):
            answer = _answer_in(row, key) or key
            return Shape("ShareGPT" if key == "conversations" else "dialogue", key, answer)
    prompt = _first(values, PROMPTS)
    if prompt is None:
        raise ConfigError(
            f"{row.where}: no column looks like a prompt: got {', '.join(map(repr, values)) or 'none'}; "
            "set `prompt` to the name of one (and `answer`, where there is one)"
        )
    answer = _answer_in(row, prompt)
    more = "input" if prompt.casefold() == "instruction" and "input" in values else ""
    text = values.get(answer)
    marked = isinstance(text, str) and f"\n{AFTER} " in text
    return Shape("table", prompt, answer, more, AFTER if marked else "")


def _answer_in(row: Row, prompt: str) -> str:
    others = {key: value for key, value in row.values.items() if key != prompt}
    return _first(others, ANSWERS) or ""


def _first(values: Mapping[str, Any], names: Sequence[str]) -> str | None:
    by_name = {key.casefold(): key for key in reversed(list(values))}
    return next((by_name[name] for name in names if name in by_name), None)


def _at(row: Row, key: str) -> Any:
    value: Any = row.values
    if key in row.values:  # a column may have a dot in its name
        return row.values[key]
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise ConfigError(
                f"{row.where}: no {key!r}: got {', '.join(map(repr, row.values)) or 'no columns'}"
            )
        value = value[part]
    return value


def _messages(row: Row, key: str) -> tuple[Message, ...]:
    value = _at(row, key)
    if isinstance(value, str):
        if not value.strip():
            raise _wrong(row, key, "text or messages", value)
        return (Message("user", value),)
    if not isinstance(value, Sequence) or not value:
        raise _wrong(row, key, "text or messages", value)
    return tuple(_message(row, f"{key}.{index}", entry) for index, entry in enumerate(value))


def _message(row: Row, key: str, entry: Any) -> Message:
    if not isinstance(entry, Mapping):
        raise _wrong(row, key, "a message", entry)
    speaker, content = entry.get("role", entry.get("from")), entry.get("content", entry.get("value"))
    if not isinstance(speaker, str) or speaker not in _SPEAKERS:
        raise _wrong(row, f"{key}.role", f"one of {', '.join(_SPEAKERS)}", speaker)
    if isinstance(content, Sequence) and not isinstance(content, str):  # parts, as chat APIs have them
        parts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        content = None if None in parts else "".join(parts)  # type: ignore[arg-type]
    if not isinstance(content, str):
        raise _wrong(row, f"{key}.content", "text", content)
    return Message(_SPEAKERS[speaker], content)


def _wrong(row: Row, key: str, expected: str, got: Any) -> ConfigError:
    shown = repr(got)
    return ConfigError(f"{row.where}: {key}: got {shown[:80]}, expected {expected}")
