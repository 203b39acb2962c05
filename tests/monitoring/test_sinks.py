"""Where numbers go besides the run's folder; and that nothing there stops or slows a run."""

from __future__ import annotations

import io
import json
import random
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from silva.monitoring.monitor import Monitor
from silva.monitoring.settings import Monitoring
from silva.monitoring.sinks.outlet import MOST_WAITING, Outlet
from silva.monitoring.sinks.settings import plain
from silva.storage.metrics import read_metrics

from .fake_run import rollout

pytestmark = pytest.mark.slow


class Recorder:
    """A sink that keeps what it is told, and fails or hangs where it is asked to."""

    def __init__(self, fails: BaseException | None = None, hangs: threading.Event | None = None) -> None:
        self.steps: list[tuple[int, Mapping[str, float]]] = []
        self.closed: list[bool] = []
        self.fails, self.hangs = fails, hangs

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.hangs is not None:
            self.hangs.wait()
        if self.fails is not None:
            raise self.fails
        self.steps.append((step, metrics))

    def samples(self, step: int, rows: Any) -> None: ...

    def message(self, level: str, text: str) -> None: ...

    def close(self, finished: bool) -> None:
        self.closed.append(finished)


def opened(sink: Recorder | Callable[[], Any], complaints: list[str]) -> Outlet:
    build = (lambda: sink) if isinstance(sink, Recorder) else sink
    return Outlet("Tracker", build, complaints.append, "wandb")


def send(outlet: Outlet, steps: range) -> None:
    for step in steps:
        outlet.put(lambda sink, step=step: sink.step(step, {}))  # type: ignore[misc]


def test_calls_arrive_in_order_and_the_end_waits_for_them():
    sink, complaints = Recorder(), list[str]()
    outlet = opened(sink, complaints)
    send(outlet, range(100))
    outlet.end(finished=True)
    outlet.join(60)
    assert [step for step, _ in sink.steps] == [*range(100)]
    assert (sink.closed, complaints) == ([True], [])


@pytest.mark.parametrize("error", [RuntimeError("401 Unauthorized"), SystemExit(3), KeyboardInterrupt()])
def test_what_a_sink_raises_is_said_once_and_turns_it_off(error):
    sink, complaints = Recorder(error), list[str]()
    outlet = opened(sink, complaints)
    send(outlet, range(3))
    outlet.end(finished=True)
    outlet.join(60)
    send(outlet, range(3))
    assert len(complaints) == 1
    assert complaints[0].startswith(f"Tracker is off from here on: {type(error).__name__}: {error}")


def test_a_package_that_is_missing_is_named_with_the_extra():
    def build() -> Any:
        import no_such_package_at_all  # noqa: F401

    complaints: list[str] = []
    outlet = opened(build, complaints)
    outlet.join(60)
    assert len(complaints) == 1
    assert "Tracker is not installed (No module named" in complaints[0]
    assert "pip install 'silva[wandb]'" in complaints[0]


def test_one_that_hangs_neither_blocks_the_run_nor_its_end():
    never, complaints = threading.Event(), list[str]()
    outlet = opened(Recorder(hangs=never), complaints)
    send(outlet, range(10 * MOST_WAITING))
    outlet.end(finished=True)
    outlet.join(0.01)
    assert len(complaints) == 2
    assert f"{MOST_WAITING} messages wait" in complaints[0]
    assert "Tracker did not answer in time" in complaints[1]
    never.set()


def monitor(folder: Path, *sinks: Mapping[str, Any], resume: int | None = None) -> Monitor:
    settings = Monitoring.model_validate({"terminal": "plain", "tensorboard": False, "sinks": sinks})
    console = Console(file=io.StringIO(), width=200)
    return Monitor(folder, settings, name="walk", total_steps=9, resume_step=resume, config={"seed": 1},
                   console=console)  # fmt: skip


def test_lines_of_json_hold_steps_messages_and_some_rollouts(tmp_path):
    rows = [rollout(1, i, random.Random(i), 0.5) for i in range(8)]
    with monitor(tmp_path, {"type": "jsonl", "samples": 2}) as running:
        running.step(1, {"reward/raw": 0.5, "train/loss": float("nan")})
        running.rollouts(1, rows)
        running.rollouts(2, rows)  # not one of the steps whose rollouts are sent
        running.message("mind the gap", "warning")
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines] == ["step", "sample", "sample", "message", "end"]
    assert lines[0]["metrics"] == {"reward/raw": 0.5}
    assert [line["reward"] for line in lines[1:3]] == [r.trajectory.raw_reward for r in (rows[0], rows[-1])]
    assert lines[1]["prompt"].startswith("[user] You stand at P")
    assert lines[1]["reply"].startswith("[assistant] <think>")
    assert (lines[3]["level"], lines[3]["text"]) == ("warning", "mind the gap")


def test_prometheus_reads_the_newest_numbers_and_nothing_else(tmp_path):
    with monitor(tmp_path, {"type": "prometheus", "port": 0}) as running:
        running.step(1, {"reward/raw": 0.25})
        running.step(2, {"reward/raw": 0.5})
        running.message("a warning", "warning")
        ready = threading.Event()
        running._outlets._sinks[0][1].put(lambda sink: ready.set())
        assert ready.wait(60)
        address = (tmp_path / "run.log").read_text().partition("at http://")[2].split()[0]
        text = urllib.request.urlopen(f"http://{address}", timeout=60).read().decode()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://{address.partition('/')[0]}/etc/passwd", timeout=60)
    assert 'silva_metric{run="walk",metric="reward/raw"} 0.5\n' in text
    assert 'silva_step{run="walk"} 2\n' in text
    assert 'silva_warnings_total{run="walk"} 1\n' in text


def test_a_port_that_is_taken_is_a_warning(tmp_path):
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        monitor(tmp_path, {"type": "prometheus", "port": taken.getsockname()[1]}) as running,
    ):
        running.step(1, {"a": 1.0})
    assert "Prometheus could not be opened: ConfigError" in (tmp_path / "run.log").read_text()
    assert [row["a"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1.0]


def test_a_resumed_run_is_the_same_one_for_trackers(tmp_path):
    for resume in (None, 3):
        with monitor(tmp_path, {"type": "jsonl"}, resume=resume):
            pass
        found = json.loads((tmp_path / "tracking.json").read_text())["id"]
        assert len(found) == 8
        if resume is None:
            first = found
    assert found == first


def test_a_configuration_by_dotted_keys():
    config = {"a": {"b": 1, "c": {}}, "d": [{"e": 2}], "f": [1, 2]}
    assert plain(config) == {"a.b": 1, "a.c": {}, "d.0.e": 2, "f": [1, 2]}
