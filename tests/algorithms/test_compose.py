"""A recipe applied to a batch: shaped rewards, which groups are trained, the state of controllers."""

from __future__ import annotations

import dataclasses

import pytest
from tests.algorithms.by_hand import assigned, batch, failed, group, one_turn, recipe, trajectory, turn

from silva.algorithms.compose import compare, drop_reason, next_state, with_penalties
from silva.algorithms.control import AdaptiveEntropy, AdaptiveKl, AdaptiveTemperature
from silva.algorithms.filters import VarianceFilter
from silva.config.sections import EpisodeLimits
from silva.types import CompletionStop, Group, Segment, Trajectory, Turn

LIMITS = EpisodeLimits(max_turn_tokens=20)

# Shaped rewards.


def test_shaping_by_hand() -> None:
    """Longest 20, over its last half: 0 to 10 tokens, then 0.1 a token. Mean raw reward 2/3 (the failed one
    counts nowhere), longest of the group 25: -0.25 * 2/3 * l / 25."""
    lengths, rewards = (10, 15, 25), (1.0, 0.0, 1.0)
    played = [
        one_turn(f"g/{i}", n, r, penalty=-0.5) for i, (n, r) in enumerate(zip(lengths, rewards, strict=True))
    ]
    made = recipe("grpo", overlong_buffer=0.5, length_penalty=0.25)
    *scored, left_out = with_penalties(made, group("g", *played, failed("g/3")), LIMITS).trajectories
    assert [t.shaped["overlong"] for t in scored] == [0, -0.5, -1]
    assert [t.shaped["length"] for t in scored] == pytest.approx([-1 / 15, -1 / 10, -1 / 6], rel=1e-12)
    assert [t.shaped["format"] for t in scored] == [-0.5] * 3  # what the world said stays
    assert [t.raw_reward for t in scored] == [*rewards] and left_out == failed("g/3")
    by_hand = [1 - 0.5 - 1 / 15, -0.5 - 0.5 - 1 / 10, 1 - 0.5 - 1 - 1 / 6]
    assert [t.shaped_reward for t in scored] == pytest.approx(by_hand, rel=1e-12)


def test_without_penalties_or_results_a_group_stays_as_it_is() -> None:
    whole, broken = batch(1.0, 0.0), group("g", failed("g/0"))
    assert with_penalties(recipe("grpo"), whole, LIMITS) is whole
    assert with_penalties(recipe("dapo"), broken, LIMITS) is broken


def test_a_reply_is_overlong_by_the_room_that_its_limits_left_it() -> None:
    """A buffer of a fifth, 100 tokens a reply and 150 of context. Shown are 2 tokens, so that a second reply
    after one of 90 has 150 - 94 = 56. The worst reply counts."""

    def penalty(
        *turns: Turn, limits: EpisodeLimits = EpisodeLimits(max_turn_tokens=100, max_episode_tokens=150)
    ) -> float:
        played = group("g", trajectory("a", turns))
        return with_penalties(recipe("dapo"), played, limits).trajectories[0].shaped["overlong"]

    def said(count: int, stop: CompletionStop = "stop_token", fresh: bool = False) -> Turn:
        return dataclasses.replace(turn("t", 2, count, fresh=fresh), stop_reason=stop)

    cases: list[tuple[list[Turn], float]] = [
        ([said(80)], 0),
        ([said(90)], -0.5),  # half of the last fifth of 100
        ([said(100, "length")], -1),
        ([said(20)] * 5, 0),  # together 100, each of them short
        ([said(20), said(100, "length"), said(5)], -1),  # one was cut
        ([said(90), said(10)], -0.5),
        ([said(60), said(86, "length")], -1),  # 150 - 64: what the context had left
        ([said(60), said(77)], -(77 - 0.8 * 86) / (0.2 * 86)),
        ([said(60), said(77, fresh=True)], 0),  # in a context of its own it could have had 100
        ([said(30, "context_overflow")], -1),  # the engine's own limit is below
    ]
    for turns, expected in cases:
        assert penalty(*turns) == pytest.approx(expected, abs=1e-12), turns
    lots = EpisodeLimits(max_turn_tokens=4096, max_episode_tokens=2048)
    prompt = dataclasses.replace(turn("t", 600, 1448), stop_reason="length")
    assert penalty(prompt, limits=lots) == -1
    assert penalty(turn("t", 600, 1300), limits=lots) == pytest.approx(-(1300 - 0.8 * 1448) / (0.2 * 1448))


def test_a_thought_is_overlong_by_the_room_beside_the_action() -> None:
    """100 tokens a reply, of which the expert's action takes 20: a thought of 72 is halfway from 64 to 80."""
    thought = Segment("policy", (1,) * 72, logprobs=(-1.0,) * 72, versions=(0,) * 72)
    reply = Turn("t", (Segment("environment", (0, 0)), thought, Segment("expert", (1,) * 20)), fresh=True)
    played = group("g", Trajectory("a", (reply,), "terminated"))
    shaped = with_penalties(recipe("dapo"), played, EpisodeLimits(max_turn_tokens=100)).trajectories[0].shaped
    assert shaped["overlong"] == pytest.approx(-0.5)


# Which groups are trained.


def test_a_group_is_judged_by_its_raw_rewards() -> None:
    penalised = group("g", one_turn("a", 1, 1.0), one_turn("b", 1, 1.0, penalty=-0.5))
    assert drop_reason(recipe("grpo"), penalised) == "zero_variance"
    assert drop_reason(recipe("ppo"), penalised) is None
    assert drop_reason(recipe("grpo"), batch(0.0, 1.0)) is None
    for name in ("grpo", "ppo"):
        assert drop_reason(recipe(name), group("g", failed("a"), failed("b"))) == "failed"


def sooner_or_later() -> Group:
    """Equal totals: the first trajectory earns its reward in the first turn, the other in the second."""
    a = trajectory("a", [turn("a/0", 1, 1, 1.0), turn("a/1", 1, 1, 0.0)])
    b = trajectory("b", [turn("b/0", 1, 1, 0.0), turn("b/1", 1, 1, 1.0)])
    return group("g", a, b)


def test_credit_by_turn_keeps_a_group_of_equal_totals_at_different_turns() -> None:
    """Returns 1 and 0 against gamma and 1: only the second turns differ with gamma = 1."""
    assert drop_reason(recipe("grpo"), sooner_or_later()) == "zero_variance"
    for gamma, first_turns in ((0.5, [0.25, -0.25]), (1.0, [0, 0])):
        made = recipe("reinforce", credit="turn", gamma=gamma)
        assert drop_reason(made, sooner_or_later()) is None
        assert assigned(made, sooner_or_later()) == [[first_turns[0], -0.5], [first_turns[1], 0.5]]


def test_credit_by_turn_drops_a_group_whose_returns_are_equal() -> None:
    """By raw rewards: a penalty in the second turn is no signal. Nor is solving it in fewer turns without a
    discount: both first turns have the return 1, and the second turn of b has nothing to compare with."""
    penalised = trajectory("b", [turn("b/0", 1, 1, 1.0), turn("b/1", 1, 1, 0.0, shaped=-0.5)])
    a = trajectory("a", [turn("a/0", 1, 1, 1.0), turn("a/1", 1, 1, 0.0)])
    short = trajectory("c", [turn("c/0", 1, 1, 1.0)])
    long = trajectory("d", [turn("d/0", 1, 1, 0.0), turn("d/1", 1, 1, 1.0)])
    for gamma, reason in ((1.0, "zero_variance"), (0.5, None)):
        made = recipe("reinforce", credit="turn", gamma=gamma)
        assert drop_reason(made, group("g", a, penalised)) == "zero_variance"
        assert drop_reason(made, group("g", short, long)) == reason


def test_selection_sees_what_the_credit_sees() -> None:
    """gamma 1. The first group: returns 1, 1 and 0, 1: variances 0 and 1/2, pooled sqrt(1/4) = 0.5. The
    others have one turn: 0.3 / sqrt 2 and 0.8 / sqrt 2, 0.21 and 0.57. By totals the first has none."""
    groups = [sooner_or_later(), batch(0, 0.3, key="h"), batch(0, 0.8, key="i")]
    keep = VarianceFilter(keep="top_k", value=2)
    made = recipe("reinforce", credit="turn", variance_filter=keep)
    assert compare(made, groups) == [None, "low_variance", None]
    assert compare(recipe("reinforce", variance_filter=keep), groups) == ["zero_variance", None, None]


def test_starpo_s_trains_the_quarter_that_varies_most() -> None:
    groups = [batch(0, r, key=f"g{r}") for r in range(8)]
    assert compare(recipe("starpo_s"), groups) == ["zero_variance"] + ["low_variance"] * 5 + [None] * 2


# State.


def test_the_temperature_follows_all_that_was_played_by_hand() -> None:
    """Raw rewards 0, 0, 1, 1: std 0.5, so 0.8 * 0.4 / 0.5. The failed one and penalties do not count."""
    groups = (
        batch(0, 0, key="g"),
        group("h", one_turn("a", 1, 1, penalty=-1), one_turn("b", 1, 1), failed("c")),
    )
    made = recipe("grpo", adaptive_temperature=AdaptiveTemperature(reference_std=0.4))
    assert next_state(made, {}, groups, {}, 0.8) == {"temperature": pytest.approx(0.64)}
    assert next_state(made, {"temperature": 0.64}, groups[:1], {}, 0.8) == {"temperature": 2.0}  # all alike
    assert next_state(made, {"temperature": 0.64}, [group("h", failed("c"))], {}, 0.8) == {
        "temperature": 0.64
    }
    assert next_state(made, {}, [], {}, 0.8) == {}


def test_the_kl_coefficient_follows_the_kl_by_hand() -> None:
    """0.03 is three times the target, counted as 1.2 of it: * 1.02. Then 0.009: * (1 - 0.1 / 10)."""
    made = recipe("grpo", kl_coef=0.1, adaptive_kl=AdaptiveKl(target=0.01, horizon=10))
    first = next_state(made, {}, [], {"kl": 0.03, "entropy": 1.0}, 1.0)
    assert first == {"kl_coef": pytest.approx(0.102)}
    second = next_state(made, first, [], {"kl": 0.009}, 1.0)
    assert second == {"kl_coef": pytest.approx(0.10098)}
    assert next_state(made, second, [], {}, 1.0) == second  # a step without an update
    assert made.loss_spec(second).params["kl_coef"] == second["kl_coef"]


def test_the_entropy_bonus_follows_the_entropy_by_hand() -> None:
    """Below the target: up a step, and given out. Above: down a step, and held back. Never under 0."""
    made = recipe("grpo", adaptive_entropy=AdaptiveEntropy(target=0.2, step=1e-3, max_coef=2e-3))
    state: dict[str, float] = {}
    steps = [(0.1, 1e-3, 1e-3), (0.1, 2e-3, 2e-3), (0.1, 2e-3, 2e-3), (0.3, 1e-3, 0), (0.2, 1e-3, 1e-3),
             (0.3, 0, 0), (0.3, 0, 0)]  # fmt: skip
    for entropy, c, coef in steps:
        state = next_state(made, state, [], {"entropy": entropy}, 1.0)
        assert state == {"entropy_coef_ungated": pytest.approx(c), "entropy_coef": pytest.approx(coef)}
        assert made.loss_spec(state).params["entropy_coef"] == state["entropy_coef"]
    assert next_state(made, state, [], {}, 1.0) == state


def test_without_a_controller_there_is_no_state() -> None:
    assert next_state(recipe("starpo"), {}, [batch(1, 0)], {"kl": 1.0, "entropy": 0.0}, 1.0) == {}
