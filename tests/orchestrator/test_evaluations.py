"""What evaluations mean: when the loop warns of a fall, and held-out tasks against those of today."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.worlds import Parity

from silva.orchestrator.evaluations import fallen, held_out_changes, record_held_out
from silva.orchestrator.state import RunState
from silva.storage.ledger import Ledger, read
from silva.types import Task


def rows(mean):
    return [
        {
            "environment": "lake",
            "metric": "success",
            "mean": mean,
            "ci_low": mean - 0.1,
            "ci_high": mean + 0.1,
        }
    ]


@pytest.mark.parametrize(
    ("step", "last", "now", "warns"),
    [
        (40, 0.7, 0.2, True),
        (50, 0.2, 0.1, False),  # said at step 40
        (50, 0.2, 0.65, False),
        (60, 0.65, 0.2, True),  # it came back in between
        (100, 0.2, 0.1, True),  # the last step
        (100, 0.7, 0.6, False),
    ],
)
def test_once_and_at_the_end(step, last, now, warns):
    state = RunState(
        step=step, eval_before=rows(0.1), eval_last=rows(last), eval_best=rows(0.7), best_step=30
    )

    def warning(state):
        return fallen(state, rows(now), 100, lambda step: Path(f"{step}"))

    text = warning(state)
    assert ("from 70.0% [60.0%, 80.0%] at step 30" in text) is warns and bool(text) is warns
    again = RunState.decode(state.encode())  # as after a resume
    assert warning(again) == text


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
    record_held_out(tmp_path, {"w": Listed(1, 2, 3, 4)})
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
    assert held_out_changes(run, {"w": Listed(*numbers)}, 2) == []


def test_tasks_that_were_trained_on_are_counted(run) -> None:
    (note,) = held_out_changes(run, {"w": Listed(1, 10, 20, 5)}, 100)
    assert note.startswith(
        f"w: 2 of 4 evaluated tasks were trained on in {run}: success on these says nothing"
    )


def test_another_held_out_set_is_named_by_environment(run) -> None:
    (note,) = held_out_changes(run, {"same": Listed(1, 2), "new": Listed(1, 5, 6)}, 100)
    assert note.startswith("new: the held-out set changed: 2 of 3 evaluated tasks were not held out when")
    assert "None was trained on" in note


def test_nothing_is_said_of_an_environment_that_the_run_never_had(run) -> None:
    other = Listed(5, 6)
    assert held_out_changes(run, {"gsm8k": other}, 100) == []
    (note,) = held_out_changes(run, {"w": other}, 100)
    assert "2 of 2 evaluated tasks were not held out" in note


def test_of_another_folder_nothing_is_known(tmp_path) -> None:
    assert held_out_changes(tmp_path, {"w": Listed(1)}, 100) == []


def test_a_damaged_ledger_is_said(run) -> None:
    (run / "ledger.jsonl").write_text("{}\n")
    (note,) = held_out_changes(run, {"w": Listed(1)}, 100)
    assert note.startswith("whether the held-out tasks were trained on is not known: ") and "damaged" in note


def test_a_whole_run_writes_both_and_they_share_nothing(alone) -> None:
    held = json.loads((alone / "held_out.json").read_text())
    events = read(alone / "ledger.jsonl")
    trained = {event.fields["content"] for event in events if event.event == "issued"}
    assert trained and all(len(set(digests)) == 12 for digests in held.values())
    assert not trained & {digest for digests in held.values() for digest in digests}


def test_a_larger_share_evaluates_what_was_trained_on(alone) -> None:
    wide = Parity(eval_share=0.99, eval_size=2000).taskset()
    (note,) = held_out_changes(alone, {"parity": wide}, 2000)
    assert "of 2000 evaluated tasks were trained on" in note
