"""How a model, and a pass through it, are divided among processes; by default not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")


class Undivided:
    """The model is whole, and so is every pass through it."""

    rank, size, ulysses = 0, 1, False

    def run(self, work: Callable[[], T]) -> T:
        return work()

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def exchange(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def total(self, x: torch.Tensor) -> torch.Tensor:
        return x


WHOLE = Undivided()


class Division(Protocol):
    """How a model and a pass through it are divided among processes (trainer/sharding/ranks.py).

    `rank` of `size` processes, each of which takes a share of a pass's tokens. `ulysses`: in attention it
    takes a share of the heads, or else all keys and values.
    """

    rank: int
    size: int
    ulysses: bool

    def run(self, work: Callable[[], T]) -> T: ...  # which calls parts of the model; one pass
    def gather(self, x: torch.Tensor) -> torch.Tensor: ...  # [.., n, d] -> [.., size * n, d], with a gradient
    def exchange(
        self, x: torch.Tensor
    ) -> torch.Tensor: ...  # [size, ..] for each -> from each, with a gradient
    def total(self, x: torch.Tensor) -> torch.Tensor: ...  # added up, without a gradient
