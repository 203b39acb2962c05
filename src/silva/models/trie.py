"""A batch of token sequences as a prefix trie: every shared token once.

    rows      a b c d        packed   a b | c d | c e f | g        depth first, chains collapsed to nodes
              a b c e f  ->  depth    0 1   2 3 ...                 position of a token in its row
              a b g          rows     indices into `packed`, one array a row

A token sees itself and what stands above it: packed token k is visible to q where k <= q < end[k], with
`end[k]` the place after the last token below k. Shared prefixes are found by token ids, whatever made them.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MIN_SHARED = 16
"""Shorter common beginnings of unrelated rows are not worth a fork: attention over them costs more."""
NEVER = sys.maxsize
"""In place of MIN_SHARED: share nothing, so that the rows only lie side by side (flat packing)."""


@dataclass(frozen=True)
class TrieNode:
    """A run of tokens without a fork. `start`, `stop` and `end` (of all that is below it) are packed."""

    start: int
    stop: int
    end: int
    depth: int  # position of its first token
    parent: int  # number of the node above it; -1: none

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Trie:
    """N packed tokens, depth first."""

    tokens: np.ndarray  # [N] int64
    positions: np.ndarray  # [N] int64
    nodes: tuple[TrieNode, ...]  # in packed order
    rows: tuple[np.ndarray, ...]  # [T] int64 each: where the tokens of a row stand

    def __len__(self) -> int:
        return len(self.tokens)

    def ends(self) -> np.ndarray:
        """[N]: token k is visible to q where k <= q < ends[k]."""
        found = np.empty(len(self), np.int64)
        for node in self.nodes:
            found[node.start : node.stop] = node.end
        return found

    def above(self, node: TrieNode) -> list[int]:
        """Numbers of the nodes above `node`, root first."""
        found = []
        while node.parent >= 0:
            found.append(node.parent)
            node = self.nodes[node.parent]
        return found[::-1]


def sort_rows(rows: Sequence[np.ndarray], least: int = MIN_SHARED) -> tuple[list[int], np.ndarray]:
    """Lexicographic order of token sequences, and how much each shares with the one before it.

    Returns:
        order: indices of `rows`; rows that share a prefix are neighbours, in any trie of any of them.
        shared: [len(rows)] common prefix of order[i - 1] and order[i], 0 below `least`; shared[0] = 0.
    """
    keys = [np.asarray(row, ">i8").tobytes() for row in rows]  # bytes compare as the numbers do
    order = sorted(range(len(rows)), key=lambda i: (keys[i], i))
    shared = np.zeros(len(rows), np.int64)
    for place in range(1, len(order)):
        length = common_prefix(rows[order[place - 1]], rows[order[place]])
        shared[place] = length if length >= least else 0
    return order, shared


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    differs = np.asarray(a[:n]) != np.asarray(b[:n])
    return int(differs.argmax()) if differs.any() else n


def build(rows: Sequence[np.ndarray], least: int = MIN_SHARED) -> Trie:
    """The trie of some rows. Below a fork come the nodes without children first, by length.

    Raises:
        ValueError: no rows, or an empty one.
    """
    if not rows or any(len(row) == 0 for row in rows):
        raise ValueError(f"build: got {len(rows)} rows, one of them empty or none at all")
    order, shared = sort_rows(rows, least)
    tokens: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    nodes: list[list[int]] = []  # [start, stop, end, depth, parent]
    paths: list[np.ndarray] = [np.empty(0, np.int64)] * len(rows)
    packed = 0
    # What is left to lay out: rows order[low:high] from `depth` on, under `parent`, whose row is `path`.
    left: list[tuple[int, int, int, int, np.ndarray]] = []

    def fork(low: int, high: int, depth: int, parent: int, path: np.ndarray) -> None:
        cuts = [low, *(p for p in range(low + 1, high) if shared[p] <= depth), high]
        spans = list(itertools.pairwise(cuts))
        spans.sort(key=lambda s: (s[1] - s[0] > 1, len(rows[order[s[0]]])))
        left.extend((a, b, depth, parent, path) for a, b in reversed(spans))

    fork(0, len(rows), 0, -1, np.empty(0, np.int64))
    while left:
        low, high, depth, parent, path = left.pop()
        row = rows[order[low]]
        stop = int(shared[low + 1 : high].min()) if high - low > 1 else len(row)
        length = stop - depth
        tokens.append(np.asarray(row[depth:stop], np.int64))
        positions.append(np.arange(depth, stop))
        path = np.concatenate([path, np.arange(packed, packed + length)])
        nodes.append([packed, packed + length, 0, depth, parent])
        packed += length
        while low < high and len(rows[order[low]]) == stop:  # rows that end here, the shortest come first
            paths[order[low]] = path
            low += 1
        if low < high:
            fork(low, high, stop, len(nodes) - 1, path)
    for node in reversed(nodes):  # children stand behind their parent
        node[2] = max(node[2], node[1])
        if node[4] >= 0:
            above = nodes[node[4]]
            above[2] = max(above[2], node[2])
    made = tuple(TrieNode(*node) for node in nodes)
    return Trie(np.concatenate(tokens), np.concatenate(positions), made, tuple(paths))
