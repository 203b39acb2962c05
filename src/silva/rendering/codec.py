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

from tokenizers.pre_tokenizers import Metaspace
from tokenizers.pre_tokenizers import Sequence as Sequences

from silva.thoughts import FAMILIES

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

# Markup of replies: never a means of control, even where a tokenizer registers it as special.
MARKUP = frozenset(
    [f"<{slash}{name}>" for slash in ("", "/") for name in ("tool_call", "tool_response", "tools")]
    + [tag for marks in FAMILIES if not marks.answer for tag in marks[:2]]
)
_HEADER = re.compile(r"<[|｜].*[|｜]>")
# Unicode non-characters, so that no ordinary text holds them; those it does hold are escaped too.
_ESCAPE, _ITSELF, _NOTHING = "\ufdd0", "\ufdd1", "\ufdd2"
MARK = _ESCAPE + "\ufdd3"  # never occurs in escaped content
_BYTE = re.compile("<0x([0-9A-F]{2})>")
CACHED_CHARACTERS = 4096  # longer texts rarely come twice


class TokenCodec:
    """Encodes and decodes with a private copy of a fast tokenizer (whose settings are then our own)."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._backend = copy.deepcopy(tokenizer.backend_tokenizer)
        self._backend.encode_special_tokens = True  # special tokens in plain text stay plain text
        self._backend.no_truncation()
        self._backend.no_padding()
        self._beginning = _as_continued(self._backend)
        # The episodes of a task begin with the same text, those of an environment describe the same tools.
        self._cached = lru_cache(1024)(self._tokenise)
        # Some headers and marks of templates are not called special: those of DeepSeek and Kimi.
        special = {
            i: t
            for i, t in tokenizer.added_tokens_decoder.items()
            if t.content and (t.special or _HEADER.fullmatch(t.content))
        }
        self.ids = {token.content: i for i, token in special.items()}
        self.control = frozenset(i for i, token in special.items() if token.content not in MARKUP)
        longest_first = sorted(special.values(), key=lambda token: -len(token.content))
        self._special = _alternatives(
            # A token may swallow the whitespace around it (Phi); plain tokenising does the same.
            r"\s*" * t.lstrip + re.escape(t.content) + r"\s*" * t.rstrip
            for t in longest_first
        )
        self._control = _alternatives(re.escape(t.content) for t in longest_first if t.content not in MARKUP)
        self._spells_bytes = self._joins("\u00c3", "\u00a9")  # as GPT-2's tokens do
        self._has_bytes = self._joins("<0xC3>", "<0xA9>")  # as Llama's do for what is not in the vocabulary

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

    def encode_escaped(self, text: str, *, first: bool = False) -> list[int]:
        """Tokens of a rendered text: special tokens written by the template, the rest plain.

        Args:
            first: it begins a dialogue. Some tokenizers put a space before a first word, and before no other.
        """
        tokens: list[int] = []
        position = 0
        for match in self._special.finditer(text):
            piece = text[position : match.start()]
            tokens += self._plain(piece, first=first and not position)
            tokens.append(self._id(match[0]))
            position = match.end()
        return [*tokens, *self._plain(text[position:], first=first and not position)]

    def encode(self, text: str) -> list[int]:
        """Tokens of a piece of plain text; no control tokens come out of it."""
        return self.encode_escaped(self.escape(text))

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of any tokens at all: ids outside the vocabulary give nothing, broken UTF-8 gives U+FFFD."""
        return self._backend.decode([t for t in tokens if 0 <= t < 2**32], skip_special_tokens=False)

    def exists(self, token: int) -> bool:
        """Whether the vocabulary has it; what it lacks has no text."""
        return 0 <= token < 2**32 and self._backend.id_to_token(token) is not None

    def is_byte(self, token: int) -> bool:
        """Whether it is one byte, the text of which depends on all bytes around it."""
        return self._has_bytes and _BYTE.fullmatch(self._backend.id_to_token(token) or "") is not None

    def bytes_of(self, token: int, before: Sequence[int] = ()) -> bytes:
        """UTF-8 of a token after others, or its part of a character. Joined, they are those of the text."""
        if not self.exists(token):
            return b""
        name: str = self._backend.id_to_token(token)
        if self._spells_bytes:
            spelled = [_SPELLED.get(letter) for letter in name]
            return name.encode() if None in spelled else bytes(b for b in spelled if b is not None)
        if self._has_bytes and (byte := _BYTE.fullmatch(name)):
            return bytes.fromhex(byte[1])
        last = [each for each in before if self.exists(each)][-1:]  # some decoders write a space between
        return self.decode([*last, token])[len(self.decode(last)) :].encode()

    def _joins(self, *names: str) -> bool:
        """Whether the decoder makes one character of tokens with these names."""
        decoder = self._backend.decoder
        return decoder is not None and decoder.decode(list(names)) == "\u00e9"

    def leading_special(self, text: str) -> tuple[int, str] | None:
        """(id, text after it) of the special token `text` begins with, whitespace aside."""
        match = self._special.search(text)
        if match is None or text[: match.start()].strip():
            return None
        return self._id(match[0]), text[match.end() :]

    def _id(self, matched: str) -> int:
        return self.ids[matched] if matched in self.ids else self.ids[matched.strip()]

    def _plain(self, text: str, *, first: bool) -> Sequence[int]:
        if not text:
            return ()
        if first and self._beginning is not None:
            return self._beginning.encode(self.unescape(text), add_special_tokens=False).ids
        return self._cached(text) if len(text) <= CACHED_CHARACTERS else self._tokenise(text)

    def _tokenise(self, text: str) -> tuple[int, ...]:
        return tuple(self._backend.encode(self.unescape(text), add_special_tokens=False).ids)


def _as_continued(backend: Tokenizer) -> Tokenizer | None:
    """Make `backend` tokenise every text as one that goes on; returns one for first texts, if it differs."""
    part: Any = backend.pre_tokenizer
    nested = isinstance(part, Sequences)
    parts = list(part) if nested else [part]
    spaces = [each for each in parts if isinstance(each, Metaspace)]
    if not any(each.prepend_scheme == "first" for each in spaces):
        return None
    beginning = copy.deepcopy(backend)
    for each in spaces:
        each.prepend_scheme = "never"
    return beginning


def _alternatives(patterns: Any) -> re.Pattern[str]:
    return re.compile("|".join(patterns) or r"(?!)")


def _spelled_bytes() -> dict[str, int]:
    """GPT-2's letters for bytes: printable ones are themselves, the others follow each other from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


_SPELLED = _spelled_bytes()
