"""What a run held out and trained on, against the tasks of today."""

from __future__ import annotations

import json

import pytest
from tests.worlds import Parity

from silva.orchestrator import held_out
from silva.storage.ledger import Ledger, read
from silva.types import Task


class Listed:
    def __init__(self, *numbers: int) -> None:
        self.all = [Task(f"w/eval/{i}", "w", i, {"n": n}) for i, n in enumerate(numbers)]

    def tasks(self, split):
        assert split == "eval"
        return self.all


def content(number: int) -> str:
    return Task("", "", 0, {"n": number}).content()


@pytest.fixture
def run(tmp_path):
    """Holds out 1 to 4; has trained on 10 and 11, and on 20 in its warm start."""
    held_out.record(tmp_path, {"w": Listed(1, 2, 3, 4)})
    ledger = Ledger.create(tmp_path / "ledger.jsonl")
    ledger.record("imitated", contents=(content(20),))
    for number in (10, 11):
        ledger.record("issued", work=f"g{number}", task="t", environment="w", step=1, attempt=0,
                      content=content(number))  # fmt: skip
    ledger.commit()
    return tmp_path


def test_the_file_holds_a_digest_of_each_task(run) -> None:
    assert json.loads((run / "held_out.json").read_text()) == {"w": [content(n) for n in (1, 2, 3, 4)]}


@pytest.mark.parametrize("numbers", [(1, 2, 3, 4), (4, 3), (1, 2, 10)])
def test_nothing_is_said_of_tasks_that_were_held_out(run, numbers) -> None:
    assert held_out.changes(run, {"w": Listed(*numbers)}, 2) == []


def test_tasks_that_were_trained_on_are_counted(run) -> None:
    (note,) = held_out.changes(run, {"w": Listed(1, 10, 20, 5)}, 100)
    assert note.startswith(
        f"w: 2 of 4 evaluated tasks were trained on in {run}: success on these says nothing"
    )


def test_another_held_out_set_is_named_by_environment(run) -> None:
    (note,) = held_out.changes(run, {"same": Listed(1, 2), "new": Listed(1, 5, 6)}, 100)
    assert note.startswith("new: the held-out set changed: 2 of 3 evaluated tasks were not held out when")
    assert "None was trained on" in note


def test_of_another_folder_nothing_is_known(tmp_path) -> None:
    assert held_out.changes(tmp_path, {"w": Listed(1)}, 100) == []


def test_a_damaged_ledger_is_said(run) -> None:
    (run / "ledger.jsonl").write_text("{}\n")
    (note,) = held_out.changes(run, {"w": Listed(1)}, 100)
    assert note.startswith("whether the held-out tasks were trained on is not known: ") and "damaged" in note


def test_a_whole_run_writes_both_and_they_share_nothing(alone) -> None:
    held = json.loads((alone / "held_out.json").read_text())
    events = read(alone / "ledger.jsonl")
    trained = {event.fields["content"] for event in events if event.event == "issued"}
    assert trained and all(len(set(digests)) == 12 for digests in held.values())
    assert not trained & {digest for digests in held.values() for digest in digests}


def test_a_larger_share_evaluates_what_was_trained_on(alone) -> None:
    wide = Parity(eval_share=0.99, eval_size=2000).taskset()
    (note,) = held_out.changes(alone, {"parity": wide}, 2000)
    assert "of 2000 evaluated tasks were trained on" in note
