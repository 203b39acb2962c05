"""Text of tokens that come one after the other, without what later tokens can still change."""

from __future__ import annotations

from collections.abc import Sequence

from silva.rendering.codec import TokenCodec

BROKEN = "\ufffd"


class GrowingText:
    """Attributes: `text`, which begins the text of all tokens together. It never ends inside a character."""

    def __init__(self, codec: TokenCodec) -> None:
        self.text = ""
        self._codec = codec
        self._base = ""  # text up to the end of the first `_context` tokens of `_recent`
        self._recent: list[int] = []
        self._context = 0

    def add(self, tokens: Sequence[int]) -> None:
        """Decodes again from the last whole character on: a decoder may join a token with the one before."""
        self._recent += (token for token in tokens if self._codec.exists(token))
        count = len(self._recent)
        while count and self._codec.is_byte(self._recent[count - 1]):  # such a run is read as a whole
            count -= 1
        if count <= self._context:
            return
        before, known = self._recent[: self._context], self._recent[:count]
        new = self._codec.decode(known)[len(self._codec.decode(before)) :]
        whole = new.rstrip(BROKEN)  # it may be the beginning of a character
        self.text = self._base + whole
        if whole == new:
            self._base, self._recent, self._context = self.text, self._recent[count - 1 :], 1


def before(text: str, ends: Sequence[str]) -> str:
    """`text` up to the first place where one of `ends` stands or may have begun."""
    found = [place for end in ends if (place := text.find(end)) >= 0]
    return text[: min(found)] if found else before_partial(text, ends)


def before_partial(text: str, ends: Sequence[str]) -> str:
    """`text` without the beginning of one of `ends` at its end."""
    return text[: len(text) - max((_begun(text, end) for end in ends), default=0)]


def _begun(text: str, end: str) -> int:
    """How many characters at the end of `text` begin `end`, less than all."""
    tail = text[max(len(text) - len(end) + 1, 0) :]
    place = tail.find(end[0])
    while place >= 0 and not end.startswith(tail[place:]):
        place = tail.find(end[0], place + 1)
    return len(tail) - place if place >= 0 else 0
