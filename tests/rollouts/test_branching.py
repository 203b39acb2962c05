"""Forests of branching episodes: how many leaves, what they share, where they fork; time does not matter."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_engine import ScriptedEngine
from tests.contracts.doubles import Slow
from tests.rollouts.conftest import Talk, World, a_task

from silva.config.sections import EpisodeLimits
from silva.models.tiny import tiny_tokenizer
from silva.ports import derive, uniform
from silva.protocols import Work
from silva.rendering.renderer import Renderer
from silva.rollouts.branching import Branching, branch_probability
from silva.rollouts.linear import Linear
from silva.rollouts.settings import BranchingRolloutSettings, LinearRolloutSettings
from silva.types import Completion, Observation, SamplingParams, Step, Trajectory

RENDERER = Renderer(tiny_tokenizer())
UNIT = math.log(len(tiny_tokenizer()))


@dataclass
class Fork(Talk):
    """Ends by itself after `turns` turns, or at once when it hears "6"."""

    async def step(self, message: Any) -> Step:
        step = await super().step(message)
        return replace(step, terminated=step.terminated or message.content.startswith("6"))

    async def fork(self, seed: int) -> Fork:
        return replace(self, heard=[*self.heard], closed=0)


class Unsure(ScriptedEngine):
    """Says a digit that depends on the seed; each token of its nth reply has the nth entropy, or the last."""

    def __init__(self, *entropies: float) -> None:
        super().__init__(lambda tokens, params: RENDERER.encode_reply(f"{params.seed % 7} is what I say"))
        self.entropies = entropies
        self.mark = tiny_tokenizer().convert_tokens_to_ids("<|assistant|>")

    async def sample(self, tokens: Sequence[int], params: SamplingParams, *, session: str = "") -> Completion:
        found = await super().sample(tokens, params, session=session)
        turn = list(tokens).count(self.mark) - 1
        entropy = self.entropies[min(turn, len(self.entropies) - 1)]
        return replace(found, entropies=(entropy,) * len(found.tokens))


def grow(
    engine: Any = None,
    make: Callable[..., Any] = Fork,
    turns: int = 4,
    seed: int = 7,
    on_turn: Callable[[str, str | None], None] = lambda episode, waiting_for: None,
    **keys: Any,
) -> tuple[Trajectory, ...]:
    keys = {"limits": EpisodeLimits(max_turns=10, timeout=60), "entropy_weight": 0.0, **keys}
    strategy = Branching(
        BranchingRolloutSettings(**keys), engine or Unsure(1.0), RENDERER, seed=seed, on_turn=on_turn
    )
    world = World(lambda task: make(task, turns))

    async def run() -> tuple[Trajectory, ...]:
        (group,) = [g async for g in strategy.run(Work("s1g0", a_task(), world, 1.0))]
        return group.trajectories

    return asyncio.run(run())


def forks(leaves: Sequence[Trajectory]) -> list[tuple[str, str | None, int | None]]:
    return [(t.id.removeprefix("s1g0/"), t.parent and t.parent.removeprefix("s1g0/"), t.fork_turn)
            for t in leaves]  # fmt: skip


def test_roots_alone_are_linear_rollouts_bit_for_bit() -> None:
    linear = Linear(
        LinearRolloutSettings(group_size=5, limits=EpisodeLimits(max_turns=10)), Unsure(1.0), RENDERER, seed=7
    )

    async def run() -> tuple[Trajectory, ...]:
        world = World(lambda task: Fork(task, 4))
        (group,) = [g async for g in linear.run(Work("s1g0", a_task(), world, 1.0))]
        return group.trajectories

    assert grow(group_size=5, initial_rollouts=5, branch_probability=1.0) == asyncio.run(run())


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(2, 20),
    roots=st.integers(1, 20),
    beam=st.integers(2, 5),
    probability=st.floats(0, 1),
    variant=st.sampled_from(["paper", "code"]),
    penalty=st.floats(0, 1),
    gap=st.none() | st.floats(0, 4),
    seed=st.integers(0, 99),
)
def test_a_forest_has_the_leaves_that_were_asked_for(
    size: int, roots: int, beam: int, probability: float, variant: str, penalty: float, gap: float, seed: int
) -> None:
    counted = {"initial_rollouts": min(roots, size)} if gap is None else {"entropy_gap_weight": gap}
    leaves = grow(
        Unsure(1.0, 0.5), seed=seed, group_size=size, beam_size=beam, branch_probability=probability,
        variant=variant, branch_penalty=penalty, **counted,
    )  # fmt: skip
    assert len(leaves) == size == len({t.id for t in leaves})
    assert all(t.failure is None and t.stop_reason == "terminated" for t in leaves)
    known = {t.id: t for t in leaves}
    for leaf in leaves:
        if leaf.parent is None:
            assert leaf.fork_turn is None
            continue
        shared = leaf.fork_turn or 0
        assert 1 <= shared < len(leaf.turns)
        pairs = zip(leaf.turns[:shared], known[leaf.parent].turns, strict=False)
        assert all(mine is parents for mine, parents in pairs), "shared turns are the same objects"
        assert {turn.id for turn in leaf.turns[shared:]}.isdisjoint(
            turn.id for other in leaves if other is not leaf for turn in other.turns[:shared]
        )
    ids = [turn.id for turn in {id(turn): turn for t in leaves for turn in t.turns}.values()]
    assert len(ids) == len(set(ids))


def test_a_sure_branch_at_every_turn_spends_the_budget_at_the_first_chance() -> None:
    """Two roots with three branches each; a branch answers what its parent answered in its second turn."""
    leaves = grow(group_size=8, initial_rollouts=2, branch_probability=1.0, beam_size=3, turns=3, make=Talks)
    # Root 0: 2 branches after turn 1, 1 left: shares(1, 3) = [1, 0, 0] stays with the root, for turn 2.
    assert forks(leaves) == [
        ("0", None, None), ("0.1.1", "0", 1), ("0.1.2", "0", 1), ("0.2.1", "0", 2),
        ("1", None, None), ("1.1.1", "1", 1), ("1.1.2", "1", 1), ("1.2.1", "1", 2),
    ]  # fmt: skip
    parent, branch = leaves[0], leaves[1]
    assert branch.turns[1].segments[0] == parent.turns[1].segments[0], "the same observation"
    assert branch.turns[1].segments[1] != parent.turns[1].segments[1], "another reply"
    assert {leaf.episode for leaf in leaves[:4]} == {"s1g0/0"}


class Talks(Fork):
    async def step(self, message: Any) -> Step:
        return await Talk.step(self, message)

    async def fork(self, seed: int) -> Talks:
        return replace(self, heard=[*self.heard], closed=0)


def test_the_released_code_branches_one_turn_later() -> None:
    leaves = grow(
        group_size=2, initial_rollouts=1, branch_probability=1.0, turns=3, make=Talks, variant="code"
    )
    # Its first chance is the root's first reply, and the place of the fork is the next one.
    assert forks(leaves) == [("0", None, None), ("0.1.1", "0", 1)]
    late = grow(
        Unsure(0.0, 1.0, 0.0), group_size=2, initial_rollouts=1, branch_probability=0.0, entropy_weight=99.0,
        turns=4, make=Talks, variant="code",
    )  # fmt: skip
    assert forks(late)[1] == ("0.2.1", "0", 2), "the second reply was uncertain, the third is branched"
    paper = grow(
        Unsure(0.0, 1.0, 0.0), group_size=2, initial_rollouts=1, branch_probability=0.0, entropy_weight=99.0,
        turns=4, make=Talks,
    )  # fmt: skip
    assert forks(paper)[1] == ("0.1.1", "0", 1), "the second reply was uncertain and gets a sibling"


def test_a_budget_that_is_not_used_becomes_roots() -> None:
    leaves = grow(group_size=5, initial_rollouts=2, branch_probability=0.0, turns=2)
    assert forks(leaves) == [
        ("0", None, None), ("0.new.1", None, None), ("0.new.2", None, None),
        ("1", None, None), ("1.new.1", None, None),
    ]  # fmt: skip
    assert len({t.episode for t in leaves}) == 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        # P = 0.5 + 0.2 (H - H_root), H = 20 * entropy / ln(vocabulary) for replies of any length
        (dict(engine=Unsure(0.0, 0.0)), 0.5),
        (dict(engine=Unsure(0.0, UNIT / 20)), 0.7),
        (dict(engine=Unsure(UNIT / 20, 0.0)), 0.3),
        (dict(engine=Unsure(UNIT / 20, 0.0), entropy_weight=0.0), 0.5),
        (dict(engine=Unsure(0.0, UNIT / 4), entropy_tokens=4), 0.7),
    ],
)
def test_the_probability_is_the_paper_s(keys: dict[str, Any], expected: float) -> None:
    keys = {"entropy_weight": 0.2, "group_size": 2, "initial_rollouts": 1, "turns": 2, "make": Talks, **keys}
    for seed in range(60):
        drawn = uniform(derive(derive(seed, "s1g0", 0, 0), "branch", 1), [0])[0]
        assert (grow(seed=seed, **keys)[1].parent is not None) == (drawn < expected)


@pytest.mark.parametrize(
    ("variant", "penalty", "row", "gap", "expected"),
    [
        ("paper", 0.05, 1, 0.0, 0.475),  # 0.5 * 0.95
        ("paper", 0.05, 10, 0.0, 0.25),
        ("paper", 0.05, 20, 1.0, 0.0),
        ("paper", 0.05, 2, 1.0, 0.63),  # (0.5 + 0.2) * 0.9
        # The released AEPO at equal entropies: .50, .47, .37 and 0 for 0, 1, 4 and 10 branchings.
        ("code", 0.05, 0, 0.0, 0.5),
        ("code", 0.05, 1, 0.0, 0.474),
        ("code", 0.05, 4, 0.0, 0.375),
        ("code", 0.05, 10, 0.0, 0.0),
        # The released ARPO at -1, 0 and 1: .3, .5 and .7.
        ("code", 0.0, 4, -1.0, 0.3),
        ("code", 0.0, 4, 0.0, 0.5),
        ("code", 0.0, 4, 1.0, 0.7),
    ],
)
def test_branching_in_a_row_is_penalised(
    variant: str, penalty: float, row: int, gap: float, expected: float
) -> None:
    keys = BranchingRolloutSettings(variant=variant, branch_penalty=penalty)  # type: ignore[arg-type]
    assert branch_probability(keys, gap, row) == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize(
    ("gap", "weight", "roots"),
    # 16 * sigmoid(0.5 * gap): the released code's range is 7 to 10 for gaps of -1 to 1
    [(0.0, 0.5, 8), (1.0, 0.5, 10), (-1.0, 0.5, 6), (99.0, 0.5, 16), (-99.0, 0.5, 2), (9.0, 0.0, 8)],
)
def test_the_gap_of_entropies_decides_how_many_roots_there_are(gap: float, weight: float, roots: int) -> None:
    engine = Unsure(max(gap, 0.0) * UNIT / 20, max(-gap, 0.0) * UNIT / 20)
    leaves = grow(
        engine, group_size=16, entropy_gap_weight=weight, turns=3, make=Talks,
        branch_probability=1.0, beam_size=16,
    )  # fmt: skip
    assert len(leaves) == 16
    assert sum(t.parent is None for t in leaves) == roots
    assert all(t.parent != "s1g0/0" for t in leaves), "the root that was played first does not branch"


@pytest.mark.parametrize("seed", range(2))
def test_the_forest_does_not_depend_on_the_time_that_tools_take(seed: int) -> None:
    keys: dict[str, Any] = dict(
        group_size=12, initial_rollouts=3, branch_probability=0.6, beam_size=3, seed=seed, turns=5
    )
    plain = grow(**keys)
    numbers = iter(range(10**6))

    class Late(Fork):
        async def step(self, message: Any) -> Step:
            for _ in range((next(numbers) * 7919 + seed) % 23):
                await asyncio.sleep(0)
            return await super().step(message)

        async def reset(self) -> Observation:
            for _ in range((next(numbers) * 104729) % 17):
                await asyncio.sleep(0)
            return await super().reset()

    assert grow(make=Late, **keys) == plain
    assert grow(Slow(Unsure(1.0), turns=11), **keys) == plain


def test_an_episode_without_a_result_is_played_again_as_a_root() -> None:
    class Breaks(Fork):
        doomed = False

        async def fork(self, seed: int) -> Breaks:
            twin = replace(self, heard=[*self.heard], closed=0)
            twin.doomed = True
            return twin

        async def step(self, message: Any) -> Step:
            if self.doomed:
                raise OSError("the tool is gone")
            return await Talk.step(self, message)

    keys: dict[str, Any] = dict(group_size=4, initial_rollouts=2, branch_probability=1.0, make=Breaks)
    leaves = grow(**keys)
    assert forks(leaves) == [
        ("0", None, None),
        ("0.1.1.again.1", None, None),
        ("1", None, None),
        ("1.1.1.again.1", None, None),
    ]
    assert all(t.failure is None for t in leaves)
    kept = grow(redo=0, **keys)
    assert [t.failure for t in kept] == [None, "redo", None, "redo"]
    assert [t.parent for t in kept] == [None, "s1g0/0", None, "s1g0/1"]


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    size=st.integers(4, 12),
    roots=st.integers(1, 3),
    rate=st.sampled_from([0.15, 0.3, 0.5]),
    redo=st.integers(1, 3),
    variant=st.sampled_from(["paper", "code"]),
    seed=st.integers(0, 99),
)
def test_a_path_that_is_played_again_shares_no_name_and_no_seed_with_its_first_attempt(
    size: int, roots: int, rate: float, redo: int, variant: str, seed: int
) -> None:
    """Branches of a failed attempt stay; those of the next one begin at the same turns."""

    @dataclass
    class Shaky(Fork):
        luck: int = 0

        async def reset(self) -> Observation:
            self.luck = self.task.seed
            return await super().reset()

        async def step(self, message: Any) -> Step:
            if uniform(derive(self.luck, self.taken), [0])[0] < rate:
                raise OSError("the tool is gone")
            return await super().step(message)

        async def fork(self, seed: int) -> Shaky:
            return replace(self, heard=[*self.heard], closed=0, luck=seed)

    seeds: list[tuple[tuple[int, ...], int]] = []

    class Noted(Unsure):
        async def sample(
            self, tokens: Sequence[int], params: SamplingParams, *, session: str = ""
        ) -> Completion:
            seeds.append((tuple(tokens), params.seed))
            return await super().sample(tokens, params, session=session)

    leaves = grow(
        Noted(1.0, 0.5), Shaky, seed=seed, group_size=size, initial_rollouts=min(roots, size), redo=redo,
        branch_probability=0.7, beam_size=3, variant=variant,
    )  # fmt: skip
    assert len(leaves) == size == len({t.id for t in leaves})
    turns = {id(turn): turn.id for t in leaves for turn in t.turns}
    assert len(turns) == len(set(turns.values())), "two different turns have one id"
    assert len(seeds) == len({seed for _, seed in seeds}), (
        "two replies were drawn with the same random numbers"
    )


def test_branches_of_a_second_attempt_are_named_after_it() -> None:
    class Breaks(Talks):
        broken: ClassVar[list[str]] = []

        async def step(self, message: Any) -> Step:
            if self.taken == 1 and not self.broken:
                self.broken.append("once")
                raise OSError("the tool is gone")
            return await super().step(message)

    Breaks.broken.clear()
    leaves = grow(group_size=3, initial_rollouts=1, branch_probability=1.0, turns=2, make=Breaks)
    assert forks(leaves) == [
        ("0.again.1", None, None), ("0.again.1.1.1", "0.again.1", 1), ("0.1.1", "0", 1),
    ]  # fmt: skip


def test_whoever_watches_is_told_of_every_episode_and_of_its_end() -> None:
    told: dict[str, list[str | None]] = {}
    leaves = grow(
        group_size=6, initial_rollouts=2, branch_probability=0.8,
        on_turn=lambda episode, waiting_for: told.setdefault(episode, []).append(waiting_for),
    )  # fmt: skip
    assert set(told) == {t.id for t in leaves}
    assert all(entries[-1] is None and "engine" in entries for entries in told.values())


def test_more_roots_than_leaves_are_refused() -> None:
    with pytest.raises(ValueError, match="initial_rollouts = 9: expected at most group_size = 8"):
        BranchingRolloutSettings(group_size=8, initial_rollouts=9)
