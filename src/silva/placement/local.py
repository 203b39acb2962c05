"""Everything in this process: one thread computes, for the engine and the trainer alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import torch

from silva.compute import ComputeThread
from silva.errors import CapabilityError
from silva.storage.layout import Layout

if TYPE_CHECKING:
    from silva.algorithms.settings import Algorithm
    from silva.placement.settings import LocalPlacementSettings
    from silva.protocols import Context, Engine, Trainer

P = ParamSpec("P")
T = TypeVar("T")


class LocalPlacement:
    """Implements `protocols.Placement`.

    Raises:
        CapabilityError: a GPU is asked for, and there is none.
    """

    holds_model = True

    def __init__(self, settings: LocalPlacementSettings) -> None:
        self.device: str = settings.device
        if settings.device == "auto":
            self.device = "cuda" if torch.cuda.is_available() else "cpu"
        elif settings.device == "cuda" and not torch.cuda.is_available():
            raise CapabilityError('placement.device = "cuda": torch sees no GPU; expected "cpu" or "auto"')
        self.compute = ComputeThread(settings.threads)

    def engine(self, context: Context) -> Engine:
        engine: Engine = context.config.engine.build(context)
        return engine

    def trainer(self, context: Context, algorithm: Algorithm | None = None) -> Trainer:
        """If the engine cannot read the trainer's own parameters, its snapshots are folders of the run."""
        from silva.trainer.transfer import transfer_to

        config = context.config
        folder = Layout(Path(config.output_dir) / config.name).broadcast
        transfer = transfer_to(context.engine.capabilities.loads, folder)
        trainer: Trainer = config.trainer.build(context, algorithm, transfer=transfer)
        return trainer

    def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return self.compute.run(work, *args, **kwargs)

    def close(self, *, wait: bool = True) -> None:
        self.compute.shutdown(wait=wait, cancel_futures=True)
