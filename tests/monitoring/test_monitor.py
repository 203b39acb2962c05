from __future__ import annotations

import io
import json
import random
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from silva.monitoring import heartbeat
from silva.monitoring.heartbeat import read_heartbeat
from silva.monitoring.monitor import Monitor
from silva.monitoring.settings import Monitoring
from silva.ports import FaultyFiles, use_files
from silva.storage.metrics import read_metrics

from .fake_run import rollout, step_metrics


def make(
    directory: Path, resume: int | None = None, console: Console | None = None, **settings: object
) -> Monitor:
    values = Monitoring.model_validate({"terminal": "plain", "tensorboard": False, **settings})
    console = console or Console(file=io.StringIO(), width=200)
    return Monitor(directory, values, name="walk", total_steps=10, resume_step=resume, console=console)


def test_metrics_rows_are_sorted_and_name_what_is_not_finite(tmp_path: Path) -> None:
    with make(tmp_path) as monitor:
        monitor.step(1, {"train/loss": float("nan"), "groups/trained": 3, "reward/raw": np.float32(0.5)})
        monitor.step(2, {"b": float("inf"), "a": float("-inf"), "c": 0.1})
    assert (tmp_path / "metrics.jsonl").read_text() == (
        '{"step": 1, "nonfinite": ["train/loss"], "groups/trained": 3, '
        '"reward/raw": 0.5, "train/loss": null}\n'
        '{"step": 2, "nonfinite": ["a", "b"], "a": null, "b": null, "c": 0.1}\n'
    )


def test_a_run_tells_what_it_waits_for_while_it_lasts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "EVERY", 0.002)
    now = tmp_path / "now.json"

    def soon(expected: str) -> None:
        ends = time.monotonic() + 30
        while not (said := read_heartbeat(now)).startswith(expected) and time.monotonic() < ends:
            time.sleep(0.002)
        assert said.startswith(expected)

    with make(tmp_path) as monitor:
        monitor.stage("rollout", 3, 8, "frozen_lake")
        soon("rollout 3/8, waiting for frozen_lake, ")
        monitor.stage("train", 0, 2)
        soon("train 0/2, ")
    assert not now.exists() and read_heartbeat(now) == ""
    for damaged in ("", "[1]", '{"doing": "x"}', '{"doing": "x", "since": "y"}'):
        now.write_text(damaged)
        assert read_heartbeat(now) == ""


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), BrokenPipeError(32, "Broken pipe")])
def test_a_terminal_that_is_gone_does_not_end_the_run(
    tmp_path: Path, error: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The window was closed, or `silva rl ... | head -1` has read enough."""

    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise error

    monkeypatch.setattr("rich.console.os.dup2", lambda *_: None)  # rich would give our own output away
    with make(tmp_path, console=Console(file=Gone(), width=200)) as monitor:
        monitor.message("hello")
        monitor.step(1, {"reward/raw": 0.5})
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1]
    assert "info: hello" in (tmp_path / "run.log").read_text()


def test_resume_takes_back_rollouts_of_later_steps(tmp_path: Path) -> None:
    rng = random.Random(0)
    with make(tmp_path) as monitor:
        for step in range(1, 6):
            monitor.rollouts(step, [rollout(step, 0, rng, 0.5)])
    (tmp_path / "rollouts" / ".step_6.parquet.tmp-0a1b").write_bytes(b"half")
    with make(tmp_path, resume=3):
        pass
    assert sorted(p.name for p in (tmp_path / "rollouts").iterdir()) == [
        f"step_{n}.parquet" for n in (1, 2, 3)
    ]


def test_tensorboard_gets_finite_scalars_and_a_resume_hides_later_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Names of files end with a counter of the process, and are read in the order of texts: "10" before "9".
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    with make(tmp_path, tensorboard=True) as monitor:
        for step in (1, 2, 3):
            monitor.step(step, {"reward/raw": step / 4, "train/loss": float("nan")})
    with make(tmp_path, resume=1, tensorboard=True) as monitor:
        monitor.step(2, {"reward/raw": 7.0})
    events = EventAccumulator(str(tmp_path / "tensorboard"), purge_orphaned_data=True)
    events.Reload()
    assert events.Tags()["scalars"] == ["reward/raw"]
    assert [(e.step, e.value) for e in events.Scalars("reward/raw")] == [(1, 0.25), (2, 7.0)]


@pytest.mark.parametrize("fault", ["missing", "broken"])
def test_tensorboard_never_ends_a_run_and_is_complained_about_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    if fault == "missing":
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
        expected = "TensorBoard is not installed"
    else:
        (tmp_path / "tensorboard").write_text("a file in its place")
        expected = "TensorBoard could not be opened: "
    with make(tmp_path, tensorboard=True) as monitor:
        monitor.step(1, {"a": 1.0})
        monitor.step(2, {"a": 2.0})
    assert (tmp_path / "run.log").read_text().count(expected) == 1
    assert [row["a"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1.0, 2.0]


def test_stall_names_the_stage_and_shows_stacks(tmp_path: Path) -> None:
    out, seen = io.StringIO(), threading.Event()

    class Console_(Console):
        def print(self, *objects: object, **options: object) -> None:
            super().print(*objects, **options)  # type: ignore[arg-type]
            if "nothing has moved" in str(objects[0]):
                seen.set()

    with make(tmp_path, stall_after=0.05, console=Console_(file=out, width=200)) as monitor:
        monitor.stage("rollout", 3, 64, waiting_for="environment frozen_lake")
        assert seen.wait(timeout=10)
    log = (tmp_path / "run.log").read_text()
    for text in (out.getvalue(), log):
        assert "stage: rollout 3/64, waiting for environment frozen_lake" in text
        assert "thread MainThread" in text
        assert "test_stall_names_the_stage_and_shows_stacks" in text


def test_record_files_raise_on_a_full_disk_and_keep_what_was_there(tmp_path: Path) -> None:
    with make(tmp_path) as monitor:
        monitor.step(1, {"a": 1.0})
        with use_files(FaultyFiles(every_k=1)) as disk, pytest.raises(OSError, match="No space left"):
            monitor.step(2, {"a": 2.0})
        assert disk.fired == 1
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "a": 1.0}]


def test_a_log_that_cannot_be_written_is_said_once_and_hides_nothing(tmp_path: Path) -> None:
    out = io.StringIO()
    (tmp_path / "run.log").mkdir()
    with make(tmp_path, console=Console(file=out, width=200)) as monitor:
        monitor.message("disk is full", "error")
        monitor.message("second")
    assert out.getvalue().count("run.log cannot be written") == 1
    assert "error: disk is full\n" in out.getvalue()
    assert "second\n" in out.getvalue()


def test_threads_do_not_mix_lines(tmp_path: Path) -> None:
    with make(tmp_path, terminal="off") as monitor:
        threads = [
            threading.Thread(target=lambda n=n: [monitor.step(n, {"x": float(i)}) for i in range(20)])
            for n in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for n in range(4):
        assert [row["x"] for row in rows if row["step"] == n] == [float(i) for i in range(20)]


def test_same_numbers_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        rng = random.Random(3)
        with make(tmp_path / name) as monitor:
            for step in (1, 2):
                monitor.step(step, step_metrics(rng, step, 0.4))
                monitor.rollouts(step, [rollout(step, i, rng, 0.4) for i in range(4)])
    for file in ("metrics.jsonl", "rollouts/step_1.parquet", "rollouts/step_2.parquet"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_rollouts_can_be_switched_off(tmp_path: Path) -> None:
    with make(tmp_path, rollouts=False) as monitor:
        monitor.rollouts(1, [rollout(1, 0, random.Random(0), 0.5)])
    assert not (tmp_path / "rollouts").exists()
