"""The processes ("ranks") that share every update: each runs the same `Learner` on its share of the plan.

Every rank gets all samples and makes the same plan. What only one of them finds is brought together here, so
that all return, decide and raise the same. Not here: how a call reaches the ranks, and how the tensors of a
model are divided among them. Comments that begin with "Ranks:" name what dividing them has to change, and
the test of tests/contracts/test_learners.py that has to pass with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")


class Mesh:
    """One rank: the identity. Every rank calls every method, in the same order."""

    rank, size = 0, 1

    def gather(self, mine: T) -> list[T]:
        """What each rank has, in the order of the ranks."""
        return [mine]

    def sum(self, mine: Mapping[str, T]) -> Mapping[str, T]:
        """Numbers or tensors, added up by name; a rank may lack some of the names."""
        return mine
