"""What Silva makes of released chat templates, one line each: `python -m tests.rendering.survey FOLDER`.

The templates themselves are not ours to keep: vLLM, llama.cpp (models/templates) and TRL (trl/chat_templates)
publish them. Each is given to a byte-level tokenizer with the marks that occur in it.
"""

from __future__ import annotations

import datetime
import json
import re
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.rendering.templates import byte_tokenizer
from tokenizers import AddedToken

from silva.errors import RenderingError
from silva.rendering.call_forms import FORMS
from silva.rendering.openai import as_function
from silva.rendering.renderer import Renderer
from silva.rendering.tool_calls import write_calls
from silva.thoughts import OPEN, join_reasoning
from silva.types import Message, ToolCall, ToolSpec

MARK = re.compile(
    r"<\|[^<>|'\"\s]*\|?>|<[a-z_]+\|>|<｜[^<>｜]*｜>|\[/?[A-Z_]{3,}\]|\[gMASK\]|</?s>|<(?:start|end)_of_turn>"
    r"|<(?:sop|bos|eos|sep)>|<(?:begin|end)_of_[a-z_]*>|<seed:[a-z:_]*>|\]~[a-z!]*\[?|\[e~\[|<SPECIAL_\d+>"
)
PROPERTIES = {name: {"type": kind, "description": "d"} for name, kind in
              {"city": "string", "days": "integer", "more": "object"}.items()}  # fmt: skip
TOOLS = [
    ToolSpec("weather", "W.", {"type": "object", "properties": PROPERTIES, "required": ["city"]}),
    ToolSpec("now", "N.", {"type": "object", "properties": {}, "required": []}),
]
CALLS = [
    ToolCall("weather", {"city": "Rome"}),
    ToolCall("weather", {"city": "Zürich “日本” 😀\n\"q\" 'a' \\ <b>&amp;"}),
    ToolCall("weather", {"city": "3", "days": 3}),
    ToolCall("weather", {"city": "a", "more": {"x": [1, None, True, "é"], "y": {}}}),
    ToolCall("now", {}),
]
SYSTEM, USER, THANKS = (
    Message("system", "Be brief."),
    Message("user", "How is it?"),
    Message("user", "Thanks."),
)


def survey(template: str) -> str:
    """The cells of a line: form, one call, two calls, thoughts, as the template's own, prefix."""
    tokenizer = byte_tokenizer(template)
    marks = [mark for mark in dict.fromkeys(MARK.findall(template)) if mark not in tokenizer.get_vocab()]
    tokenizer.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    try:
        made = Renderer(tokenizer)
    except RenderingError as error:
        return f"refused: {error}"
    prompt = made.context([SYSTEM, USER], TOOLS)
    one = [_read(made, prompt, [call], said, None) for call in CALLS for said in ("", "See.")]
    two = [_read(made, prompt, calls, "", None) for calls in (CALLS[:1] * 2, CALLS[3:])]
    thought = [_read(made, prompt, CALLS[:count], said, "hm") for count in (0, 1, 2) for said in ("See.", "")]
    kept, whole = _dialogue(made, tokenizer, CALLS[:1])
    form = made._features.form or f"({made._form})"
    opened = "opened" if made.opens_thought(prompt) else "free"
    cells = (all(one), all(two), all(thought), kept)
    return " | ".join((form, *("yes" if cell else "NO" for cell in cells), opened, whole))


def _read(
    made: Renderer, prompt: Sequence[int], calls: Sequence[ToolCall], said: str, thought: str | None
) -> bool:
    """Whether an expert's reply is read as what it says."""
    text = join_reasoning(thought, "\n".join(filter(None, (said, write_calls(calls)))))
    if thought is not None and made.opens_thought(prompt):
        text = text.removeprefix(OPEN)
    message = made.parse(made.script(text, prompt), prompt=prompt, tools=TOOLS)
    found = [(call.name, call.arguments) for call in message.tool_calls]
    right = found == [(call.name, call.arguments) for call in calls] and not message.errors
    return right and message.content == said and (message.reasoning or None) == thought


def _dialogue(made: Renderer, tokenizer: Any, calls: Sequence[ToolCall]) -> tuple[bool, str]:
    """Whether the whole is the parts, and what the template's own rendering of the dialogue says."""
    results = [Message("tool", '{"t": 20}', name=call.name) for call in calls]
    asks, answer = (
        Message("assistant", "", tool_calls=tuple(calls), id="1"),
        Message("assistant", "20.", id="2"),
    )
    messages = [SYSTEM, USER, asks, *results, answer, THANKS]
    tokens, sampled = made.context([SYSTEM, USER], TOOLS), dict[str, list[int]]()
    for id, said, shown in (("1", write_calls(calls), results), ("2", "20.", [THANKS])):
        sampled[id] = made.script(said, tokens)
        tokens += [*sampled[id], *made.extend(sampled[id], shown)]
    kept = made.context(messages, TOOLS, sampled=sampled) == tokens
    has = made._features
    if not has.form:
        return kept, "-"
    described = [as_function(tool) for tool in TOOLS] if has.tools else None
    own = tokenizer.apply_chat_template(
        [_openai(message, made) for message in made._entries.with_system(messages, TOOLS)],
        tools=described, tokenize=False, add_generation_prompt=True,
        strftime_now=datetime.date(2024, 7, 26).strftime,
    )  # fmt: skip
    again, parts = (made.decode(each) == own for each in (made.context(messages, TOOLS), tokens))
    return kept, "same" if again and parts else "rewrites" if again else "OTHER"


def _openai(message: Message, made: Renderer) -> dict[str, Any]:
    has, id = made._features, FORMS[made._form].call_id
    if message.role == "tool":
        extra = {"name": message.name, "tool_call_id": id(message.name or "", 0)}
        return {"role": "tool", "content": message.content, **extra}
    if not message.tool_calls:
        return {"role": message.role, "content": message.content}
    given = [(call.name, dict(call.arguments)) for call in message.tool_calls]
    functions = [
        {"name": name, "arguments": json.dumps(each) if has.arguments_as_text else each}
        for name, each in given
    ]
    calls = [{"type": "function", "id": id(f["name"], i), "function": f} for i, f in enumerate(functions)]
    return {"role": "assistant", "content": None if has.content_as_none else "", "tool_calls": calls}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print("template | form | a call | two calls | thoughts | prefix | thought | own rendering")
    for path in sorted(Path(sys.argv[1]).rglob("*.jinja")):
        print(f"{path.parent.name}/{path.stem} | {survey(path.read_text())}", flush=True)
