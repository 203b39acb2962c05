"""What a row of a data set asks: the shapes of TRL, verl, ARPO, PRIME-RL, ShareGPT and plain tables.

    {"prompt": "2 + 2?" or [{"role": ..., "content": ...}], "answer": "4", ...}          TRL, PRIME-RL
    {"question" | "problem" | "query" | "instruction" [+ "input"]: ..., "answer" | ...}  plain tables
    {"prompt": [...], "reward_model": {"ground_truth": ...}, "data_source": ..., ...}    verl, ARPO
    {"messages": [..., {"role": "assistant", "content": "4"}]}                           a dialogue
    {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", ...}]}           ShareGPT

The last answer of a dialogue is the answer that is expected; earlier ones belong to the prompt, and so do the
columns `system` and `history` (pairs of what was asked and answered before). Recorded tool calls become text
in the form that models write them in. Names of columns are compared without regard to case. All other columns
are passed on as they are, for rewards.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from silva.data.rows import Row
from silva.errors import ConfigError, one_line
from silva.rendering.openai import ROLES, Malformed, message_of
from silva.rendering.tool_calls import write_calls
from silva.types import Message, Role

PROMPTS = ("prompt", "question", "problem", "query", "instruction")
ANSWERS = ("answer", "solution", "ground_truth", "golden_answers", "final answer", "target", "completion",
           "response", "output", "label")  # fmt: skip
ALIASES = "answer_aliases"  # of MuSiQue: other texts that are as right
GROUND_TRUTH = "reward_model.ground_truth"
DIALOGUES = ("conversations", "messages")
SYSTEMS = ("system", "system_prompt")
AFTER = "####"  # stands before the number in GSM8K's answers
SHOWN_ROWS = 3
SHOWN_CHARS = 100  # of a prompt or an answer
_MARKED = re.compile(rf"\n{AFTER}\s*\S")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


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
        system, history: columns that come before the prompt.
    """

    name: str
    prompt: str
    answer: str = ""
    more: str = ""
    after: str = ""
    system: str = ""
    history: str = ""

    def __str__(self) -> str:
        prompt = " and ".join(filter(None, (self.system, self.history, self.prompt, self.more)))
        if self.answer == self.prompt:
            before = f" after `{self.system}`" if self.system else ""
            return f"{self.name}: the dialogue in `{self.prompt}`{before}, whose last answer is expected"
        answer = f"answer in `{self.answer}`" if self.answer else "no answer"
        return f"{self.name}: prompt in `{prompt}`, {answer}" + (f" after {self.after}" if self.after else "")


def recognised(row: Row, prompt: str = "", answer: str = "", after: str = "") -> Shape:
    """The shape of rows such as this one. What is given by key is not guessed.

    Raises:
        ConfigError: no column looks like a prompt, or a given key is not there.
    """
    found = _guessed(row) if not prompt else Shape("keys", prompt, _answer_in(row, prompt))
    found = replace(found, answer=answer or found.answer, after=after or found.after)
    for key in filter(None, (found.prompt, found.answer)):
        value_at(row, key)
    return found


def before(row: Row, shape: Shape) -> Shape:
    """`shape` with the columns of this row that belong to the prompt: another row may have had fewer."""
    values, table = row.values, shape.prompt not in DIALOGUES
    more = "input" if shape.prompt.casefold() == "instruction" and "input" in values else ""
    history = (_first(values, ("history",)) or "") if table else ""
    history = history if history and _pairs(values[history]) is not None else ""
    return replace(shape, more=more, system=_text_in(values, SYSTEMS), history=history)


def problem(row: Row, shape: Shape) -> Problem:
    """What a row asks.

    Raises:
        ConfigError: prompt or answer is missing or is of another kind; it names file, line and key.
    """
    messages = [_as_text(message) for message in asked(row, shape)]
    answer: Any = None
    if shape.answer == shape.prompt:
        if len(value_at(row, shape.prompt)) < 2 or messages[-1].role != "assistant":
            raise wrong(row, shape.prompt, "a dialogue that ends with an answer", messages[-1].role)
        answer = messages.pop().content
    elif shape.answer:
        answer = value_at(row, shape.answer)
        if is_dialogue(answer):  # TRL's completion
            answer = _as_text(messages_at(row, shape.answer)[-1]).content
    if shape.after:
        if not isinstance(answer, str) or shape.after not in answer:
            raise wrong(row, shape.answer, f"text with {shape.after!r}", answer)
        answer = answer.rpartition(shape.after)[2].strip()
    if shape.answer and (answer is None or (isinstance(answer, str) and not answer.strip())):
        raise wrong(row, shape.answer, "an answer", answer)
    if isinstance(answer, str) and (aliases := row.values.get(ALIASES)):
        if not isinstance(aliases, list):
            raise wrong(row, ALIASES, "a list of texts", aliases)
        answer = [answer, *aliases]
    before = {shape.prompt.partition(".")[0], shape.more, shape.system, shape.history}
    used = before | {shape.answer}
    return Problem(tuple(messages), answer, {k: v for k, v in row.values.items() if k not in used})


def asked(row: Row, shape: Shape) -> tuple[Message, ...]:
    """The messages of the prompt, after the columns that come before it.

    Raises:
        ConfigError: as `problem`.
    """
    messages = messages_at(row, shape.prompt)
    if shape.more and (more := row.values.get(shape.more)):
        last = messages[-1]
        messages = (*messages[:-1], replace(last, content=f"{last.content}\n{more}"))
    return (*_system(row, shape, messages), *_history(row, shape), *messages)


def messages_at(row: Row, key: str) -> tuple[Message, ...]:
    """A text as a user's message, or a list of messages, with their calls and thoughts.

    Raises:
        ConfigError: there is something else; it names the part.
    """
    value = value_at(row, key)
    if isinstance(value, str):
        if not value.strip():
            raise wrong(row, key, "text or messages", value)
        return (Message("user", value),)
    if not isinstance(value, Sequence) or not value:
        raise wrong(row, key, "text or messages", value)
    messages = [_message(row, f"{key}.{index}", entry) for index, entry in enumerate(value)]
    names = {call.id: call.name for message in messages for call in message.tool_calls if call.id}
    for index, message in enumerate(messages):
        if message.role == "tool" and message.name is None:
            name = names.get(str(value[index].get("tool_call_id")))
            messages[index] = replace(message, name=name)
    return tuple(messages)


def is_dialogue(value: Any) -> bool:
    """Whether a column holds messages."""
    return isinstance(value, Sequence) and bool(value) and all(map(_is_message, value))


def wrong(row: Row, key: str, expected: str, got: Any) -> ConfigError:
    return ConfigError(f"{row.where}: {key}: got {repr(got)[:80]}, expected {expected}")


def shown(label: str, shape: Shape, problems: Sequence[Problem]) -> list[str]:
    """How rows were understood, for people: in words, with three of them, and with what looks wrong."""
    lines = [f"{label}: {len(problems):,} rows, read as {shape}"]
    for each in problems[:SHOWN_ROWS]:
        answer = "" if each.answer is None else f" -> {one_line(str(each.answer), SHOWN_CHARS)}"
        lines.append(f"  {one_line(each.messages[-1].content, SHOWN_CHARS)}{answer}")
    texts = ("\n".join(message.content for message in each.messages) for each in problems)
    if found := [text[match.start() :][:12] for text in texts if (match := _CONTROL.search(text))]:
        lines.append(f"{label}: {len(found):,} prompts hold control characters, such as {found[0]!r}")
    if any(each.columns.get("tools") for each in problems[:1000]):
        lines.append(f"{label}: the column `tools` is not offered to the model; the key `tools` is")
    return lines


def _guessed(row: Row) -> Shape:
    values = row.values
    reward_model = values.get("reward_model")
    if isinstance(reward_model, Mapping) and "ground_truth" in reward_model and "prompt" in values:
        return Shape("verl", "prompt", GROUND_TRUTH)
    for key in DIALOGUES:
        if isinstance(values.get(key), list):
            answer = _answer_in(row, key) or key
            name = "ShareGPT" if key == "conversations" else "dialogue"
            return before(row, Shape(name, key, answer))
    prompt = _first(values, PROMPTS)
    if prompt is None:
        raise ConfigError(
            f"{row.where}: no column looks like a prompt: got {', '.join(map(repr, values)) or 'none'}; "
            "set `prompt` to the name of one (and `answer`, where there is one)"
        )
    answer = _answer_in(row, prompt)
    text = values.get(answer)
    after = AFTER if isinstance(text, str) and _MARKED.search(text) else ""
    return before(row, Shape("table", prompt, answer, after=after))


def _answer_in(row: Row, prompt: str) -> str:
    others = {key: value for key, value in row.values.items() if key != prompt}
    return _first(others, ANSWERS) or ""


def _first(values: Mapping[str, Any], names: Sequence[str]) -> str | None:
    by_name = {key.casefold(): key for key in reversed(list(values))}
    return next((by_name[name] for name in names if name in by_name), None)


def _text_in(values: Mapping[str, Any], names: Sequence[str]) -> str:
    """The first of these columns, if it holds text or nothing."""
    key = _first(values, names)
    return key if key is not None and isinstance(values[key], str | None) else ""


def _pairs(value: Any) -> list[tuple[str, str]] | None:
    """What was asked and answered before; None if it is something else."""
    pairs = [] if value is None else value
    if not isinstance(pairs, Sequence) or isinstance(pairs, str):
        return None
    pairs = [tuple(pair) if isinstance(pair, Sequence) else () for pair in pairs]
    return pairs if all(len(pair) == 2 and all(isinstance(x, str) for x in pair) for pair in pairs) else None


def _system(row: Row, shape: Shape, messages: Sequence[Message]) -> list[Message]:
    text = row.values.get(shape.system) if shape.system else None
    if text is not None and not isinstance(text, str):
        raise wrong(row, shape.system, "text", text)
    return [Message("system", text)] if text and all(m.role != "system" for m in messages) else []


def _history(row: Row, shape: Shape) -> list[Message]:
    value = row.values.get(shape.history) if shape.history else None
    if (pairs := _pairs(value)) is None:
        raise wrong(row, shape.history, "pairs of a question and its answer", value)
    roles: tuple[Role, Role] = ("user", "assistant")
    return [Message(role, text) for pair in pairs for role, text in zip(roles, pair, strict=True)]


def value_at(row: Row, key: str) -> Any:
    """A column; a dotted key is for a nested one.

    Raises:
        ConfigError: it is not there, or JSON cannot hold it.
    """
    value: Any = row.values
    if key in row.values:  # a column may have a dot in its name
        return row.values[key]
    if kind := row.left_out.get(key) or row.left_out.get(key.partition(".")[0]):
        raise ConfigError(f"{row.where}: {key} holds {kind}, expected text, numbers, lists or objects")
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise ConfigError(
                f"{row.where}: no {key!r}: got {', '.join(map(repr, row.values)) or 'no columns'}"
            )
        value = value[part]
    return value


def _message(row: Row, key: str, entry: Any) -> Message:
    try:
        return message_of(entry)
    except Malformed as error:
        raise wrong(row, key + error.where, error.expected, error.got) from None


def _as_text(message: Message) -> Message:
    written = write_calls(message.tool_calls)
    return Message(message.role, "\n".join(filter(None, (message.content, written))))


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and (value.get("role") in ROLES or {"from", "value"} <= value.keys())
