"""Runs that are killed come out as runs that are not: every crash point, and kills at random."""

import json
import signal
import subprocess
import sys

import pytest
from tests.runs import ROOT

from silva.ports import CRASH_POINTS

import chaos  # isort: skip (beside runs, whose folder tests.runs has put on the path)


@pytest.mark.slow
@pytest.mark.same_bits
def test_twenty_kills_change_nothing(tmp_path):
    """Each crash point once and ten more at random points and times."""
    found = tmp_path / "chaos.json"
    script = ROOT / "benchmarks" / "chaos.py"
    argv = [sys.executable, script, "--kills", "20", "--jobs", "2", "--seed", "1", "--json", found]
    ended = subprocess.run(argv, capture_output=True, text=True)
    assert found.exists(), ended.stderr
    result = json.loads(found.read_text())
    assert result["faults"] == []
    assert (result["kills"], result["missed"], result["wrong_loads"]) == (20, 0, 0)
    assert result["identical"] == result["runs"] and result["restarts"] >= 10
    assert {*CRASH_POINTS, "time"} <= {*result["points"]}
    assert ended.returncode == 0


def test_the_plan_has_every_crash_point_and_as_many_kills_as_asked_for():
    counts = dict.fromkeys(CRASH_POINTS, 4)
    for kills in (3, 10, 57):
        trials = chaos.plan(kills, seed=2, counts=counts)
        assert sum(len(trial.kills) for trial in trials) == kills
        assert {t.kills[0].point for t in trials} >= {*CRASH_POINTS[:kills]}
    assert chaos.plan(57, 2, counts) == trials != chaos.plan(57, 3, counts)


def test_a_kill_that_did_not_happen_where_it_says_fails(tmp_path):
    kill = chaos.Kill("optim", 2)
    for status, proof in ((0, ""), (-signal.SIGKILL, ""), (-signal.SIGKILL, "rename"), (1, "optim")):
        trial = chaos.Trial("trial", [kill])
        life = chaos.life(trial, tmp_path, 1.0)
        job, delay = next(life)
        assert (job.crash, delay) == ("optim:2", None)
        (tmp_path / "trial.proof0").write_text(proof)
        with pytest.raises(StopIteration):
            life.send(status)
        assert trial.missed and str(kill) in trial.missed[0]
        assert chaos.result([trial], 0)["faults"]


def test_a_run_faster_than_the_clock_is_killed_earlier(tmp_path, monkeypatch):
    clock = iter((100.0, 105.0, 200.0))  # the run takes 5 seconds, not 10
    monkeypatch.setattr(chaos.time, "monotonic", lambda: next(clock))
    trial = chaos.Trial("trial", [chaos.Kill("time", share=0.8)])
    life = chaos.life(trial, tmp_path, 10.0)
    assert next(life)[1] == pytest.approx(8)
    assert life.send(0)[1] == pytest.approx(0.9 * 0.8 * 5)
    job, delay = life.send(-signal.SIGKILL)
    assert (delay, trial.missed) == (None, []) and job.argv[-1] == "--resume"


def test_going_on_from_another_checkpoint_than_the_newest_whole_one_is_a_wrong_load(tmp_path):
    from silva.storage.checkpoints import CheckpointStore
    from silva.storage.ledger import Ledger

    run = tmp_path / "run"
    run.mkdir()
    ledger = Ledger.create(run / "ledger.jsonl")
    ledger.record("published", version=1)
    ledger.commit()
    store = CheckpointStore(run / "checkpoints", keep=2)
    for step in (2, 4):
        store.save(step, {"weights": b"w"}, {})
    before = chaos._standing(run)
    assert before == (4, [], 1)
    ledger.roll_back(1, 4)
    trial = chaos.Trial("run", [])
    chaos._check_load(trial, run, before)
    assert trial.wrong_loads == [] and trial.restarts == 1
    ledger.roll_back(1, 2)
    chaos._check_load(trial, run, (4, [], 2))
    assert len(trial.wrong_loads) == 1
