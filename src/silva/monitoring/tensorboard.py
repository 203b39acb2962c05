"""Scalars for TensorBoard: a convenience that may fail; the record of a run is metrics.jsonl."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class TensorBoard:
    """Scalars for TensorBoard. Whatever goes wrong is said once, then it stays off: never ends a run."""

    def __init__(self, directory: Path, first_step: int | None, complain: Callable[[str], None]) -> None:
        """`first_step`: hide what an earlier process wrote from this step on (a resumed run)."""
        self._complain = complain
        self._writer: Any = None
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            complain(
                "TensorBoard is not installed (pip install 'silva[tensorboard]'): no event files are written"
            )
            return
        with self._trying():
            self._writer = SummaryWriter(log_dir=str(directory), purge_step=first_step)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._writer is None:
            return
        with self._trying():
            for key in sorted(metrics):
                if math.isfinite(metrics[key]):  # it prints a warning for each that is not
                    self._writer.add_scalar(key, float(metrics[key]), step)
            self._writer.flush()

    def close(self) -> None:
        with self._trying():
            if self._writer is not None:
                self._writer.close()

    @contextmanager
    def _trying(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._writer = None
            self._complain(f"TensorBoard is off from here on: {type(error).__name__}: {error}")
