"""Spans, counters and idle shares, by a clock that only the test moves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from silva.monitoring.trace import Trace
from silva.monitoring.traced import TracedEngine, TracedTrainer
from silva.orchestrator.phases import Phases
from silva.ports import Clock, use_clock
from silva.types import OptimParams, SamplingParams, Snapshot

BEGAN = 1_000_000  # microseconds


class Hand(Clock):
    """In whole seconds; 7 stands for the time since the machine was started."""

    now = 0.0

    def monotonic(self) -> float:
        return 7 + self.now

    def time(self) -> float:
        return BEGAN / 1e6 + self.now


@pytest.fixture
def clock() -> Iterator[Hand]:
    with use_clock(Hand()) as hand:
        yield hand


class Part:
    """An engine and a trainer, each of whose calls takes so many seconds."""

    version = 3

    def __init__(self, clock: Hand, seconds: float) -> None:
        self.clock, self.seconds, self.asked = clock, seconds, list[str]()

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any, **kwargs: Any) -> str:
            self.asked.append(name)
            self.clock.now += self.seconds
            return f"answer of {name}"

        return call


def events(path: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text()) if event["ph"] == kind]


def spans(path: Path) -> list[tuple[str, str, float, float]]:
    """(track, name, begin, end), in seconds since the clock began."""
    tracks = {e["tid"]: e["args"]["name"] for e in events(path, "M") if e["name"] == "thread_name"}
    return [
        (tracks[e["tid"]], e["name"], (e["ts"] - BEGAN) / 1e6, (e["ts"] + e["dur"] - BEGAN) / 1e6)
        for e in events(path, "X")
    ]


def counted(path: Path, name: str) -> list[tuple[float, dict[str, int]]]:
    return [((e["ts"] - BEGAN) / 1e6, e["args"]) for e in events(path, "C") if e["name"] == name]


def test_idle_is_the_share_of_the_time_without_any_work(clock: Hand) -> None:
    trace = Trace(None)
    with trace.request():
        clock.now += 2
        with trace.request():  # two at once count once
            clock.now += 3
    clock.now += 1
    with trace.call("trainer", "score"):
        clock.now += 4
    assert trace.idle() == pytest.approx({"perf/idle/trainer": 6 / 10, "perf/idle/engine": 5 / 10})
    with trace.call("engine", "load version 1"), trace.request():
        clock.now += 1
    clock.now += 3
    assert trace.idle() == pytest.approx({"perf/idle/trainer": 1, "perf/idle/engine": 3 / 4})
    assert trace.idle() == {}  # no time has passed


def test_what_lasts_over_a_question_counts_on_both_sides(clock: Hand) -> None:
    trace = Trace(None)
    clock.now += 1
    with trace.request():
        clock.now += 1
        assert trace.idle() == pytest.approx({"perf/idle/trainer": 1, "perf/idle/engine": 1 / 2})
        clock.now += 3
    clock.now += 1
    assert trace.idle() == pytest.approx({"perf/idle/trainer": 1, "perf/idle/engine": 1 / 4})


def test_an_evaluation_is_no_part_of_a_step(clock: Hand) -> None:
    trace = Trace(None)
    phases = Phases(trace.phase)
    with phases("train"), trace.call("trainer", "score"):
        clock.now += 1
    with phases("eval"), trace.request():
        clock.now += 100
    with phases("rollout"):
        clock.now += 3
    assert trace.idle() == pytest.approx({"perf/idle/trainer": 3 / 4, "perf/idle/engine": 1})


def test_a_call_that_fails_is_over(clock: Hand) -> None:
    trace = Trace(None)
    with pytest.raises(KeyError), trace.request(), trace.call("trainer", "score"):
        clock.now += 1
        raise KeyError
    clock.now += 1
    assert trace.idle() == pytest.approx({"perf/idle/trainer": 1 / 2, "perf/idle/engine": 1 / 2})


def test_the_file_has_all_spans_and_counters(clock: Hand, tmp_path: Path) -> None:
    path = tmp_path / "lake" / "trace.json"
    path.parent.mkdir()
    with Trace(path) as trace:
        trace.turn("s1g0/0", "lake")
        trace.turn("s1g0/1", "lake")
        clock.now += 1
        trace.turn("s1g0/0", "engine")
        with trace.phase("train"):
            clock.now += 0.5
            with trace.call("trainer", "score"):
                clock.now += 1
            with trace.request():
                clock.now += 0.25
        trace.turn("s1g0/0", None)
    (name,) = (e["args"] for e in events(path, "M") if e["name"] == "process_name")
    assert name == {"name": "lake"}
    assert spans(path) == [("trainer", "score", 1.5, 2.5), ("loop", "train", 1, 2.75)]
    assert counted(path, "requests") == [(2.5, {"in flight": 1}), (2.75, {"in flight": 0})]
    assert counted(path, "episodes that wait for") == [
        (0, {"lake": 1}),
        (0, {"lake": 2}),
        (1, {"lake": 1, "engine": 1}),
        (2.75, {"lake": 1, "engine": 0}),
    ]


def test_parts_are_shown_by_what_they_are_asked(clock: Hand, tmp_path: Path) -> None:
    trainer, engine, path = Part(clock, 2), Part(clock, 1), tmp_path / "trace.json"

    async def run(trainer: TracedTrainer, engine: TracedEngine) -> None:
        assert await trainer.optim_step(OptimParams(lr=1)) == "answer of optim_step"
        await trainer.publish()
        await engine.load(Snapshot(3))
        assert cast(str, await engine.sample([1], SamplingParams(max_tokens=1))) == "answer of sample"
        await engine.score([1, 2], 1)

    with Trace(path) as trace:
        traced = TracedTrainer(cast(Any, trainer), trace), TracedEngine(cast(Any, engine), trace)
        asyncio.run(run(*traced))
        assert trace.idle() == pytest.approx({"perf/idle/trainer": 3 / 7, "perf/idle/engine": 4 / 7})
    assert (trainer.asked, engine.asked) == (["optim_step", "publish"], ["load", "sample", "score"])
    assert [part.version for part in traced] == [3, 3]
    assert spans(path) == [
        ("trainer", "optim_step", 0, 2),
        ("trainer", "publish", 2, 4),
        ("engine", "load version 3", 4, 5),
    ]
    assert counted(path, "requests") == [
        (5, {"in flight": 1}), (6, {"in flight": 0}), (6, {"in flight": 1}), (7, {"in flight": 0}),
    ]  # fmt: skip


def test_a_killed_run_lacks_the_closing_bracket_only(clock: Hand, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = Trace(path)
    with trace.phase("load"):
        clock.now += 1
    killed = path.read_text()
    with pytest.raises(json.JSONDecodeError):
        json.loads(killed)
    assert json.loads(killed + "]")[-1]["name"] == "load"


def test_what_ends_after_the_run_is_not_in_its_file(clock: Hand, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with Trace(path) as trace:
        request = trace.request()
        request.__enter__()
    request.__exit__(None, None, None)
    trace.turn("s1g0/0", "engine")
    assert counted(path, "requests") == [(0, {"in flight": 1})]


def test_a_full_disk_ends_the_trace_and_not_the_run(clock: Hand) -> None:
    said = list[str]()
    with Trace(Path("/dev/full"), said.append) as trace:
        with trace.phase("load"), trace.request():
            clock.now += 1
        assert trace.idle() == pytest.approx({"perf/idle/trainer": 1, "perf/idle/engine": 0})
    (line,) = said
    assert line.startswith("the trace ends here, its file cannot be written: [Errno 28]")
