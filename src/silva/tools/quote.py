"""Texts from outside as a model may read them: quoted, of limited length, and without anything that acts.

A page can hold text that a chat template, a parser of tool calls or a grader would obey: `<|im_end|>`,
`<tool_call>`, `<answer>`, `[INST]`. `defuse` changes the bracket that opens such a tag, so that it is read
and does nothing. It cannot stop a page from asking for something in words.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from silva.tools.function import cut

# Control characters, text directions, and characters without a glyph, with which words can be hidden from a
# person but not from a model, or a tag from a filter. Joiners (U+200C, U+200D) stay, for Persian and emoji.
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u00ad\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff"
    "\ufff0-\ufffb\ud800-\udfff\U000e0000-\U000e0fff]"
)
_BREAK = re.compile("\r\n?|[\u0085\u2028\u2029]")
_TAG = re.compile(r"<(?![\s\d=<>-])")  # not "a < b", "x<5", "<=", "<-"
_SQUARE = re.compile(r"\[(/?[A-Z][A-Z_]{2,}|[gs]MASK)\]")  # [INST], [/TOOL_RESULTS], [gMASK]

TITLE, ADDRESS = 200, 300  # characters of them that are shown


def defuse(text: str) -> str:
    """The text without control characters, and with ‹ for each < that may open a tag: `‹tool_call>`."""
    text = _INVISIBLE.sub("", _BREAK.sub("\n", text))
    return _SQUARE.sub(r"(\1)", _TAG.sub("‹", text))


def defused(value: Any) -> Any:
    """The same for all texts in plain JSON, keys included."""
    if isinstance(value, str):
        return defuse(value)
    if isinstance(value, list | tuple):
        return [defused(item) for item in value]
    if isinstance(value, Mapping):
        return {defuse(key): defused(item) for key, item in value.items()}
    return value


def one_line(text: str, max_chars: int) -> str:
    """Defused, on one line, and cut with "..."."""
    line = " ".join(defuse(text).split())
    return line if len(line) <= max_chars else line[:max_chars].rstrip() + "..."


def quoted(text: str, max_chars: int) -> str:
    """Defused, each line as a quotation of Markdown, empty ones left out; a cut is announced below."""
    lines = [line.rstrip() for line in defuse(text).splitlines()]
    shown = cut("\n".join(f"> {line}" for line in lines if line), max_chars)
    return shown


def listed(results: Iterable[tuple[str, str, str]], max_text: int) -> str:
    """Numbered results of (id or address, title, text): a heading, and one line of quotation each."""
    blocks = []
    for number, (identity, title, text) in enumerate(results, 1):
        heading = one_line(title, TITLE) or one_line(identity, TITLE)
        address = f" ({one_line(identity, ADDRESS)})" if identity.startswith(("http://", "https://")) else ""
        if not title and address:
            heading, address = one_line(identity, ADDRESS), ""
        blocks.append(f"{number}. {heading}{address}\n> {one_line(text, max_text)}")
    return "\n\n".join(blocks)
