"""Text <-> tokens in which the words of a message can never become control tokens.

Message content is escaped before a chat template sees it. In the rendered text every special token
that still matches was therefore written by the template: there the text is cut, the escapes are taken
out, and what lies between is tokenised as plain text, in one go. For harmless content this gives
exactly the tokens of the ordinary way; a user who types "<|im_end|>" gets it spelled out.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Markup of replies: never a means of control, even where a tokenizer registers it as special.
MARKUP = frozenset(
    f"<{slash}{name}>" for slash in ("", "/") for name in ("think", "tool_call", "tool_response", "tools")
)
# Unicode non-characters, so that no ordinary text holds them; those it does hold are escaped too.
_ESCAPE, _ITSELF, _NOTHING = "\ufdd0", "\ufdd1", "\ufdd2"
MARK = _ESCAPE + "\ufdd3"  # never occurs in escaped content
CACHED_CHARACTERS = 4096  # longer texts rarely come twice


class Codec:
    """Encodes and decodes with a private copy of a fast tokenizer (whose settings are then our own)."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._backend = copy.deepcopy(tokenizer.backend_tokenizer)
        self._backend.encode_special_tokens = True  # special tokens in plain text stay plain text
        self._backend.no_truncation()
        self._backend.no_padding()
        # The episodes of a task begin with the same text, those of an environment describe the same tools.
        self._cached = lru_cache(1024)(self._tokenise)
        special = {i: t for i, t in tokenizer.added_tokens_decoder.items() if t.special and t.content}
        self.ids = {token.content: i for i, token in special.items()}
        self.control = frozenset(i for i, token in special.items() if token.content not in MARKUP)
        longest_first = sorted(special.values(), key=lambda token: -len(token.content))
        self._special = _alternatives(
            # A token may swallow the whitespace around it (Phi); plain tokenising does the same.
            r"\s*" * t.lstrip + re.escape(t.content) + r"\s*" * t.rstrip
            for t in longest_first
        )
        self._control = _alternatives(re.escape(t.content) for t in longest_first if t.content not in MARKUP)

    def escape(self, value: Any) -> Any:
        """`value` (a text, or JSON holding texts) with control tokens made harmless; `unescape` undoes it."""
        if isinstance(value, str):
            if not value.isascii():  # lone surrogates cannot be tokenised
                value = value.encode("utf-8", "replace").decode("utf-8")
            value = value.replace(_ESCAPE, _ESCAPE + _ITSELF)
            return self._control.sub(lambda m: (_ESCAPE + _NOTHING).join(m[0]), value)
        if isinstance(value, Mapping):
            return {self.escape(key): self.escape(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.escape(item) for item in value]
        return value

    def unescape(self, text: str) -> str:
        return text.replace(_ESCAPE + _NOTHING, "").replace(_ESCAPE + _ITSELF, _ESCAPE)

    def encode_escaped(self, text: str) -> list[int]:
        """Tokens of a rendered text: special tokens written by the template, the rest plain."""
        tokens: list[int] = []
        position = 0
        for match in self._special.finditer(text):
            tokens += self._plain(text[position : match.start()])
            tokens.append(self._id(match[0]))
            position = match.end()
        tokens += self._plain(text[position:])
        return tokens

    def encode(self, text: str) -> list[int]:
        """Tokens of a piece of plain text; no control tokens come out of it."""
        return self.encode_escaped(self.escape(text))

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of any tokens at all: ids outside the vocabulary give nothing, broken UTF-8 gives U+FFFD."""
        return self._backend.decode([t for t in tokens if 0 <= t < 2**32], skip_special_tokens=False)

    def leading_special(self, text: str) -> tuple[int, str] | None:
        """(id, text after it) of the special token `text` begins with, whitespace aside."""
        match = self._special.search(text)
        if match is None or text[: match.start()].strip():
            return None
        return self._id(match[0]), text[match.end() :]

    def _id(self, matched: str) -> int:
        return self.ids[matched] if matched in self.ids else self.ids[matched.strip()]

    def _plain(self, text: str) -> Sequence[int]:
        if not text:
            return ()
        return self._cached(text) if len(text) <= CACHED_CHARACTERS else self._tokenise(text)

    def _tokenise(self, text: str) -> tuple[int, ...]:
        return tuple(self._backend.encode(self.unescape(text), add_special_tokens=False).ids)


def _alternatives(patterns: Any) -> re.Pattern[str]:
    return re.compile("|".join(patterns) or r"(?!)")
