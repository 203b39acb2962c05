"""Runs at real trackers, offline: what they have kept is read back, and a resumed run is the same one."""

from __future__ import annotations

import io
import random
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from silva.monitoring.monitor import Monitor
from silva.monitoring.settings import Monitoring

from .fake_run import rollout

pytestmark = pytest.mark.slow
STEPS = {None: (1, 2), 1: (2, 3)}
"""What is done by the run, and by the one that goes on after step 1."""


def played(folder: Path, resume: int | None, **sink: object) -> str:
    """The messages of a run of two steps, or of its continuation."""
    settings = Monitoring.model_validate(
        {"terminal": "plain", "tensorboard": False, "sinks": ({"patience": 600.0, "samples": 2, **sink},)}
    )
    out = io.StringIO()
    with Monitor(folder, settings, name="walk", total_steps=3, resume_step=resume,
                 config={"trainer": {"optimizer": {"lr": 1e-5}}},
                 console=Console(file=out, width=500)) as running:  # fmt: skip
        for step in STEPS[resume]:
            running.step(step, {"reward/raw": step / 4, "eval/lake/pass@4": 0.5, "train/loss": float("nan")})
            running.rollouts(step, [rollout(step, i, random.Random(i), 0.5) for i in range(4)])
        running.message("mind the gap", "warning")
    return out.getvalue()


def test_wandb_keeps_steps_samples_and_the_id_of_a_resumed_run(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    from silva.monitoring.wandb_runs import offline, records

    monkeypatch.setenv("WANDB_MODE", "offline")
    said = [played(tmp_path, resume, type="wandb", project="p") for resume in STEPS]
    assert not [line for line in said if "off from here" in line or "could not" in line]
    files = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2
    runs = [offline(file) for file in files]
    steps = [[(r["step"], r["reward/raw"]) for r in run.rows if "reward/raw" in r] for run in runs]
    assert sorted(steps) == [[(1, 0.25), (2, 0.5)], [(2, 0.5), (3, 0.75)]]
    headers = [r.run for file in files for r in records(file) if r.WhichOneof("record_type") == "run"]
    assert len({header.run_id for header in headers}) == 1
    samples = [row for run in runs for row in run.samples]
    assert len(samples) == 2  # of step 1
    assert samples[0]["prompt"].startswith("[user] You stand at P")
    assert {row["step"] for row in samples} == {1}


def test_trackio_keeps_both_parts_of_a_run_under_one_name(tmp_path):
    """In a process of its own, since trackio reads where to write when it is imported."""
    pytest.importorskip("trackio")
    code = (
        "import sys; sys.path.insert(0, {here!r})\n"
        "from pathlib import Path\nfrom monitoring.test_trackers import played\n"
        "for resume in (None, 1):\n"
        "    print(played(Path({run!r}), resume, type='trackio', project='p'))\n"
    ).format(here=str(Path(__file__).parents[1]), run=str(tmp_path / "run"))
    kept = tmp_path / "kept"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path,
        env={**__import__("os").environ, "TRACKIO_DIR": str(kept), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "off from here" not in done.stdout and "could not" not in done.stdout, done.stdout
    with sqlite3.connect(next(kept.rglob("p.db"))) as database:
        rows = database.execute("select run_name, step, metrics from metrics").fetchall()
    assert len({name for name, _, _ in rows}) == 1
    assert {step for _, step, metrics in rows if b"reward/raw" in bytes(metrics)} == {1, 2, 3}
