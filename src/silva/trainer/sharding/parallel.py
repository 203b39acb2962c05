"""The processes ("ranks") that share every update: each runs the same `Learner` on its share of the plan.

Every rank gets all samples and makes the same plan. What only one of them finds is brought together here, so
that all return, decide and raise the same. ranks.py is the mesh of several processes. Not here: how a call
reaches the ranks (server/ranks.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel

from silva.errors import SilvaError, error_named
from silva.models.loading import LoadedModel

T = TypeVar("T")


class Mesh:
    """One rank: the identity. Every rank calls every method, in the same order.

    `siblings`: ranks that have the same rows, of whose tokens each takes a share; they follow each other.
    `stages`: of the layers of a model, each of which as many ranks have; the ranks of the first stage come
    first, and the losses are found on the last one.
    `parts`: of ranks, which one copy of a model is divided into.
    `tp`: ranks that share every product of a layer, and so draw the same; they follow each other.
    """

    rank, size, siblings, stages, parts, tp = 0, 1, 1, 1, 1, 1

    @property
    def of_stage(self) -> int:
        """How many ranks have a stage."""
        return self.size // self.stages

    @property
    def shares(self) -> int:
        """How many have rows of their own."""
        return self.of_stage // self.siblings

    @property
    def share(self) -> int:
        """Of the plan, which is made for `shares` of them."""
        return self.rank % self.of_stage // self.siblings

    def by_share(self, found: Sequence[T]) -> Sequence[T]:
        """Of what each rank has found, in their order, what counts of each share."""
        return found[self.size - self.of_stage :: self.siblings]

    def gather(self, mine: T, kind: Any = None) -> list[T]:
        """What each rank has, in the order of the ranks. `kind`: its type, where it is no record."""
        return [mine]

    def sum(self, mine: Mapping[str, float]) -> Mapping[str, float]:
        """Of all shares, added up by name; one may lack some of the names."""
        found: dict[str, float] = {}
        for part in self.by_share(self.gather(mine, Mapping[str, float])):
            for name, number in part.items():
                found[name] = found.get(name, 0.0) + number
        return found

    def reduce(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Add up the gradients of whole parameters, of which a rank may lack some."""

    def rounds(self, works: Sequence[T]) -> Iterable[T]:
        """The works of an update, one after another. Copies of a model add up their gradients in the last."""
        return works

    def drop_kept(self) -> None:
        """Forget the gradients that copies of a model have not added up yet."""

    def norm(self, tensors: Sequence[torch.Tensor]) -> float:
        """L2 norm over all numbers of some tensors, which may be divided, in float32 or better; 0 of none."""
        norms = [
            torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32)).double()
            for x in tensors
        ]
        return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0

    def refuse(self, beside: Iterable[str]) -> None:
        """Raise CapabilityError for what cannot be divided in this way, of combinations.BESIDE."""

    def divide(self, loaded: LoadedModel) -> LoadedModel:
        """Leave each rank its part of the model's parameters, in place, when nothing refers to them yet.

        Parameters on the device "meta" are read from the model's files, each rank its part, and the model is
        checked as if it were loaded.

        Raises:
            ModelError: a weight is not finite, or Silva would run the model differently from transformers.
            CheckpointError: a file has become unreadable.
        """
        return loaded

    def outline(self, loaded: LoadedModel) -> PreTrainedModel:
        """A divided model as it was before, with its parameters on the device "meta"."""
        raise NotImplementedError

    def bring(self, loaded: LoadedModel, name: str, to: int) -> torch.Tensor | None:
        """A parameter of a divided model, whole and in the memory of the CPU, for one rank alone."""
        raise NotImplementedError

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """What one rank raises within, all raise after it, and that it was the disk's fault, if it was.

        Within, no rank waits for another.
        """
        mine: Exception | None = None
        try:
            yield
        except Exception as error:
            mine = error
        of_disk = isinstance(mine and mine.__cause__, (OSError, SafetensorError))
        problem = (type(mine).__name__, str(mine), of_disk) if mine else ("", "", False)
        problems = self.gather(problem, tuple[str, str, bool])
        if mine:
            raise mine
        for rank, (kind, words, faulty) in enumerate(problems):
            if kind:
                found = error_named(kind, f"rank {rank}: {words}") or SilvaError(f"rank {rank}: {words}")
                raise found from (OSError(words) if faulty else None)
