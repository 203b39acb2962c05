"""Rows that share prefixes, and the FLOPs of a forward pass over them: for forest.py and gpu.py."""

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


def rows_flops(loaded: LoadedModel, lengths: Sequence[int], predicted: int) -> float:
    """Of one forward pass over rows of these lengths that share nothing."""
    return flops(loaded, sum(lengths), sum(n * (n + 1) / 2 for n in lengths), predicted)


def flops(loaded: LoadedModel, tokens: int, seen: float, predicted: int) -> float:
    """Of one forward pass: linear layers, attention, and the head for `predicted` tokens.

    Args:
        seen: keys that queries see, summed over the queries.
    """
    config = loaded.model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = 2 * config.num_hidden_layers * config.num_attention_heads * head_dim * seen
    of_head = config.vocab_size * config.hidden_size * predicted
    return 2.0 * (linear_parameters(loaded) * tokens + attention + of_head)


def linear_parameters(loaded: LoadedModel) -> int:
    """Without embedding, head and norms."""
    named = loaded.model.get_decoder().named_parameters()
    return sum(p.numel() for n, p in named if p.ndim > 1 and "embed" not in n)
