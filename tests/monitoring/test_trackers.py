"""Runs at real trackers, offline: what they have kept is read back, and a resumed run is the same one."""

from __future__ import annotations

import io
import json
import random
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from silva.cli import main
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


def test_wandb_keeps_steps_samples_and_the_id_of_a_resumed_run(tmp_path, monkeypatch, capsys):
    wandb = pytest.importorskip("wandb")
    from silva.monitoring.wandb_runs import offline, records

    monkeypatch.setenv("WANDB_MODE", "offline")
    said = [played(tmp_path, resume, type="wandb", project="p") for resume in STEPS]
    assert not [line for line in said if "off from here" in line or "could not" in line]
    wandb.teardown()  # its process writes what is left of a file after `finish` has returned
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
    (first,) = [file for file, run in zip(files, runs, strict=True) if run.rows[0]["step"] == 1]
    for named in (first, first.parent):  # the same from the command line
        capsys.readouterr()
        assert main(["monitor", str(named), "--reward-threshold", "2"]) == 0
        text = capsys.readouterr().out
        assert text.startswith("walk: step 2\n")
        lines = [line.split() for line in text.splitlines()]
        assert ["reward/raw", "0.25", "0.5", "0.375", "0.25", "0.5"] in lines
        assert ["eval/lake/pass@4", *["0.5"] * 5] in lines
        assert [line[:2] for line in lines if line[:1] == ["step"]] == [["step", "1,"]] * 2
        assert "[user] You stand at P" in text


def test_mlflow_keeps_metrics_the_configuration_and_tables_of_one_run(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    from mlflow import MlflowClient

    monkeypatch.chdir(tmp_path)  # where MLflow puts artifacts of a database
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    uri = f"sqlite:///{tmp_path}/kept.db"
    said = [played(tmp_path / "run", resume, type="mlflow", uri=uri, experiment="walks") for resume in STEPS]
    assert not [line for line in said if "off from here" in line or "could not" in line]
    kept = MlflowClient(tracking_uri=uri)
    (run,) = kept.search_runs([kept.get_experiment_by_name("walks").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params == {"trainer.optimizer.lr": "1e-05"}
    assert run.data.tags["silva.warning"] == "mind the gap"
    history = {
        key: [(each.step, each.value) for each in kept.get_metric_history(run.info.run_id, key)]
        for key in run.data.metrics
    }
    assert history == {
        "reward/raw": [(1, 0.25), (2, 0.5), (2, 0.5), (3, 0.75)],
        "eval/lake/pass_at_4": [(1, 0.5), (2, 0.5), (2, 0.5), (3, 0.5)],
    }
    assert [each.path for each in kept.list_artifacts(run.info.run_id, "samples")] == ["samples/step_1.json"]
    table = json.loads(Path(run.info.artifact_uri, "samples", "step_1.json").read_text())
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert [row["step"] for row in rows] == [1, 1]
    assert rows[0]["prompt"].startswith("[user] You stand at P")


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
    logged = [(step, json.loads(metrics)) for _, step, metrics in rows]
    steps = {step: each["reward/raw"] for step, each in logged if "reward/raw" in each}
    assert steps == {1: 0.25, 2: 0.5, 3: 0.75}
    ((step, table),) = [(step, each["samples"]) for step, each in logged if "samples" in each]
    assert step == 1 and [row["step"] for row in table["_value"]] == [1, 1]
    assert table["_value"][0]["prompt"].startswith("[user] You stand at P")
