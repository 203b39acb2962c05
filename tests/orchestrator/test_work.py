"""Work in flight on a virtual clock: the order, the bound on staleness, and going on after a restart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import virtual_clock

from silva.errors import CheckpointError
from silva.orchestrator.tasks import Source, TaskStream
from silva.orchestrator.work import WorkQueue
from silva.protocols import Work
from silva.storage.ledger import Ledger, audit, read
from silva.types import Group, Task


class Tasks:
    def __init__(self, count: int = 50) -> None:
        self.all = [Task(f"t{i}", "w", i, {"n": i}) for i in range(count)]

    def tasks(self, split: str) -> list[Task]:
        return self.all


class Timed:
    """A rollout that takes `seconds(work)` and remembers under which version of `policy` each work began."""

    def __init__(self, seconds: Callable[[Work], float]) -> None:
        self.seconds, self.version, self.running = seconds, 0, 0
        self.began: dict[str, int] = {}

    async def run(self, work: Work) -> AsyncIterator[Group]:
        self.began[work.id] = self.version
        self.running += 1
        try:
            await asyncio.sleep(self.seconds(work))
        finally:
            self.running -= 1
        yield Group(work.id, work.task, ())


def queue(
    path: Path, rollout: Timed, *, steps: int, batch: int = 4, level: int = 0, **given: Any
) -> WorkQueue:
    stream = TaskStream([Source("w", given.pop("tasks", Tasks()), 1.0)], 0)  # type: ignore[arg-type]
    ledger = Ledger.open(path) if path.exists() else Ledger.create(path)
    return WorkQueue(stream, rollout, ledger, batch=batch, steps=steps, level=level, **given)


class Training:
    """What the loop does with a queue: take a batch, compute for some time, publish."""

    def __init__(self, work: WorkQueue, rollout: Timed, compute: float = 3.0) -> None:
        self.work, self.rollout, self.compute = work, rollout, compute
        self.taken: list[list[str]] = []
        self.staleness: list[int] = []
        self.busy: list[int] = []  # rollouts that ran while the trainer computed

    async def step(self, number: int, refills: tuple[int, ...] = ()) -> None:
        ids: list[str] = []
        for attempt, count in enumerate((self.work.batch, *refills)):
            played = await self.work.take(count, number, attempt=attempt, temperature=1.0)
            ids += [each.work.id for each in played]
        self.taken.append(ids)
        self.staleness.append(max(self.rollout.version - self.rollout.began[id] for id in ids))
        await asyncio.sleep(self.compute / 2)
        self.busy.append(self.rollout.running)
        await asyncio.sleep(self.compute / 2)
        self.rollout.version += 1


def trained(
    path: Path, level: int, seconds: Callable[[Work], float], steps: int = 6
) -> tuple[Training, float]:
    rollout = Timed(seconds)

    async def run() -> tuple[Training, float]:
        training = Training(queue(path, rollout, steps=steps, level=level), rollout)
        for step in range(1, steps + 1):
            await training.step(step)
        assert training.work.idle  # nothing is issued for steps behind the last one
        return training, virtual_clock.now()

    return virtual_clock.run(run())


@pytest.mark.parametrize(
    ("level", "rollouts", "seconds", "busy"),
    [
        (0, 2.0, 6 * 5, [0] * 6),  # nothing runs while the trainer computes
        (1, 2.0, 2 + 6 * 3, [0, 4, 4, 4, 4, 0]),  # the second batch begins with the first
        (2, 2.0, 2 + 6 * 3, [0, 4, 4, 4, 0, 0]),
        (1, 5.0, 27.0, [0, 4, 4, 4, 4, 0]),  # batch 3 is waited for for 2 s, batch 5 too
    ],
)
def test_rollouts_ahead_hide_behind_training_of_three_seconds(
    tmp_path: Path, level: int, rollouts: float, seconds: float, busy: list[int]
) -> None:
    training, elapsed = trained(tmp_path / "ledger.jsonl", level, lambda work: rollouts)
    assert elapsed == pytest.approx(seconds) and training.busy == busy
    assert training.staleness == [min(level, step) for step in range(6)]


@pytest.mark.slow
@given(level=st.integers(0, 3), seed=st.integers(0, 10**6), data=st.data())
@settings(max_examples=60, deadline=None)
def test_staleness_is_bounded_at_admission(
    tmp_path_factory: Any, level: int, seed: int, data: st.DataObject
) -> None:
    """Whatever rollouts take, and however many pieces are refilled."""
    path = tmp_path_factory.mktemp("run") / "ledger.jsonl"
    rollout = Timed(lambda work: Random(f"{seed} {work.id}").expovariate(0.3))
    steps, batch = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4))
    refills = data.draw(st.lists(st.lists(st.integers(1, 3), max_size=2), min_size=steps, max_size=steps))

    async def run() -> Training:
        training = Training(queue(path, rollout, steps=steps, batch=batch, level=level), rollout)
        for step, more in enumerate(refills, 1):
            await training.step(step, tuple(more))
        await training.work.close()
        return training

    training = virtual_clock.run(run())
    assert max(training.staleness) <= level
    taken = [id for step in training.taken for id in step]
    issued = [r.fields["work"] for r in read(path) if r.event == "issued"]
    assert taken == issued and len(set(taken)) == len(taken)  # in the order of issue, and all of it


def test_what_was_in_flight_is_issued_again_under_its_id(tmp_path: Path) -> None:
    """After two steps at level 1, four pieces of the third are in flight. They are played first again."""
    path, rollout = tmp_path / "ledger.jsonl", Timed(lambda work: 2.0)

    async def begin() -> tuple[list[dict[str, Any]], dict[str, Any], int]:
        training = Training(queue(path, rollout, steps=4, level=1), rollout)
        for step in (1, 2):
            await training.step(step)
        state = training.work.state(), training.work.stream.state(), training.work.ledger.position
        training.work.ledger.commit()
        await training.work.close()
        assert rollout.running == 0
        return state

    in_flight, position, ledger = virtual_clock.run(begin())
    assert [entry["id"] for entry in in_flight] == [f"s2g{i}" for i in range(4)]
    before = {r.fields["work"]: r.fields["task"] for r in read(path)}

    async def go_on() -> Training:
        work = queue(path, rollout, steps=4, level=1)
        work.stream.load(position)
        work.load(in_flight)
        work.ledger.roll_back(ledger, 2)
        assert work.state() == in_flight  # nothing has been played yet
        training = Training(work, rollout)
        for step in (3, 4):
            await training.step(step)
        return training

    assert virtual_clock.run(go_on()).taken == [[f"s2g{i}" for i in range(4)], [f"s3g{i}" for i in range(4)]]
    again = [(r.fields["work"], r.fields["task"]) for r in read(path) if r.event == "issued"][-8:]
    assert again[:4] == [(f"s2g{i}", before[f"s2g{i}"]) for i in range(4)]
    assert {task for _, task in again[4:]}.isdisjoint(before.values())  # the stream went on where it stood
    assert audit(read(path)) == []


def test_a_restart_looks_at_each_task_once_however_much_was_in_flight(tmp_path: Path) -> None:
    """Tasks are made when they are looked at, which may take longer than to play them."""
    made: list[str] = []

    class Made(Tasks):
        def tasks(self, split: str) -> Any:
            return (made.append(task.id) or task for task in self.all)  # type: ignore[func-returns-value]

    tasks = Tasks(40)
    work = queue(tmp_path / "l.jsonl", Timed(lambda work: 1.0), steps=4, tasks=tasks)
    work.stream.sources[0] = Source("w", Made(40), 1.0)  # type: ignore[arg-type]
    entries = [
        {"id": f"s2g{i}", "environment": "w", "task": f"t{39 - i}", "seed": 7, "temperature": 1.0}
        for i in range(30)
    ]
    work.load(entries)
    assert len(made) == 40 and work.state() == entries


def test_many_begin_without_keeping_the_loop_from_others(tmp_path: Path) -> None:
    """A timer that is due fires before a thousand pieces of work have begun."""
    begun = [0]

    class Busy(Timed):
        async def run(self, work: Work) -> AsyncIterator[Group]:
            begun[0] += 1
            async for group in super().run(work):
                yield group

    async def run() -> int:
        work = queue(tmp_path / "l.jsonl", Busy(lambda work: 1.0), steps=1, batch=1000, tasks=Tasks(1000))
        seen: list[int] = []
        asyncio.get_running_loop().call_later(0, lambda: seen.append(begun[0]))
        assert len(await work.take(1000, 0, attempt=0, temperature=1.0)) == 1000
        await work.close()
        return seen[0]

    assert virtual_clock.run(run()) < 100


def test_a_task_that_is_gone_is_named(tmp_path: Path) -> None:
    entry = {"id": "s2g3", "environment": "w", "task": "t49", "temperature": 1.0}
    work = queue(tmp_path / "l.jsonl", Timed(lambda work: 1.0), steps=4, tasks=Tasks(49))
    with pytest.raises(
        CheckpointError, match=r"work s2g3 was in flight.* got no task 't49' of environment 'w'"
    ):
        work.load([entry])


def test_an_error_ends_what_is_taken_and_close_ends_the_rest(tmp_path: Path) -> None:
    class Broken(Timed):
        async def run(self, work: Work) -> AsyncIterator[Group]:
            async for group in super().run(work):
                if work.id == "s1g2":
                    raise RuntimeError("the engine is gone")
                yield group

    rollout = Broken(lambda work: 1.0 if work.id == "s1g2" else 60.0)

    async def run() -> None:
        work = queue(tmp_path / "l.jsonl", rollout, steps=9, level=2)
        with pytest.raises(RuntimeError, match="the engine is gone"):
            await work.take(4, 1, attempt=0, temperature=1.0)
        assert rollout.running == 8 and virtual_clock.now() == 1.0
        await work.close()
        assert rollout.running == 0 and len(asyncio.all_tasks()) == 1
        assert virtual_clock.now() == 1.0  # nobody waited for it

    virtual_clock.run(run())


@pytest.mark.parametrize(
    ("most", "began"),
    [(None, [0, 0, 1, 2]), (2, [0, 0, 1, 2]), (1, [0, 0, 1, 2]), (0, [0, 0, 2, 2])],
)
def test_an_update_restarts_what_has_lived_through_too_many(
    tmp_path: Path, most: int | None, began: list[int]
) -> None:
    """Rollouts take 5 s and training 3 s, one batch ahead: only the third batch is half-way at an update.

    The first two begin together and end together; the fourth ends while the third plays again.
    """
    path, rollout = tmp_path / "ledger.jsonl", Timed(lambda work: 5.0)

    async def run() -> list[list[int]]:
        training = Training(queue(path, rollout, steps=4, level=1, max_updates=most), rollout)
        found = []
        for step in range(1, 5):
            await training.step(step)
            found.append([rollout.began[id] for id in training.taken[-1]])
            await training.work.updated(rollout.version)
        return found

    assert virtual_clock.run(run()) == [[version] * 4 for version in began]
    records = read(path)
    assert sum(r.event == "restarted" for r in records) == (0 if most != 0 else 4)
    assert [p for p in audit(records) if "restarted" in p or "in flight" in p] == []
    assert rollout.running == 0


def test_the_ledger_refuses_to_restart_what_is_not_in_flight(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger.create(path)
    ledger.record("restarted", work="s1g0", version=1)
    ledger.commit()
    assert audit(read(path)) == ["seq 0: work s1g0 is not in flight"]
