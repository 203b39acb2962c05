"""A batch: in order of issue whatever finishes first, filtered, refilled within the limit, recorded."""

import asyncio
import math

import numpy as np
import pytest
from tests.orchestrator.test_work import Tasks

from silva.algorithms.filters import DifficultyPools, VarianceFilter
from silva.algorithms.recipes import Dapo, Grpo, Ppo, StarpoS
from silva.config.sections import EpisodeLimits
from silva.errors import NoSignalError
from silva.orchestrator.buffer import Buffer, learned_turns
from silva.orchestrator.rl import split
from silva.orchestrator.tasks import Source, TaskStream
from silva.orchestrator.work import WorkQueue
from silva.rollouts.samples import trajectory_samples
from silva.rollouts.settings import LinearRolloutSettings
from silva.storage.ledger import Ledger, audit, read
from silva.storage.rollouts import LearnedTurn
from silva.types import Group, Segment, Trajectory, Turn

VARIED, EQUAL, FAILED, PARTLY, ONE = (0.0, 1.0), (1.0, 1.0), (None, None), (None, 0.0, 1.0), (None, 1.0)


class Played:
    """A rollout whose k-th group has the k-th rewards (None: failed); later groups finish first."""

    def __init__(self, *rewards):
        self.rewards, self.calls = rewards, 0

    async def run(self, work):
        rewards = self.rewards[self.calls % len(self.rewards)]
        self.calls += 1
        for _ in range(50 - self.calls):
            await asyncio.sleep(0)
        yield Group(work.id, work.task, tuple(trajectory(f"{work.id}/{i}", r) for i, r in enumerate(rewards)))


def trajectory(id, reward):
    turn = Turn(f"{id}/0", (Segment("environment", (1, 2)),), fresh=True)
    if reward is None:
        return Trajectory(id, (turn,), "error", failure="redo", error=f"step: ValueError: {id[-1]}")
    return Trajectory(id, (turn,), "terminated", rewards={"score": reward})


def collect(
    tmp_path, *rewards, groups=4, max_refills=2, drop=True, seen=None, recipe=None, rollout=None, stream=None
):
    recipe = recipe or Grpo(drop_zero_variance=drop, max_refills=max_refills)
    ledger = Ledger.create(tmp_path / "ledger.jsonl")
    work = WorkQueue(
        stream or TaskStream([Source("w", Tasks(), 1.0)], 0),
        rollout or Played(*rewards),
        ledger,
        batch=math.ceil(groups * recipe.oversample),
        steps=10,
        on_played=(lambda done, total: seen.append((done, total))) if seen is not None else lambda *_: None,
    )
    settings = LinearRolloutSettings(groups_per_step=groups, limits=EpisodeLimits(max_turn_tokens=100))
    return asyncio.run(Buffer(work, recipe, ledger, settings).collect(7, 1.0))


def keys(groups):
    return [group.key for group in groups]


def test_groups_stand_in_order_of_issue(tmp_path):
    seen = []
    batch = collect(tmp_path, VARIED, seen=seen)
    assert keys(batch.kept) == ["s7g0", "s7g1", "s7g2", "s7g3"] and batch.dropped == []
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_work_in_flight_goes_on_while_groups_are_sealed(tmp_path):
    """Another coroutine has a turn after each of 40 pieces."""
    turns = [0]

    class Remembered(TaskStream):
        def remember(self, group):
            turns.append(turns[0])

    class Counted(Played):
        async def run(self, work):
            if self.calls == 0:
                self.counting = asyncio.ensure_future(count())
            async for group in super().run(work):
                yield group

    async def count():
        while True:
            turns[0] += 1
            await asyncio.sleep(0)

    stream = Remembered([Source("w", Tasks(), 1.0)], 0)
    collect(tmp_path, groups=40, rollout=Counted(VARIED), stream=stream)
    sealed = turns[1:]
    assert len(sealed) == 40 and len(set(sealed)) == 40


def test_what_teaches_nothing_is_dropped_with_its_reason_and_refilled(tmp_path):
    batch = collect(tmp_path, VARIED, EQUAL, FAILED, ONE, VARIED, VARIED, EQUAL, VARIED)
    assert keys(batch.kept) == ["s7g0", "s7g4", "s7g5", "s7g7"]
    assert [(d.group.key, d.reason) for d in batch.dropped] == [
        ("s7g1", "zero_variance"), ("s7g2", "failed"), ("s7g3", "zero_variance"),
        ("s7g6", "zero_variance")]  # fmt: skip
    records = read(tmp_path / "ledger.jsonl")
    issued = [(r.fields["work"], r.fields["attempt"]) for r in records if r.event == "issued"]
    assert issued == [(f"s7g{i}", attempt) for i, attempt in enumerate((0, 0, 0, 0, 1, 1, 1, 2))]
    assert audit(records) == []
    assert [s[-1] for s in audit(records, finished=True)] == ["d"] * 4  # kept, and not trained yet


def test_a_group_that_failed_in_part_trains_on_the_rest(tmp_path):
    batch = collect(tmp_path, PARTLY, groups=1)
    assert [t.id for t in batch.kept[0].scored] == ["s7g0/1", "s7g0/2"]
    assert [(row.status, row.reason) for row in batch.rows([])] == [
        ("failed", "redo: step: ValueError: 0"), ("trained", ""), ("trained", "")]  # fmt: skip
    sealed = next(r for r in read(tmp_path / "ledger.jsonl") if r.event == "sealed")
    assert sealed.fields["groups"]["s7g0"]["rewards"] == [None, 0.0, 1.0]


def test_the_file_of_rollouts_keeps_what_training_knew_of_each_turn():
    read, said = Segment("environment", (1, 2)), Segment("policy", (3, 4, 5), (-1.0,) * 3, versions=(0,) * 3)
    turns = (Turn("a", (read, said), fresh=True), Turn("b", (read, said)))
    played = Trajectory("x", turns, "terminated", rewards={"score": 1.0})
    (sample,) = trajectory_samples(played, "g")
    streams = {"observations": (np.arange(10) == 6).astype(np.float32)}
    weights = sample.loss_weights * (np.arange(10) != 9)
    sample = sample.replace(
        advantages=np.repeat([0.5, -1.0], 5),
        loss_weights=weights,
        old_logprobs=np.arange(10.0),
        streams=streams,
    )
    assert learned_turns(sample, played) == [
        LearnedTurn("a", (0.5,), (1.0,), (2.0, 3.0, 4.0), {"observations": (0.0,)}),
        LearnedTurn("b", (-1.0,), (1.0, 1.0, 0.0), (7.0, 8.0, 9.0), {"observations": (0, 1, 0, 0, 0)}),
    ]
    assert learned_turns(sample.replace(old_logprobs=None), played)[0].logprobs == ()
    clips = learned_turns(sample, played, np.arange(len(sample)) == 7)
    assert [each.clipped for each in clips] == [(False,), (True, False, False)]


def test_when_every_episode_fails_the_commonest_error_is_named(tmp_path):
    with pytest.raises(NoSignalError, match=r"step 7: all 18 episodes failed.*: 18 x step: ValueError: 0$"):
        collect(tmp_path, (None,), (None, None), groups=4)
    assert audit(read(tmp_path / "ledger.jsonl"), finished=True) == []


def dropped(batch):
    return [(d.group.key, d.reason) for d in batch.dropped]


@pytest.mark.parametrize(
    ("recipe", "groups", "rewards", "kept", "reasons"),
    [
        # Refills end at the limit: twice three more.
        (Grpo(max_refills=2), 3, [EQUAL], [], dict.fromkeys(range(9), "zero_variance")),
        # Without the filter equal groups are kept, and failed ones are not.
        (Grpo(drop_zero_variance=False, max_refills=0), 2, [EQUAL, FAILED], [0], {1: "failed"}),
        # A group that failed is replaced before the filter compares: half of four are two.
        (Ppo(variance_filter=VarianceFilter(keep="top_fraction", value=0.5), oversample=2.0), 2,
         [VARIED, FAILED, EQUAL, EQUAL, (0.0, 3.0)], [0, 4],
         {1: "failed", 2: "zero_variance", 3: "zero_variance"}),
        # 1.5 times 3 groups are 5: a batch is never larger than what was asked for.
        (Grpo(oversample=1.5), 3, [VARIED], [0, 1, 2], {3: "surplus", 4: "surplus"}),
        # Of these 5 two have no signal, three stay, and nothing more is asked for.
        (Grpo(oversample=1.5), 3, [VARIED, EQUAL, VARIED, EQUAL, VARIED], [0, 2, 4],
         {1: "zero_variance", 3: "zero_variance"}),
        # Means 0.5, 0.75, 0.25, then as refills 0.5 and 1.
        (Grpo(difficulty_range=(0.3, 0.7), max_refills=1), 3,
         [VARIED, (0.5, 1.0), (0.0, 0.5), VARIED, EQUAL], [0, 3],
         {1: "too_easy", 2: "too_hard", 4: "zero_variance"}),
    ],
)  # fmt: skip
def test_what_is_kept_and_why_the_others_are_not(tmp_path, recipe, groups, rewards, kept, reasons):
    batch = collect(tmp_path, *rewards, groups=groups, recipe=recipe)
    assert keys(batch.kept) == [f"s7g{i}" for i in kept]
    assert dropped(batch) == [(f"s7g{i}", reason) for i, reason in reasons.items()]
    statuses = ["failed" if reason == "failed" else "dropped" for reason in reasons.values()]
    rows = [row.status for row in batch.rows([])]
    assert rows == ["trained"] * 2 * len(kept) + [status for status in statuses for _ in (0, 1)]


def test_of_all_that_were_played_those_that_vary_most_are_trained(tmp_path):
    """Two groups wanted, four times as many played, the last two the best: reasons in order of issue."""
    spreads = [(0.0, r / 8) for r in (1, 0, 3, 5, 2, 4, 7, 6)]
    batch = collect(tmp_path, *spreads, groups=2, recipe=StarpoS())
    assert keys(batch.kept) == ["s7g6", "s7g7"]
    assert dropped(batch) == [(f"s7g{i}", "zero_variance" if i == 1 else "low_variance") for i in range(6)]
    records = read(tmp_path / "ledger.jsonl")
    assert [r.fields["attempt"] for r in records if r.event == "issued"] == [0] * 8
    logged = [(r.fields["group"], r.fields["reason"]) for r in records if r.event == "dropped"]
    assert logged == dropped(batch) and audit(records) == []


class Spoken(Played):
    """As Played; the i-th answer of a group has 60 + 20 i sampled tokens."""

    def __init__(self, *rewards):
        super().__init__(*rewards)
        self.temperatures = []

    async def run(self, work):
        self.temperatures.append(work.temperature)
        rewards = self.rewards[0]
        played = []
        for i, reward in enumerate(rewards):
            count = 60 + 20 * i
            said = Segment("policy", (3,) * count, logprobs=(-1.0,) * count, versions=(0,) * count)
            turns = (Turn(f"{work.id}/{i}/0", (Segment("environment", (1, 2)), said), fresh=True),)
            played.append(Trajectory(f"{work.id}/{i}", turns, "terminated", rewards={"score": reward}))
        yield Group(work.id, work.task, tuple(played))


def test_groups_come_shaped_and_the_ledger_has_their_raw_rewards(tmp_path):
    """60, 80, 100 and 120 tokens of at most 100, the last fifth of which costs: 0, 0, 1, 1."""
    rewards = (1.0, 0.0, 1.0, 1.0)
    batch = collect(tmp_path, groups=1, recipe=Dapo(), rollout=Spoken(rewards))
    played = batch.kept[0].trajectories
    assert [t.shaped["overlong"] for t in played] == [0, 0, -1, -1]
    assert [t.shaped_reward for t in played] == [1, 0, 0, 0]
    sealed = next(r for r in read(tmp_path / "ledger.jsonl") if r.event == "sealed")
    assert sealed.fields["groups"]["s7g0"]["rewards"] == [*rewards]


def test_penalties_alone_make_no_group_worth_training(tmp_path):
    batch = collect(tmp_path, groups=1, recipe=Dapo(max_refills=0), rollout=Spoken((1.0, 1.0, 1.0)))
    assert batch.kept == [] and dropped(batch) == [("s7g0", "zero_variance")]
    assert [t.shaped_reward for t in batch.dropped[0].group.trajectories] == [1, 1, 0]


def test_every_group_of_a_batch_is_played_at_one_temperature(tmp_path):
    rollout = Spoken((0.0, 0.0))
    collect(tmp_path, groups=2, max_refills=1, rollout=rollout)
    assert rollout.temperatures == [1.0] * 4  # refills too


def test_how_hard_a_task_was_is_remembered_whatever_becomes_of_its_group(tmp_path):
    """Means 0.5, 1 and 0."""
    stream = TaskStream([Source("w", Tasks(), 1.0)], 0, settings=DifficultyPools())
    collect(tmp_path, VARIED, EQUAL, (0.0, 0.0), groups=3, max_refills=0, stream=stream)
    assert sorted(stream.pools.values()) == ["easy", "hard"]


class ByTurn:
    """A rollout that makes three groups of a task, as one that compares thoughts at every turn does."""

    def __init__(self, *rewards):
        self.rewards, self.calls = rewards, 0

    async def run(self, work):
        mine = self.rewards[self.calls]
        self.calls += 1
        for turn, rewards in enumerate(mine):
            key = f"{work.id}.{turn}"
            yield Group(key, work.task, tuple(trajectory(f"{key}/{i}", r) for i, r in enumerate(rewards)))


def test_a_piece_of_work_may_give_several_groups_or_none(tmp_path):
    """Two pieces are wanted. The second has no group to train and the third none at all, so that two more
    are played; what is dropped is dropped group by group."""
    rollout = ByTurn((VARIED, EQUAL, VARIED), (EQUAL, EQUAL), (), (VARIED,))
    batch = collect(tmp_path, groups=2, rollout=rollout)
    assert keys(batch.kept) == ["s7g0.0", "s7g0.2", "s7g3.0"]
    assert dropped(batch) == [(f"s7g{name}", "zero_variance") for name in ("0.1", "1.0", "1.1")]
    records = read(tmp_path / "ledger.jsonl")
    sealed = {r.fields["work"]: list(r.fields["groups"]) for r in records if r.event == "sealed"}
    assert sealed == {
        "s7g0": ["s7g0.0", "s7g0.1", "s7g0.2"], "s7g1": ["s7g1.0", "s7g1.1"], "s7g2": [], "s7g3": ["s7g3.0"],
    }  # fmt: skip
    assert audit(records) == []


def test_surplus_is_whole_pieces_of_work(tmp_path):
    rollout = ByTurn((VARIED, VARIED), (VARIED,), (VARIED, EQUAL, VARIED))
    batch = collect(tmp_path, groups=2, rollout=rollout, recipe=Grpo(oversample=1.5))
    assert keys(batch.kept) == ["s7g0.0", "s7g0.1", "s7g1.0"]
    assert dropped(batch) == [("s7g2.1", "zero_variance"), ("s7g2.0", "surplus"), ("s7g2.2", "surplus")]


@pytest.mark.parametrize(
    ("count", "parts", "sizes"),
    [(8, 2, [4, 4]), (5, 2, [2, 3]), (7, 3, [2, 2, 3]), (2, 4, [1, 1]), (1, 1, [1]), (0, 3, [])],
)
def test_split_into_updates(count, parts, sizes):
    shares = split(list(range(count)), parts)
    assert [len(share) for share in shares] == sizes
    assert [g for share in shares for g in share] == list(range(count))
