"""What has followed a text before: tokens of prompts and replies, with an index of what stands before each.

A trail is the text of one request as it grows. Its tokens lie in blocks of a ring, and a block knows the one
that goes on with its text, so trails grow side by side. In a full ring the oldest block is overwritten.

    ring    | a: 32 tokens | b: 32 | a: 32 | c: 32 | b: 5 |       follow   0 -> 2, 1 -> 4

A token is indexed under the last 24, 8, 4 and 2 tokens before it: each such context has a slot, by its hash,
with the newest place that followed it, and each place knows the one before it in its slot. For a guess the
longest context that is known is looked up, and its newest places vote on the next token.

Only time depends on any of this, so whatever two contexts of one hash would mix up does no harm.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

ORDERS = (24, 8, 4, 2)
"""Lengths of the contexts, the longest first."""
VOTERS = 16  # places that vote: the newest of a context
CAPACITY = 1 << 18  # tokens; they and their index take 17 MB
_BLOCK = 32  # tokens
_NONE = -1


class Guess(NamedTuple):
    """The next token, and how sure that is: `votes` of `voters` places that followed the same context."""

    token: int
    order: int  # the context's place in ORDERS
    votes: int
    voters: int


class _Index:
    """Places by the `order` tokens before them."""

    def __init__(self, order: int, capacity: int) -> None:
        self.order = order
        self.hashes = array("q", [0]) * capacity  # of each place's context
        self.before = array("i", [_NONE]) * capacity
        self.newest = array("i", [_NONE]) * capacity


class History:
    """Tokens of the last trails, `capacity` (a power of 2) of them at most."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.tokens = array("i", [_NONE]) * capacity
        self.indices = [_Index(order, capacity) for order in ORDERS]
        self.follow = array("i", [_NONE]) * (capacity // _BLOCK)
        self.lives = array("i", [0]) * (capacity // _BLOCK)  # how often each block was begun
        self._mask = capacity - 1
        self._next = 0

    def begin_block(self) -> int:
        """The oldest block, emptied."""
        block = self._next
        self._next = (block + 1) % len(self.follow)
        place = slice(block * _BLOCK, (block + 1) * _BLOCK)
        self.tokens[place] = array("i", [_NONE]) * _BLOCK
        for index in self.indices:
            index.hashes[place] = array("q", [0]) * _BLOCK
        self.follow[block] = _NONE
        self.lives[block] += 1
        return block

    def put(self, place: int, token: int, before: Sequence[int]) -> None:
        """Write a token and index it under what stands `before` it."""
        self.tokens[place] = token
        for index in self.indices:
            if len(before) >= index.order:
                context = hash(tuple(before[-index.order :]))
                slot = context & self._mask
                index.hashes[place] = context
                index.before[place] = index.newest[slot]
                index.newest[slot] = place

    def guesses(self, before: Sequence[int], most: int) -> list[Guess]:
        """The `most` next tokens that are likeliest after these, one after the other; often fewer."""
        for number, index in enumerate(self.indices):
            if len(before) >= index.order and (places := self._places(index, before)):
                return self._voted(places, number, most)
        return []

    def _places(self, index: _Index, before: Sequence[int]) -> list[int]:
        """The newest that this context stands before."""
        context = hash(tuple(before[-index.order :]))
        place, found = index.newest[context & self._mask], []
        for _ in range(VOTERS):
            if place == _NONE:
                break
            if index.hashes[place] == context:
                found.append(place)
            place = index.before[place]
        return found

    def _voted(self, places: list[int], order: int, most: int) -> list[Guess]:
        guesses: list[Guess] = []
        while places and len(guesses) < most:
            tokens = [self.tokens[place] for place in places]
            token = max(tokens, key=tokens.count)  # of several: the newest
            if token == _NONE:
                break
            guesses.append(Guess(token, order, tokens.count(token), len(tokens)))
            places = [self._after(p) for p, theirs in zip(places, tokens, strict=True) if theirs == token]
            places = [place for place in places if place != _NONE and self.tokens[place] != _NONE]
        return guesses

    def _after(self, place: int) -> int:
        """The place that goes on with the same text."""
        if (place + 1) % _BLOCK:
            return place + 1
        block = self.follow[place // _BLOCK]
        return block * _BLOCK if block != _NONE else _NONE


class Trail:
    """A text that grows, `before` being what the history knows of it already."""

    def __init__(self, history: History, before: Iterable[int] = ()) -> None:
        self._history = history
        self._before = list(before)[-ORDERS[0] :]
        self._block = self._life = _NONE
        self._filled = _BLOCK  # tokens in the block

    def extend(self, tokens: Iterable[int]) -> None:
        history, before = self._history, self._before
        for token in tokens:
            if self._filled == _BLOCK or history.lives[self._block] != self._life:
                self._begin_block()
            history.put(self._block * _BLOCK + self._filled, token, before)
            self._filled += 1
            before.append(token)
            if len(before) >= 4 * ORDERS[0]:
                del before[: -ORDERS[0]]

    def guesses(self, most: int) -> list[Guess]:
        """What may come next, at most so many tokens."""
        return self._history.guesses(self._before, most)

    def _begin_block(self) -> None:
        history, last = self._history, self._block
        self._block = history.begin_block()
        if last != _NONE and history.lives[last] == self._life:
            history.follow[last] = self._block
        self._life, self._filled = history.lives[self._block], 0
