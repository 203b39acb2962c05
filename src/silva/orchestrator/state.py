"""What a run is besides its weights: where it stands after a whole step. Plain JSON, in every checkpoint."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from silva.errors import CheckpointError


@dataclass(frozen=True)
class RunState:
    """`pending`: numbers of a step whose evaluation was interrupted and is still to be done.

    `in_flight`: work that had been issued and was not taken by a step; a restart issues it again.
    """

    step: int = 0
    tasks: dict[str, int] = field(default_factory=dict)  # TaskStream.position
    passed: dict[str, int] = field(default_factory=dict)  # TaskStream.passed
    in_flight: list[dict[str, Any]] = field(default_factory=list)  # WorkQueue.in_flight
    ledger: int = 0  # Ledger.position
    updates: int = 0  # optimizer steps, which schedules count
    pools: dict[str, str] = field(default_factory=dict)  # TaskStream.pools
    recent: dict[str, list[str]] = field(default_factory=dict)  # TaskStream.recent
    controllers: dict[str, float] = field(default_factory=dict)  # see algorithms/compose.py
    tokens_generated: int = 0
    tokens_in_rows: int = 0
    tokens_trained: int = 0  # those with a loss
    seconds: dict[str, float] = field(default_factory=dict)
    steps_trained: int = 0  # steps that taught something, see silence.py
    failing: int = 0  # steps in a row, up to this one, with more than `rollout.max_failed` without a result
    best: dict[str, Any] | None = None  # evaluation.evaluator.Standing
    best_step: int | None = None
    eval_before: list[dict[str, Any]] | None = None
    eval_last: list[dict[str, Any]] | None = None
    eval_best: list[dict[str, Any]] | None = None  # at `best_step`
    pending: dict[str, float] | None = None

    @property
    def logged(self) -> int:
        """The last step whose row stands in metrics.jsonl; -1 where not even the first evaluation's does."""
        unlogged = self.pending is not None or self.eval_before is None
        return self.step - 1 if unlogged else self.step

    def replace(self, **changes: Any) -> RunState:
        return dataclasses.replace(self, **changes)

    def encode(self) -> bytes:
        return json.dumps(dataclasses.asdict(self), indent=1).encode()

    @classmethod
    def decode(cls, data: bytes) -> RunState:
        try:
            return cls(**json.loads(data))
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"state.json of the checkpoint cannot be read: {error}") from error
