"""Whole runs with `monitoring.trace`: what the file says, and that nothing else changes by it."""

import json
import signal
from collections import Counter

import pytest
from tests.runs import differences, metrics

ON = ("--monitoring.trace", "true")
TRACKS = {1: "loop", 2: "trainer", 3: "engine"}


def spans(events):
    return [(TRACKS[e["tid"]], e["name"], e["dur"] / 1e6) for e in events if e["ph"] == "X"]


@pytest.mark.same_bits
def test_the_trace_tells_the_same_as_the_summary_and_changes_nothing(server, tmp_path, undisturbed):
    ended = server.rl("alone", *ON, into=tmp_path)
    assert ended.status == 0, ended.output
    assert differences(ended.path, undisturbed) == []
    events = json.loads((ended.path / "trace.json").read_text())
    found = spans(events)
    summed = dict.fromkeys((name for track, name, _ in found if track == "loop"), 0.0)
    for track, name, seconds in found:
        if track == "loop":
            summed[name] += seconds
    assert summed == pytest.approx(json.loads((ended.path / "summary.json").read_text())["seconds"], abs=0.05)
    calls = Counter((track, name) for track, name, _ in found if track != "loop")
    assert calls["trainer", "publish"] == 4 and calls["trainer", "optim_step"] == 8
    assert [calls["engine", f"load version {n}"] for n in range(6)] == [1, 1, 1, 1, 1, 0]
    for name in ("requests", "episodes that wait for"):
        values = [sum(e["args"].values()) for e in events if e["ph"] == "C" and e["name"] == name]
        assert min(values) == values[-1] == 0 and max(values) > 1
    for row in metrics(ended.path)[1:]:
        assert 0 <= row["perf/idle/engine"] < 1 and 0 < row["perf/idle/trainer"] < 1


def test_without_it_there_is_no_file_and_one_process_has_no_idle_parts(alone):
    assert not (alone / "trace.json").exists()
    assert not any(key.startswith("perf/idle") for row in metrics(alone) for key in row)


def test_a_killed_run_leaves_a_file_to_which_its_second_life_adds(server, tmp_path):
    killed = server.rl("run", *ON, into=tmp_path, crash="publish:3")
    assert killed.status == -signal.SIGKILL
    left = json.loads((killed.path / "trace.json").read_text() + "]")
    assert Counter(name for track, name, _ in spans(left) if track == "loop")["train"] == 3
    ended = server.rl("run", *ON, "--resume", into=tmp_path)
    assert ended.status == 0, ended.output
    events = json.loads((ended.path / "trace.json").read_text())
    assert events[: len(left)] == left
    assert Counter(name for track, name, _ in spans(events) if track == "loop")["train"] == 3 + 2
