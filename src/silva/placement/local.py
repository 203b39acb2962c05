"""Everything in this process: one thread computes, for the engine and the trainer alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import torch

from silva.compute import ComputeThread
from silva.errors import CapabilityError

if TYPE_CHECKING:
    from silva.placement.settings import LocalPlacementSettings

P = ParamSpec("P")
T = TypeVar("T")


class LocalPlacement:
    """Implements `protocols.Placement`.

    Raises:
        CapabilityError: a GPU is asked for, and there is none.
    """

    def __init__(self, settings: LocalPlacementSettings) -> None:
        self.device: str = settings.device
        if settings.device == "auto":
            self.device = "cuda" if torch.cuda.is_available() else "cpu"
        elif settings.device == "cuda" and not torch.cuda.is_available():
            raise CapabilityError('placement.device = "cuda": torch sees no GPU; expected "cpu" or "auto"')
        self.compute = ComputeThread(settings.threads)

    def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return self.compute.run(work, *args, **kwargs)

    def close(self, *, wait: bool = True) -> None:
        self.compute.shutdown(wait=wait, cancel_futures=True)
