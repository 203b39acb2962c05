"""Where a run goes on after it was stopped or killed."""

from __future__ import annotations

from pathlib import Path

from silva.errors import CheckpointError
from silva.orchestrator.state import RunState
from silva.storage.checkpoints import CheckpointStore
from silva.storage.ledger import Ledger


def restore(store: CheckpointStore, ledger: Ledger) -> tuple[RunState, Path | None]:
    """The state of the newest whole checkpoint and the trainer's folder in it; a new state and None if there
    is no checkpoint. The ledger is rolled back to it.

    Raises:
        CheckpointError: a checkpoint's state cannot be read, or no checkpoint is whole.
    """
    newest = store.newest()
    if newest is None:
        if store.skipped:
            raise CheckpointError(
                "no checkpoint of this run is whole, so it cannot go on:\n  "
                + "\n  ".join(store.skipped)
                + "\nPut one back, or start again with --overwrite."
            )
        if ledger.position:
            ledger.roll_back(0, 0)
        return RunState(), None
    step, path = newest
    state = RunState.decode((path / "state.json").read_bytes())
    if state.step != step:
        raise CheckpointError(f"{path}: state.json says step {state.step}, expected {step}")
    ledger.roll_back(state.ledger, step)  # also from its very end: work in flight there is issued again
    return state, path / "trainer"
