"""Rows that share prefixes, and the FLOPs of passes over them: for forest.py and gpu.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from silva.models.loading import LoadedModel
from silva.types import Sample

Tokens = np.ndarray


def drawn(rng: np.random.Generator, loaded: LoadedModel) -> Callable[[int], Tokens]:
    """n -> [n] random tokens."""
    return lambda n: rng.integers(5, loaded.model.config.vocab_size, n)


def group(tokens: Callable[[int], Tokens], prompt: int, count: int, answer: int) -> list[Sample]:
    """`count` answers to one prompt."""
    shared = tokens(prompt)
    return [row(np.concatenate([shared, tokens(answer)]), [(prompt, prompt + answer)]) for _ in range(count)]


def turn_tree(
    tokens: Callable[[int], Tokens], length: int, count: int, forks: Sequence[int], width: int
) -> tuple[list[Sample], list[Sample]]:
    """Trajectories of `count` turns, half observation, half answer, with `width` branches before each of
    `forks` (1-based): a row for each leaf, and a row for each turn."""
    leaves: list[Sample] = []
    turns: list[Sample] = []

    def grow(history: Tokens, spans: list[tuple[int, int]], turn: int) -> None:
        here = np.concatenate([history, tokens(length)])
        answer = (len(here) - length // 2, len(here))
        turns.append(row(here, [answer]))
        if turn == count:
            leaves.append(row(here, [*spans, answer]))
            return
        for _ in range(width if turn + 1 in forks else 1):
            grow(here, [*spans, answer], turn + 1)

    grow(np.empty(0, np.int64), [], 1)
    return leaves, turns


def row(tokens: Tokens, spans: Sequence[tuple[int, int]]) -> Sample:
    """Trained where the spans are."""
    weights = np.zeros(len(tokens))
    for start, stop in spans:
        weights[start:stop] = 1.0
    return Sample(
        tokens=tokens,
        loss_weights=weights,
        logprobs=np.full(len(tokens), -5.0),
        temperatures=np.ones(len(tokens)),
        versions=np.zeros(len(tokens), np.int64),
        trajectory="t",
        group="g",
    )


def rows_pairs(lengths: Sequence[int]) -> float:
    """How many tokens attend to how many, summed over rows of these lengths that share nothing."""
    return sum(n * (n + 1) / 2 for n in lengths)
