"""Scalars for TensorBoard, in the folder of a run or an evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from silva.storage.rollouts import RolloutRow


class TensorBoard:
    """A `Sink`. `first_step`: hide what an earlier process wrote from this step on (a resumed run)."""

    def __init__(self, directory: Path, first_step: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(log_dir=str(directory), purge_step=first_step)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        for key in sorted(metrics):
            self._writer.add_scalar(key, float(metrics[key]), step)
        self._writer.flush()

    def samples(self, step: int, rows: Sequence[RolloutRow]) -> None:
        """It shows numbers only."""

    def message(self, level: str, text: str) -> None:
        """As above."""

    def close(self, finished: bool) -> None:
        self._writer.close()
