"""What a run is besides its weights: where it stands after a whole step, and where it goes on.

Plain JSON, in every checkpoint. What a part remembers is its own affair: it says it in `state()` and takes it
back in `load()`, and `Parts.stateful` lists such parts.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from silva.errors import CheckpointError
from silva.storage.checkpoints import CheckpointStore
from silva.storage.ledger import Ledger
from silva.types import Sample


class Stateful(Protocol):
    """A part that goes on, after a restart, where it was."""

    def state(self) -> Any:
        """Where it stands now, as plain JSON that later changes of the part leave alone."""

    def load(self, state: Any) -> None:
        """Take up what `state` gave; before anything else is asked of the part."""


class Batches(Stateful, Protocol):
    """Where the rows of supervised updates come from, one batch after the other."""

    async def draw(self, step: int) -> list[Sample]:
        """The rows of a step, counted from 1; none if there is nothing to imitate."""

    def metrics(self) -> dict[str, float]:
        """What has become of the data up to now."""


@dataclass(frozen=True)
class RunState:
    """`pending`: numbers of a step whose evaluation was interrupted and is still to be done."""

    step: int = 0
    ended: bool = False  # nothing is left to learn, though steps may be left
    ledger: int = 0  # Ledger.position
    parts: dict[str, Any] = field(default_factory=dict)  # by name in Parts.stateful
    updates: int = 0  # optimizer steps, which schedules count
    controllers: dict[str, float] = field(default_factory=dict)  # see algorithms/compose.py
    tokens_generated: int = 0
    tokens_in_rows: int = 0
    tokens_trained: int = 0  # those with a loss
    steps_trained: int = 0  # steps that taught something, see notices.py
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
        """Raises CheckpointError if this is no state, or one of another version of Silva."""
        try:
            found = dict(json.loads(data))
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"state.json of the checkpoint cannot be read: {error}") from error
        if other := sorted(found.keys() - {known.name for known in dataclasses.fields(cls)}):
            raise CheckpointError(
                "the checkpoint is of another version of Silva: its state.json has "
                f"{', '.join(other)}, which this version does not know. Go on with the version that wrote "
                "it, choose another --name, or start again with --overwrite."
            )
        return cls(**found)


def restore(store: CheckpointStore, ledger: Ledger) -> tuple[RunState, Path | None]:
    """The state of the newest whole checkpoint and its folder; a new state and None if there is none.
    The ledger is rolled back to it.

    Raises:
        CheckpointError: a checkpoint's state cannot be read, or no checkpoint is whole.
    """
    newest = store.newest()
    if newest is None and store.skipped:
        raise CheckpointError(
            "no checkpoint of this run is whole, so it cannot go on:\n  "
            + "\n  ".join(store.skipped)
            + "\nPut one back, or start again with --overwrite."
        )
    if newest is None:
        if ledger.position:
            ledger.roll_back(0, 0)
        return RunState(), None
    step, path = newest
    state = RunState.decode((path / "state.json").read_bytes())
    if state.step != step:
        raise CheckpointError(f"{path}: state.json says step {state.step}, expected {step}")
    ledger.roll_back(state.ledger, step)  # also from its very end: work in flight there is issued again
    return state, path
