"""Where a run goes on: the newest whole checkpoint, with the ledger rolled back to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from silva.errors import CheckpointError
from silva.orchestrator.parts import Parts
from silva.orchestrator.state import RunState, restore
from silva.storage.checkpoints import CheckpointStore
from silva.storage.ledger import Ledger, audit, read


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    made = Ledger.create(tmp_path / "ledger.jsonl")
    for version in (1, 2, 3):
        made.record("published", version=version)
    made.commit()
    return made


def saved(path: Path, step: int, state: RunState) -> CheckpointStore:
    store = CheckpointStore(path / "checkpoints")
    store.save(step, {"state.json": state.encode(), "trainer/weights": b"w"}, {"ledger": state.ledger})
    return store


def test_the_newest_checkpoint_and_its_place_in_the_ledger(tmp_path: Path, ledger: Ledger) -> None:
    state = RunState(step=2, ledger=2)
    store = saved(tmp_path, 2, state)
    assert restore(store, ledger) == (state, store.path(2))
    assert read(ledger.path)[-1].fields == {"to": 2, "step": 2}


def test_work_in_flight_at_the_checkpoint_is_issued_again_also_if_nothing_was_recorded_since(
    tmp_path: Path,
) -> None:
    ledger = Ledger.create(tmp_path / "ledger.jsonl")
    work = {"work": "s0g0", "task": "t", "environment": "e", "step": 0, "attempt": 0}
    ledger.record("issued", **work)
    ledger.commit()
    restore(saved(tmp_path, 1, RunState(step=1, ledger=1)), ledger)
    ledger.record("issued", **work)
    ledger.commit()
    assert audit(read(ledger.path)) == []


def test_without_a_checkpoint_it_begins_again(tmp_path: Path, ledger: Ledger) -> None:
    assert restore(CheckpointStore(tmp_path / "checkpoints"), ledger) == (RunState(), None)
    assert read(ledger.path)[-1].fields == {"to": 0, "step": 0}


def test_a_state_of_another_step_is_refused(tmp_path: Path, ledger: Ledger) -> None:
    with pytest.raises(CheckpointError, match=r"step_2: state\.json says step 1, expected 2"):
        restore(saved(tmp_path, 2, RunState(step=1, ledger=2)), ledger)
    assert ledger.position == 3  # nothing was rolled back


def test_a_part_that_the_checkpoint_does_not_know_stays_at_its_beginning() -> None:
    """As one that a later version of Silva adds."""

    class Counter:
        def __init__(self) -> None:
            self.count = 0

        def state(self) -> int:
            return self.count

        def load(self, state: int) -> None:
            self.count = state

    class Two(Parts):
        stateful = {"old": Counter(), "new": Counter()}  # type: ignore[assignment]  # noqa: RUF012

        def __init__(self) -> None: ...

    parts = Two()
    parts.load({"old": 7})
    assert parts.state() == {"old": 7, "new": 0}
