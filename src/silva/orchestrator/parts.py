"""What the loop joins."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from silva.algorithms.settings import Algorithm
from silva.config.schema import RunConfig
from silva.evaluation.evaluator import Evaluation
from silva.monitoring.monitor import Monitor
from silva.orchestrator.buffer import Buffer
from silva.orchestrator.notices import Notices
from silva.orchestrator.phases import Phases
from silva.orchestrator.probe import WeightSync
from silva.orchestrator.replay import Replay
from silva.orchestrator.state import Batches, Stateful
from silva.protocols import Engine, Trainer
from silva.storage.checkpoints import CheckpointStore
from silva.storage.ledger import Ledger


@dataclass(frozen=True)
class Parts:
    """Everything the loop joins; constructed in commands/train.py. As one, it is `Stateful`.

    evaluate: plays the held-out tasks; its argument says when, for messages.
    idle: metrics of how idle parts were since it was asked last; none if they share a process.
    """

    config: RunConfig
    sync: WeightSync
    buffer: Buffer
    evaluate: Callable[[str], Awaitable[list[Evaluation]]]
    ledger: Ledger
    store: CheckpointStore
    monitor: Monitor
    notices: Notices
    phases: Phases
    replay: Replay | None = None
    data: Batches | None = None  # rows that each update imitates besides
    idle: Callable[[], dict[str, float]] = dict

    @property
    def trainer(self) -> Trainer:
        return self.sync.trainer

    @property
    def engine(self) -> Engine:
        return self.sync.engine

    @property
    def recipe(self) -> Algorithm:
        made: Algorithm = self.config.algorithm
        return made

    @property
    def steps(self) -> int:
        return self.config.steps

    @property
    def stateful(self) -> dict[str, Stateful]:
        """What a checkpoint remembers besides the trainer, replayed groups and the loop's own counts."""
        work, data = self.buffer.work, {"data": self.data} if self.data else {}
        return {"tasks": work.stream, "in_flight": work, "seconds": self.phases, **data}

    def state(self) -> dict[str, Any]:
        return {name: part.state() for name, part in self.stateful.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """A part that `state` does not know stays at its beginning."""
        for name, part in self.stateful.items():
            if name in state:
                part.load(state[name])
