"""What a probe foretells, against work played in virtual time by the run's own queue, and by hand."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import tomllib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests import virtual_clock

from silva.cli import main
from silva.commands.foretelling.probe import LoopProbe, _Over
from silva.commands.foretelling.rates import Rates, fitted
from silva.commands.foretelling.recorded import RecordedEngine, TimedRequest, TimedStep, TimedWork
from silva.commands.foretelling.schedule import Schedule
from silva.config.sections import Foretold
from silva.errors import EngineError
from silva.monitoring.alerts.foretold import PHASES, found, lines, together
from silva.monitoring.alerts.signs import Signs
from silva.orchestrator.work import WorkQueue
from silva.ports import CLOCK, use_clock
from silva.protocols import Work
from silva.types import Completion, Group, SamplingParams, Task


def schedule(
    level: int, train: float, *, tool: float = 1.0, crowd: float = 0.0, refill: int = 0
) -> dict[str, float]:
    """Pieces of two requests, 1 s of the engine each, with a tool between; what a step then takes."""
    first = TimedRequest(None, 7.0, 8.0, 10)
    second = TimedRequest(first, 8.0 + tool, 9.0 + tool, 10)
    work = TimedWork(7.0, 9.5 + tool, [first, second])
    rates = Rates({first: 1.0, second: 1.0}, [train], crowd)
    made = Schedule([work], rates, [refill], batch=2, level=level, publish=0.25, rest=0.25)
    return together([made.step() for _ in range(12)][4:])


def test_a_schedule_of_equal_work_is_what_a_hand_computes() -> None:
    """A batch plays for 1 + 1 + 1 + 0.5 = 3.5 s."""
    assert schedule(0, 2.0)["seconds"] == pytest.approx(3.5 + 2.0 + 0.25)
    assert schedule(0, 2.0)["engine_idle"] == pytest.approx(1 - (2.0 + 0.25) / 6)
    assert schedule(0, 2.0)["trainer_idle"] == pytest.approx(1 - 2.25 / 6)
    assert schedule(0, 2.0)["age"] == 0
    # Two batches in flight, each of which begins when the step before the last one has been taken.
    assert schedule(1, 1.0)["seconds"] == pytest.approx((3.5 + 1.0 + 0.25 + 0.25) / 2 - 0.25)
    # The trainer never waits: all is played with the weights of one and two steps before.
    busy = schedule(2, 20.0)
    assert busy["seconds"] == pytest.approx(20.25) and busy["sampling"] == 0
    assert busy["age"] == pytest.approx(2.0)
    # Pieces that replace others are played after them.
    assert schedule(0, 2.0, refill=1)["sampling"] == pytest.approx(2 * 3.5)
    # Each of two requests has half of the engine: with crowd = 1 one alone takes 1 s * (1 + 1), two 1 s * 3.
    assert schedule(0, 2.0, crowd=1.0)["sampling"] == pytest.approx(3 + 1 + 3 + 0.5)


def test_no_share_of_a_schedule_is_below_0_for_rounding() -> None:
    request = TimedRequest(None, 0.0, 1.0, 10)
    rates = Rates({request: 1.32}, [2.55], 0.3, 0.7, 0.8)
    made = Schedule([TimedWork(0.0, 1.0, [request])], rates, [0], batch=2, level=2, publish=2.3, rest=0.0)
    steps = [made.step() for _ in range(6)]
    assert min(step[f"{part}_idle"] for step in steps for part in ("engine", "trainer")) == 0.0


def test_a_request_that_fails_or_is_cancelled_has_ended() -> None:
    async def sample(tokens: Any, params: SamplingParams, *, session: str = "") -> Completion:
        if session == "fails":
            raise EngineError("no")
        await asyncio.sleep(0 if session == "answers" else 60)
        return Completion((1,), (0.0,), (0.0,), (0.0,), (0,), "length")

    engine = RecordedEngine(SimpleNamespace(sample=sample))  # type: ignore[arg-type]

    async def ask() -> None:
        for session in ("answers", "fails", "is cancelled"):
            with contextlib.suppress(EngineError, TimeoutError):
                async with asyncio.timeout(1.0):
                    await engine.sample([1], SamplingParams(1), session=session)

    for session in ("answers", "fails", "is cancelled"):
        engine.works[session] = TimedWork(0.0)
    with use_clock(virtual_clock.LoopClock()):
        virtual_clock.run(ask())
    requests = [request for work in engine.works.values() for request in work.requests]
    assert [(request.tokens, request.ended - request.began) for request in requests] == [
        (1, 0),
        (0, 0),
        (0, 1),
    ]


def test_a_request_that_failed_teaches_no_rate() -> None:
    """Alone a token takes a second; while the trainer is at work, two."""
    steps = [TimedStep(0, 10.0 * i, 6.0, 3.0, 0.0, 10.0 * i + 10.0, rows=10, issued=2) for i in range(4)]
    steps.append(TimedStep(1, 40.0, 0.0, 8.0, 0.0, 49.0, rows=10, issued=2))
    asked = [TimedRequest(None, step.began + 2 * n, step.began + 3 * n, n) for step in steps for n in (1, 2)]
    asked[-2:] = [TimedRequest(None, 41.0, 45.0, 2)]
    failed = [TimedRequest(None, step.began, step.began + 0.9, 0) for step in steps]
    for requests in (asked, asked + failed):
        assert fitted(steps, requests).engine == pytest.approx(0.5)


def test_works_without_requests_are_foretold_too() -> None:
    steps = [TimedStep(n // 2, 10.0 * n, 6.0, 3.0, 0.0, 10.0 * n + 10, rows=10, issued=2) for n in range(3)]
    made = Schedule([TimedWork(1.0, 4.0)], fitted(steps, []), [0], batch=2, level=1, publish=0.0, rest=1.0)
    assert [made.step()["sampling"] for _ in range(3)] == pytest.approx([3.0, 0.0, 0.0])


class Sampler:
    """An engine that gives n requests a token each in first + more * n seconds; it shares cores."""

    def __init__(self, first: float, more: float, share: float) -> None:
        self.first, self.more, self.share = first, more, share
        self.requests: dict[
            asyncio.Future[None], list[int]
        ] = {}  # versions of the tokens to come, and of others
        self.trains, self.stepping, self.version, self.busy = False, False, 0, 0.0

    async def sample(self, tokens: Any, params: SamplingParams, *, session: str = "") -> Completion:
        done = asyncio.get_running_loop().create_future()
        self.requests[done] = versions = [-1] * params.max_tokens
        if not self.stepping:
            self.stepping, self.task = True, asyncio.ensure_future(self._steps())
        await done
        zeros = (0.0,) * params.max_tokens
        return Completion((1,) * params.max_tokens, zeros, zeros, zeros, tuple(versions), "length")

    async def _steps(self) -> None:
        while self.requests:
            seconds = (self.first + self.more * len(self.requests)) / (self.share if self.trains else 1.0)
            await CLOCK.sleep(seconds)
            self.busy += seconds
            for done, versions in list(self.requests.items()):
                versions[versions.index(-1)] = self.version
                if -1 not in versions:
                    del self.requests[done]
                    done.set_result(None)
        self.stepping = False


class Play:
    """Episodes of two to four turns with a tool between them; which ones depends on the piece alone."""

    def __init__(self, engine: Any, tool: float) -> None:
        self.engine, self.tool, self.count = engine, tool, 0
        self.versions: dict[str, list[int]] = {}

    async def run(self, work: Work) -> AsyncIterator[Group]:
        number, self.count = self.count, self.count + 1
        versions = self.versions[work.id] = list[int]()

        async def episode(index: int) -> None:
            for turn in range(2 + (number + index) % 3):
                place = (7 * number + 3 * index + 5 * turn) % 20
                asked = SamplingParams(10 + place)
                versions.extend((await self.engine.sample([1], asked, session=f"{work.id}/{index}")).versions)
                await CLOCK.sleep(self.tool * (0.5 + place / 20))

        await asyncio.gather(*map(episode, range(3)))
        yield Group(work.id, work.task, ())


class Machine:
    """A loop with the run's own queue; updates take `train` seconds on average, more beside requests."""

    def __init__(self, *, train: float, tool: float, engine: float = 1.0, trainer: float = 1.0) -> None:
        self.sampler = Sampler(0.02, 0.004, engine)
        self.train, self.trainer = train, trainer
        task = SimpleNamespace(label="w", taskset=None), Task("w/0", "w", 0, {})
        stream: Any = SimpleNamespace(draw=lambda: task)
        ledger: Any = SimpleNamespace(record=lambda *a, **k: None, commit=lambda: None)
        self.engine = RecordedEngine(self.sampler)  # type: ignore[arg-type]
        self.play = Play(self.engine, tool)
        self.work = WorkQueue(stream, self.play, ledger, batch=4, steps=1000)
        config = SimpleNamespace(
            algorithm=SimpleNamespace(on_policy=False), placement=SimpleNamespace(threads=1),
            rollout=SimpleNamespace(overlap_training=False, max_async_level=3),
        )  # fmt: skip
        self.parts = SimpleNamespace(
            buffer=SimpleNamespace(work=self.work), phases=SimpleNamespace(step={}), config=config,
            trainer=SimpleNamespace(capabilities=SimpleNamespace(publishes="folder")),
        )  # fmt: skip
        self.state = SimpleNamespace(tokens_in_rows=0)

    async def steps(self, count: int, done: Any = lambda: None) -> list[dict[str, float]]:
        rows = list[dict[str, float]]()
        with contextlib.suppress(_Over):
            for step in range(1, count + 1):
                rows.append(await self._step(step))
                done()
        await self.work.close()
        return rows

    async def _step(self, step: int) -> dict[str, float]:
        sampler, busy, times = self.sampler, self.sampler.busy, [CLOCK.monotonic()]
        taken = await self.work.take(4, step, attempt=0, temperature=1.0)
        times.append(CLOCK.monotonic())
        tokens = 800 + 400 * (step * 0.618 % 1)
        sampler.trains, left = True, self.train * tokens / 1000
        while left > 0:
            await CLOCK.sleep(0.01)
            left -= 0.01 * (self.trainer if sampler.requests else 1.0)
        times.append(CLOCK.monotonic())
        await CLOCK.sleep(0.1)
        sampler.trains = False
        times.append(CLOCK.monotonic())
        self.state.tokens_in_rows += int(tokens)
        versions = [version for piece in taken for version in self.play.versions[piece.work.id]]
        age = sum(sampler.version - version for version in versions) / len(versions)
        sampler.version += 1
        phases = dict(zip(PHASES, [b - a for a, b in itertools.pairwise(times)], strict=True))
        self.parts.phases.step = phases
        await CLOCK.sleep(0.05)
        passed = CLOCK.monotonic() - times[0]
        return {
            "step": step, "perf/peak_memory_bytes": 2.0**30, "train/share/age1": age,
            "perf/idle/trainer": 1 - (phases["train"] + phases["publish"]) / passed,
            "perf/idle/engine": 1 - (sampler.busy - busy) / passed,
            **{f"perf/seconds/{name}": each for name, each in phases.items()},
        }  # fmt: skip


def probed(seconds: float, **machine: float) -> Mapping[int, Mapping[str, float]]:
    """What a probe foretells."""

    async def play() -> Mapping[int, Mapping[str, float]]:
        made = Machine(**machine)  # type: ignore[arg-type]
        probe = LoopProbe(made, made.engine, seconds)  # type: ignore[arg-type]
        rows = await made.steps(1000, probe.step)
        assert made.work.level == 1
        return probe.foretold(rows)

    with use_clock(virtual_clock.LoopClock()):
        return virtual_clock.run(play())


@functools.cache
def came(level: int, **machine: float) -> dict[str, float]:
    async def play() -> list[dict[str, float]]:
        made = Machine(**machine)  # type: ignore[arg-type]
        made.work.level = level
        return await made.steps(16)

    with use_clock(virtual_clock.LoopClock()):
        return found(virtual_clock.run(play())[4:])


MACHINES: list[dict[str, float]] = [
    {"train": 1.0, "tool": 2.0},  # tools take longest
    {"train": 3.0, "tool": 2.0},
    {"train": 12.0, "tool": 0.1},  # the trainer does
    {"train": 6.0, "tool": 0.5, "engine": 0.5, "trainer": 0.6},  # they share cores
    {"train": 4.0, "tool": 0.0, "engine": 0.7, "trainer": 0.8},
    {"train": 8.0, "tool": 1.0, "engine": 0.4, "trainer": 0.5},
]


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
def test_levels_are_foretold_from_a_minute_of_levels_0_and_1_and_from_two_steps_of_each(
    machine: dict[str, float],
) -> None:
    for seconds, near in ((60.0, 0.06), (1.0, 0.12)):
        told = probed(seconds, **machine)
        assert sorted(told) == [0, 1, 2, 3]  # 3: that of the configuration
        for level in told:
            what = came(level, **machine)
            assert told[level]["seconds"] == pytest.approx(what["seconds"], rel=0.1)
            for name in ("engine_idle", "trainer_idle", "age"):
                assert told[level][name] == pytest.approx(what[name], abs=near)
            assert told[level]["memory"] == 1.0


STEP = {"perf/seconds/rollout": 2.0, "perf/seconds/train": 1.0, "perf/seconds/publish": 0.5,
        "perf/idle/engine": 0.4, "train/share/age0": 0.25, "train/share/age2": 0.75,
        "rollout/sampled_tokens": 300.0, "perf/peak_memory_bytes": 2.0**31}  # fmt: skip
SUPERVISED = {name: value for name, value in STEP.items() if "rollout" not in name}  # not what a plan is of


def test_a_run_says_how_wrong_its_plan_was() -> None:
    rows = [
        STEP,
        {**STEP, "perf/seconds/rollout": 4.0, "rollout/sampled_tokens": 100.0},
        {**STEP, "eval/x": 1.0},
    ]
    evaluation = {"step": 0, "perf/seconds/eval": 9.0}
    assert found([evaluation, *rows]) == pytest.approx({
        "seconds": 12.5 / 3, "sampling": 8 / 3, "training": 1.0, "publishing": 0.5, "engine_idle": 0.4,
        "age": 1.5, "tokens": 700 / 3, "memory": 2.0,
    })  # fmt: skip
    plan = Foretold(seconds=3.0, engine_idle=0.5, trainer_idle=0.5, age=1.0, memory=2.5)
    assert lines(plan, rows) == [
        "plan: a step: 3 s foretold, 4.17 s found (-28%)",
        "plan: engine idle: 50% foretold, 40% found",
        "plan: age of tokens: 1 versions foretold, 1.5 versions found",
        "plan: peak memory of the loop's process: 2.5 GiB foretold, 2 GiB found (+25%)",
    ]
    plan = Foretold(publishing=0.5, tokens=9.0)
    assert lines(plan, [{**STEP, "perf/seconds/publish": 0.0, "rollout/sampled_tokens": 0.0}]) == [
        "plan: publishing: 0.5 s foretold, 0 s found",
        "plan: tokens sampled a step: 9 foretold, 0 found",
    ]
    assert lines(plan, [SUPERVISED]) == []


def test_steps_that_take_longer_than_planned_are_told_once() -> None:
    row = {**STEP, "trajectories/played": 8}
    assert not any(Signs(planned=seconds).step(row) for seconds in (0.0, 2.0))
    supervised = {**SUPERVISED, "trajectories/played": 8, "perf/seconds/train": 9.0}
    assert not any(Signs(planned=1.0).step(supervised) for _ in range(15))
    for planned, told in ((2.0, 1), (3.0, 0), (0.0, 0)):
        signs = Signs(planned=planned)
        said = [text for _ in range(15) for text in signs.step(row)]
        assert [text.partition(":")[0] for text in said] == [
            f"a step takes 3.5 s, {planned:g} s were foretold"
        ] * told


CONFIG = """
steps = 2
model = {type = "tiny", layers = 1, width = 32}
environments = [{type = "bandit", style = "compact"}]
rollout = {groups_per_step = 4, group_size = 4, limits = {max_turns = 2, max_turn_tokens = 4}}
algorithm = {drop_zero_variance = false, max_refills = 0}
eval = {every = 0, tasks = 2}
monitoring = {terminal = "off"}
"""


@pytest.mark.slow
def test_the_plan_of_a_probe_is_a_file_whose_run_says_how_wrong_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.toml").write_text(CONFIG)
    assert main(["rl", "@", "a.toml", "--dry-run", "--probe", "1"]) == 0
    text = capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["a.toml"]  # the run is as it was
    plan = tomllib.loads(text)["plan"]
    assert plan["seconds"] >= plan["training"] > 0 and plan["age"] == 0 and "# --probe" in text
    assert "#   at level 0: a step " in text and "at level 1" not in text  # the trainer shares its weights
    Path("b.toml").write_text(text)
    assert main(["rl", "@", "b.toml"]) in (0, 3)  # 3: in two steps nothing was learned
    log = (tmp_path / "runs" / "run" / "run.log").read_text()
    assert " result: plan: a step: " in log
    assert " result: plan: tokens sampled a step: " in log


PROBE, SERVICES = ["--dry-run", "--probe", "5"], ["--placement.type", "services"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--probe", "5"], "--probe: got no --dry-run"),
        (["--dry-run", "--probe", "0"], "--probe: got 0, expected a number of seconds above 0"),
        (["--dry-run", "--probe", "soon"], "--probe: got soon, expected"),
        (["--dry-run", "--probe", "nan"], "--probe: got nan, expected"),
        (["--seeds", "0-3", "--probe", "5"], "--seeds and --probe: got both"),
        (["--seeds", "0-3", "--dry-run", "--probe", "5"], "--seeds and --dry-run: got both"),
        ([*PROBE, "--rollout.sampling.temperature", "0"], "rollout.sampling.temperature = 0: greedy"),
        ([*PROBE, "--rollout.max_async_level", "1"], "rollout.max_async_level = 1: trainer.type"),
        ([*PROBE, "--placement.type", "ray"], '--probe: got placement.type = "ray": parts that others'),
        ([*PROBE, *SERVICES, "--placement.trainer", "unix:/t"], "--probe: got placement.trainer: parts"),
        ([*PROBE, *SERVICES, "--placement.inference", '["unix:/i"]'], "--probe: got placement.inference:"),
        (
            [*PROBE, "--engine.type", "http", "--engine.urls", '["unix:/i"]'],
            '--probe: got engine.type = "http"',
        ),
    ],
)
def test_what_a_probe_refuses(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.toml").write_text(CONFIG)
    assert main(["rl", "@", "a.toml", *flags]) != 0
    assert words in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a.toml"]
