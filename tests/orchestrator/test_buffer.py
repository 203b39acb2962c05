"""A batch: in order of issue whatever finishes first, filtered, refilled within the limit, recorded."""

import asyncio
from types import SimpleNamespace

import pytest

from silva.algorithms.recipes import Grpo
from silva.errors import NoSignalError
from silva.ledger import Ledger, audit, read
from silva.orchestrator.buffer import Buffer
from silva.orchestrator.rl import rollout_rows, split
from silva.orchestrator.tasks import TaskStream, World
from silva.types import Group, Segment, Task, Trajectory, Turn

VARIED, EQUAL, FAILED, PARTLY, ONE = (0.0, 1.0), (1.0, 1.0), (None, None), (None, 0.0, 1.0), (None, 1.0)


class Tasks:
    def tasks(self, split):
        return [Task(f"t{i}", "world", i, {}) for i in range(100)]


class Played:
    """A rollout whose k-th group has the k-th rewards (None: failed); later groups finish first."""

    settings = SimpleNamespace(group_size=2)

    def __init__(self, *rewards):
        self.rewards, self.calls = rewards, 0

    async def run(self, task, taskset, engine, *, key, temperature=None):
        rewards = self.rewards[self.calls % len(self.rewards)]
        self.calls += 1
        for _ in range(50 - self.calls):
            await asyncio.sleep(0)
        yield Group(key, task, tuple(trajectory(f"{key}/{i}", r) for i, r in enumerate(rewards)))


def trajectory(id, reward):
    turn = Turn(f"{id}/0", (Segment("environment", (1, 2)),), fresh=True)
    if reward is None:
        return Trajectory(id, (turn,), "error", failure="redo", error=f"step: ValueError: {id[-1]}")
    return Trajectory(id, (turn,), "terminated", rewards={"score": reward})


def collect(tmp_path, *rewards, groups=4, max_refills=2, drop=True, seen=None):
    ledger = Ledger.create(tmp_path / "ledger.jsonl")
    buffer = Buffer(
        stream=TaskStream([World("world", Tasks(), 1.0)], 0),
        rollout=Played(*rewards),
        engine=None,
        recipe=Grpo(drop_zero_variance=drop, max_refills=max_refills),
        ledger=ledger,
        groups=groups,
        longest=100,
        on_groups=(lambda done, total: seen.append((done, total))) if seen is not None else lambda *_: None,
    )
    return asyncio.run(buffer.collect(7, 1.0))


def keys(groups):
    return [group.key for group in groups]


def test_groups_stand_in_order_of_issue(tmp_path):
    seen = []
    batch = collect(tmp_path, VARIED, seen=seen)
    assert keys(batch.kept) == ["s7g0", "s7g1", "s7g2", "s7g3"] and batch.dropped == []
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_what_teaches_nothing_is_dropped_with_its_reason_and_refilled(tmp_path):
    batch = collect(tmp_path, VARIED, EQUAL, FAILED, ONE, VARIED, VARIED, EQUAL, VARIED)
    assert keys(batch.kept) == ["s7g0", "s7g4", "s7g5", "s7g7"]
    assert [(d.group.key, d.reason) for d in batch.dropped] == [
        ("s7g1", "zero_variance"), ("s7g2", "failed"), ("s7g3", "zero_variance"),
        ("s7g6", "zero_variance")]  # fmt: skip
    records = read(tmp_path / "ledger.jsonl")
    issued = [(r.fields["group"], r.fields["attempt"]) for r in records if r.event == "issued"]
    assert issued == [(f"s7g{i}", attempt) for i, attempt in enumerate((0, 0, 0, 0, 1, 1, 1, 2))]
    assert audit(records) == []
    assert [s[-1] for s in audit(records, finished=True)] == ["d"] * 4  # kept, and not trained yet


def test_refills_end_at_the_limit(tmp_path):
    batch = collect(tmp_path, EQUAL, groups=3, max_refills=2)
    assert batch.kept == [] and len(batch.dropped) == 9
    assert audit(read(tmp_path / "ledger.jsonl"), finished=True) == []


def test_without_the_filter_equal_groups_are_kept_and_failed_ones_are_not(tmp_path):
    batch = collect(tmp_path, EQUAL, FAILED, groups=2, drop=False, max_refills=0)
    assert keys(batch.kept) == ["s7g0"] and [d.reason for d in batch.dropped] == ["failed"]


def test_a_group_that_failed_in_part_trains_on_the_rest(tmp_path):
    batch = collect(tmp_path, PARTLY, groups=1)
    assert [t.id for t in batch.kept[0].scored] == ["s7g0/1", "s7g0/2"]
    assert [(row.status, row.reason) for row in rollout_rows(batch, [])] == [
        ("failed", "redo: step: ValueError: 0"), ("trained", ""), ("trained", "")]  # fmt: skip
    sealed = next(r for r in read(tmp_path / "ledger.jsonl") if r.event == "sealed")
    assert sealed.fields["rewards"] == [None, 0.0, 1.0]


def test_when_every_episode_fails_the_commonest_error_is_named(tmp_path):
    with pytest.raises(
        NoSignalError, match=r"step 7: all 18 episodes failed.* 12 of them with: step: ValueError: 0"
    ):
        collect(tmp_path, (None,), (None, None), groups=4)
    assert audit(read(tmp_path / "ledger.jsonl"), finished=True) == []


def test_an_error_that_is_no_episode_s_ends_the_batch_as_it_is(tmp_path):
    class Broken(Played):
        async def run(self, task, taskset, engine, *, key, temperature=None):
            if key == "s7g2":
                raise RuntimeError("the engine is gone")
            yield Group(key, task, ())
            await asyncio.sleep(3600)

    ledger = Ledger.create(tmp_path / "ledger.jsonl")
    stream = TaskStream([World("world", Tasks(), 1.0)], 0)
    buffer = Buffer(
        stream=stream, rollout=Broken(), engine=None, recipe=Grpo(), ledger=ledger, groups=4, longest=100
    )
    with pytest.raises(RuntimeError, match="the engine is gone"):
        asyncio.run(buffer.collect(7, 1.0))


@pytest.mark.parametrize(
    ("count", "parts", "sizes"),
    [(8, 2, [4, 4]), (5, 2, [2, 3]), (7, 3, [2, 2, 3]), (2, 4, [1, 1]), (1, 1, [1]), (0, 3, [])],
)
def test_split_into_updates(count, parts, sizes):
    shares = split(list(range(count)), parts)
    assert [len(share) for share in shares] == sizes
    assert [g for share in shares for g in share] == list(range(count))
