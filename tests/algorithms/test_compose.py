"""A recipe applied to a batch, by hand: how the parts are joined, which have tests of their own."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.algorithms.test_credit import advantages, group, trained_advantages, trajectory, turn
from tests.algorithms.test_recipes import recipe

from silva.algorithms.compose import credited, judge, remembered, select, shaped
from silva.algorithms.settings import AdaptiveKl, AdaptiveTemperature, Correction, EntropyTarget, Filter
from silva.errors import CapabilityError, RecordError
from silva.rollouts.samples import to_samples
from silva.types import Group, Sample, Signals, StopReason, Trajectory


def one_turn(id: str, said: int, reward: float, penalty: float = 0.0) -> Trajectory:
    return trajectory(id, [turn(f"{id}/0", 2, said, reward, shaped=penalty)])


def failed(id: str, reward: float = 99.0) -> Trajectory:
    return dataclasses.replace(one_turn(id, 7, reward), failure="mask", error="late")


def batch(*rewards: float, said: int = 1, key: str = "g") -> Group:
    return group(key, *(one_turn(f"{key}/{i}", said, reward) for i, reward in enumerate(rewards)))


def assigned(made: Any, *groups: Group, signals: Signals = Signals(), **memory: float) -> list[list[float]]:
    """The advantages of the trained tokens of each row."""
    return trained_advantages(credited(made, to_samples(groups), groups, signals, memory))


def of_trained(samples: Sequence[Sample], *rows: Sequence[float]) -> tuple[np.ndarray, ...]:
    """[T] per sample: the numbers on its trained tokens, NaN elsewhere, as `Trainer.score` gives them."""
    found = tuple(np.full(len(sample), np.nan) for sample in samples)
    for array, sample, row in zip(found, samples, rows, strict=True):
        array[sample.loss_weights > 0] = row
    return found


# Shaped rewards.


def test_shaping_by_hand() -> None:
    """Longest 20, over its last half: 0 to 10 tokens, then 0.1 a token. Mean raw reward 2/3 (the failed one
    counts nowhere), longest of the group 25: -0.25 * 2/3 * l / 25."""
    lengths, rewards = (10, 15, 25), (1.0, 0.0, 1.0)
    played = [
        one_turn(f"g/{i}", n, r, penalty=-0.5) for i, (n, r) in enumerate(zip(lengths, rewards, strict=True))
    ]
    made = recipe("grpo", overlong=0.5, length_penalty=0.25)
    *scored, left_out = shaped(made, group("g", *played, failed("g/3")), 20).trajectories
    assert [t.shaped["overlong"] for t in scored] == [0, -0.5, -1]
    assert [t.shaped["length"] for t in scored] == pytest.approx([-1 / 15, -1 / 10, -1 / 6], rel=1e-12)
    assert [t.shaped["format"] for t in scored] == [-0.5] * 3  # what the world said stays
    assert [t.raw_reward for t in scored] == [*rewards] and left_out == failed("g/3")
    by_hand = [1 - 0.5 - 1 / 15, -0.5 - 0.5 - 1 / 10, 1 - 0.5 - 1 - 1 / 6]
    assert [t.shaped_reward for t in scored] == pytest.approx(by_hand, rel=1e-12)


def test_without_penalties_or_results_a_group_stays_as_it_is() -> None:
    whole, broken = batch(1.0, 0.0), group("g", failed("g/0"))
    assert shaped(recipe("grpo"), whole, 20) is whole
    assert shaped(recipe("dapo"), broken, 20) is broken


def test_the_buffer_of_a_short_answer_is_a_token_at_least() -> None:
    """0.01 of 20 tokens is none: 19 tokens are free, the 20th costs 1."""
    played = shaped(recipe("grpo", overlong=0.01), group("g", one_turn("a", 19, 0), one_turn("b", 20, 0)), 20)
    assert [t.shaped["overlong"] for t in played.trajectories] == [0, -1]


# Which groups are trained.


def test_a_group_is_judged_by_its_raw_rewards() -> None:
    penalised = group("g", one_turn("a", 1, 1.0), one_turn("b", 1, 1.0, penalty=-0.5))
    assert judge(recipe("grpo"), penalised) == "zero_variance"
    assert judge(recipe("ppo"), penalised) is None
    assert judge(recipe("grpo"), batch(0.0, 1.0)) is None
    for name in ("grpo", "ppo"):
        assert judge(recipe(name), group("g", failed("a"), failed("b"))) == "failed"


def sooner_or_later() -> Group:
    """Equal totals: the first trajectory earns its reward in the first turn, the other in the second."""
    a = trajectory("a", [turn("a/0", 1, 1, 1.0), turn("a/1", 1, 1, 0.0)])
    b = trajectory("b", [turn("b/0", 1, 1, 0.0), turn("b/1", 1, 1, 1.0)])
    return group("g", a, b)


def test_credit_by_turn_keeps_a_group_of_equal_totals_at_different_turns() -> None:
    """Returns 1 and 0 against gamma and 1: only the second turns differ with gamma = 1."""
    assert judge(recipe("grpo"), sooner_or_later()) == "zero_variance"
    for gamma, first_turns in ((0.5, [0.25, -0.25]), (1.0, [0, 0])):
        made = recipe("reinforce", credit="turn", gamma=gamma)
        assert judge(made, sooner_or_later()) is None
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
        assert judge(made, group("g", a, penalised)) == "zero_variance"
        assert judge(made, group("g", short, long)) == reason


def test_selection_sees_what_the_credit_sees() -> None:
    """gamma 1. The first group: returns 1, 1 and 0, 1: variances 0 and 1/2, pooled sqrt(1/4) = 0.5. The
    others have one turn: 0.3 / sqrt 2 and 0.8 / sqrt 2, 0.21 and 0.57. By totals the first has none."""
    groups = [sooner_or_later(), batch(0, 0.3, key="h"), batch(0, 0.8, key="i")]
    keep = Filter(keep="top_k", value=2)
    made = recipe("reinforce", credit="turn", filter=keep)
    assert select(made, groups, 3) == [None, "low_variance", None]
    assert select(recipe("reinforce", filter=keep), groups, 3) == ["zero_variance", None, None]


def test_difficulty_by_hand() -> None:
    """Mean raw rewards 0.75, 0.25 and 0.5; the failed one is in no mean."""
    made = recipe("grpo", difficulty=(0.3, 0.5))
    assert judge(made, batch(1, 1, 1, 0)) == "too_easy"
    assert judge(made, batch(0, 0, 0, 1)) == "too_hard"
    assert judge(made, group("g", one_turn("a", 1, 1), one_turn("b", 1, 0), failed("c"))) is None
    assert judge(made, batch(1, 1)) == "zero_variance"


def test_selection_by_hand() -> None:
    """Standard deviations 1/sqrt 2 times 1, 4, 0, 2, 3: two fifths of them are the second and the last."""
    groups = [batch(0, r, key=f"g{i}") for i, r in enumerate((1, 4, 0, 2, 3))]
    low, zero = "low_variance", "zero_variance"
    made = recipe("starpo", filter=Filter(keep="top_p", value=0.4))
    assert select(made, groups, 5) == [low, None, zero, low, None]
    assert select(made, groups, 1) == [
        low,
        None,
        zero,
        low,
        "surplus",
    ]  # played last, though kept by the filter
    assert select(recipe("grpo"), groups, 3) == [None, None, None, "surplus", "surplus"]
    assert select(recipe("grpo"), groups, 9) == [None] * 5 and select(made, [], 3) == []


def test_starpo_s_trains_the_quarter_that_varies_most() -> None:
    groups = [batch(0, r, key=f"g{r}") for r in range(8)]
    assert select(recipe("starpo_s"), groups, 2) == ["zero_variance"] + ["low_variance"] * 5 + [None] * 2


# Credit.


def test_one_advantage_a_trajectory_by_hand() -> None:
    """Rewards 3, 1, 2: mean 2, standard deviation 1 (+ 1e-4). Every token has it, the prompt's too."""
    given = group("g", one_turn("a", 2, 3), one_turn("b", 1, 1), failed("c"), one_turn("d", 3, 2))
    a = 1 / 1.0001
    found = credited(recipe("grpo"), to_samples([given]), [given], Signals(), {})
    assert advantages(found) == [pytest.approx([value] * n) for value, n in ((a, 4), (-a, 3), (0, 5))]
    assert all(s.old_logprobs is s.values is s.returns is None for s in found)


def test_advantages_over_the_batch_by_hand() -> None:
    """Over each group 1, -1 and 2, -2; over both: mean 4."""
    groups = batch(2, 0, key="g"), batch(9, 5, key="h")
    assert assigned(recipe("reinforce"), *groups) == [[1], [-1], [2], [-2]]
    assert assigned(recipe("gpg"), *groups) == [[-2], [-4], [5], [1]]


def test_credit_by_turn_by_hand() -> None:
    """gamma 0.5. Returns 1 + 0.5 * 4 = 3 and 4; 1 and 0: means 2 and 2."""
    a = trajectory("a", [turn("a/0", 1, 1, 1.0), turn("a/1", 1, 2, 4.0)])
    b = trajectory("b", [turn("b/0", 1, 1, 1.0), turn("b/1", 1, 1)])
    made = recipe("reinforce", credit="turn", gamma=0.5)
    assert assigned(made, group("g", a, b)) == [[1, 2, 2], [-1, -2]]


TWO_TURNS = group("g", trajectory("a", [turn("a/0", 1, 1), turn("a/1", 2, 2, 1.0)]))
VALUES = 1.0, 4.0, 2.0  # of its three trained tokens


def learned(made: Any, reference: Sequence[float] | None = None, stop: StopReason = "terminated") -> Sample:
    """The critic says 8 of the state after the last turn."""
    (played,) = TWO_TURNS.trajectories
    given = dataclasses.replace(TWO_TURNS, trajectories=(dataclasses.replace(played, stop_reason=stop),))
    samples = to_samples([given])
    signals = Signals(
        values=of_trained(samples, VALUES),
        reference_logprobs=of_trained(samples, reference) if reference else None,
    )
    (sample,) = credited(made, samples, [given], signals, {}, bootstrap={"a": 8.0})
    return sample


def numbers(sample: Sample, name: str) -> list[float]:
    return getattr(sample, name)[sample.loss_weights > 0].tolist()


def test_gae_by_hand() -> None:
    """gamma = lam = 0.5. delta: 1 - 2 = -1 (last); 0.5 * 2 - 4 = -3; 0.5 * 4 - 1 = 1.
    A: -1; -3 - 0.25 = -3.25; 1 + 0.25 * -3.25 = 0.1875. Returns: A + V."""
    sample = learned(recipe("ppo", gamma=0.5, lam=0.5, whiten=None))
    assert numbers(sample, "advantages") == [0.1875, -3.25, -1]
    assert numbers(sample, "returns") == [1.1875, 0.75, 1]
    assert numbers(sample, "values") == [*VALUES]


@pytest.mark.parametrize("stop", ["max_turns", "max_tokens", "truncated"])
def test_gae_of_an_episode_that_was_cut_off_by_hand(stop: StopReason) -> None:
    """As above, and 8 after the last token. delta: 1 + 0.5 * 8 - 2 = 3 (last); -3; 1.
    A: 3; -3 + 0.25 * 3 = -2.25; 1 + 0.25 * -2.25 = 0.4375. Returns: A + V."""
    sample = learned(recipe("ppo", gamma=0.5, lam=0.5, whiten=None), stop=stop)
    assert numbers(sample, "advantages") == [0.4375, -2.25, 3]
    assert numbers(sample, "returns") == [1.4375, 1.75, 5]


def test_bi_level_gae_of_an_episode_that_was_cut_off_by_hand() -> None:
    """Of turns with 0.25 and 0.5: last token 1 + 0.25 * 8 - 2 = 1; the first turn's 0.25 * 2 - 1 + 0.125 * 1
    = -0.375. The token between, within its turn with 0.5 and 0.75: 0.5 * 2 - 4 + 0.375 * 1 = -2.625."""
    made = recipe("bi_level_gae", gamma=0.5, lam=0.75, turn_gamma=0.25, turn_lam=0.5, whiten=None)
    sample = learned(made, stop="max_turns")
    assert numbers(sample, "advantages") == [-0.375, -2.625, 1]
    assert numbers(sample, "returns") == [0.625, 1.375, 3]


def test_bi_level_gae_by_hand() -> None:
    """Of turns with 0.25 and 0.5: last token 1 - 2 = -1; the first turn's 0.25 * 2 - 1 + 0.125 * -1 = -0.625.
    The token between, within its turn with 0.5 and 0.75: 0.5 * 2 - 4 + 0.375 * -1 = -3.375."""
    made = recipe("bi_level_gae", gamma=0.5, lam=0.75, turn_gamma=0.25, turn_lam=0.5, whiten=None)
    sample = learned(made)
    assert numbers(sample, "advantages") == [-0.625, -3.375, -1]
    assert numbers(sample, "returns") == [0.375, 0.625, 1]


def test_kl_as_a_reward_of_a_critic_by_hand() -> None:
    """log p = -1. -0.5 (log p - log p_ref): -0.5, 0, 0.25. Rewards -0.5, 0, 1.25; gamma = lam = 0.5.
    delta: 1.25 - 2 = -0.75; -3; -0.5 + 2 - 1 = 0.5. A: -0.75; -3.1875; 0.5 + 0.25 * -3.1875 = -0.296875."""
    made = recipe("ppo", gamma=0.5, lam=0.5, whiten=None, kl_reward_coef=0.5)
    assert numbers(learned(made, (-2.0, -1.0, -0.5)), "advantages") == [-0.296875, -3.1875, -0.75]


@pytest.mark.parametrize(
    ("gamma", "expected"),
    [(0.0, [1.5, 2, 2.25]), (0.5, [2 - 0.5 + 0.0625, 2 + 0.125, 2.25]), (1.0, [1.75, 2.25, 2.25])],
)
def test_kl_as_a_reward_of_tokens_by_hand(gamma: float, expected: list[float]) -> None:
    """Rewards -0.5, 0, 0.25 as above, beside an advantage of 2; no discount on what the environment says."""
    given = group("g", trajectory("a", [turn("a/0", 1, 1, 2.0), turn("a/1", 3, 2)]))
    samples = to_samples([given])
    signals = Signals(reference_logprobs=of_trained(samples, (-2.0, -1.0, -0.5)))
    made = recipe("reinforce_pp", whiten=None, kl_reward_coef=0.5, kl_reward_gamma=gamma)
    assert assigned(made, given, signals=signals) == [expected]


def test_kl_of_a_row_stays_in_it() -> None:
    """A rewritten context begins a new row: with gamma 1 the first row's sum ends there."""
    fresh = turn("a/1", 3, 1, fresh=True)
    given = group("g", trajectory("a", [turn("a/0", 1, 2), fresh]), one_turn("b", 1, 0))
    signals = Signals(reference_logprobs=of_trained(to_samples([given]), (0, 1), (3,), (-1,)))
    made = recipe("reinforce_pp", whiten=None, kl_reward_coef=1.0, kl_reward_gamma=1.0)
    assert assigned(made, given, signals=signals) == [[3, 2], [4], [0]]


@pytest.mark.filterwarnings("error")  # torch warns of read-only arrays, which rows have
def test_distillation_is_the_log_ratio_to_the_bit() -> None:
    """Rewards are in the groups, and count for nothing."""
    rng, given = np.random.default_rng(0), batch(1, 0, 5, said=4)
    samples = [s.replace(logprobs=np.where(s.loss_weights > 0, rng.normal(-2, 1, len(s)), np.nan))
               for s in to_samples([given])]  # fmt: skip
    teacher = tuple(rng.normal(-2, 1, len(s)) for s in samples)
    found = credited(recipe("distillation"), samples, [given], Signals(reference_logprobs=teacher), {})
    for after, sample, reference in zip(found, samples, teacher, strict=True):
        expected = np.where(sample.loss_weights > 0, -(sample.logprobs - reference), 0).astype(np.float32)
        np.testing.assert_array_equal(after.advantages, expected)
        assert expected.any()


def test_a_missing_reference_is_an_error() -> None:
    with pytest.raises(RecordError, match="KL as a reward: got no reference_logprobs"):
        assigned(recipe("distillation"), batch(1, 0))


def test_a_running_baseline_by_hand() -> None:
    """From 0.5: 1 - 0.5, then 0.525: 0 - 0.525, then 0.49875. The other world begins at 0."""
    groups = (
        batch(1, 0, key="g"),
        dataclasses.replace(batch(2, key="h"), task=group("h", environment="shop").task),
    )
    made = recipe("reinforce", advantage="running", drop_zero_variance=False)
    memory = {"baseline/maze": 0.5, "temperature": 0.7}
    found = assigned(made, *groups, **memory)
    assert found == [[pytest.approx(0.5)], [pytest.approx(-0.525)], [2]]
    after = remembered(made, memory, groups, {}, 1.0)
    assert after == {
        "baseline/maze": pytest.approx(0.49875),
        "baseline/shop": pytest.approx(0.1),
        "temperature": 0.7,
    }


def branches() -> Group:
    """Two leaves with the first turn in common, of rewards 3 and 1, and a third trajectory of reward 2."""
    stem = turn("stem", 2, 2)
    leaves = (trajectory(id, [stem, turn(f"{id}/1", 1, 1, r)]) for id, r in (("a", 3), ("b", 1)))
    return group("g", *leaves, one_turn("c", 1, 2))


def test_a_shared_turn_gets_each_leaf_s_advantage_or_their_mean() -> None:
    """Advantages 1, -1, 0 (over 1.0001): the stem has both, or 0."""
    a = pytest.approx(1 / 1.0001)
    b = pytest.approx(-1 / 1.0001)
    assert assigned(recipe("arpo"), branches()) == [[a, a, a], [b, b, b], [0]]
    assert assigned(recipe("arpo", tree_credit="hard"), branches()) == [[0, 0, a], [0, 0, b], [0]]


def test_whitening_comes_before_clipping() -> None:
    """Mean 1, variance (1 + 1 + 1 + 9) / 3 = 4; the other way round the last would be 1.5."""
    made = recipe("reinforce_pp", advantage_clip=(-1, 1))
    assert assigned(made, batch(0, 0, 0, 4)) == [[pytest.approx(a)] for a in (-0.5, -0.5, -0.5, 1)]


def test_whitening_by_tokens_or_by_trajectories() -> None:
    """Reward 0 on 3 tokens and 4 on 1. By tokens: mean 1, std 2. By trajectories: mean 2, variance 8."""
    given = group("g", one_turn("a", 3, 0), one_turn("b", 1, 4))
    for over, low, high in (("tokens", -0.5, 1.5), ("trajectories", -(0.5**0.5), 0.5**0.5)):
        found = assigned(recipe("reinforce_pp", whiten=over), given)
        assert found == [[pytest.approx(low)] * 3, [pytest.approx(high)]]


def test_shared_turns_are_averaged_before_the_batch_is_whitened() -> None:
    """Hard: 2, 2, 3; 2, 2, 1; 2. Mean 2, variance (1 + 1) / 6."""
    made = recipe("reinforce_pp", tree_credit="hard")
    a = 3**0.5
    expected = [[0, 0, a], [0, 0, -a], [0]]
    assert assigned(made, branches()) == [pytest.approx(row, abs=1e-6) for row in expected]


def test_uncertain_tokens_count_more_and_then_the_batch_is_whitened() -> None:
    """Entropies 1 and 3: z = -+1 / sqrt 2, A = 1 -+ 0.2 z; whitened: -+1 / sqrt 2 again."""
    given = group("g", one_turn("a", 2, 1.0))
    (sample,) = to_samples([given])
    sample = sample.replace(entropies=of_trained([sample], (1.0, 3.0))[0])
    z = 1 / math.sqrt(2)
    for whiten, expected in ((None, [1 - 0.2 * z, 1 + 0.2 * z]), ("tokens", [-z, z])):
        made = recipe("reinforce_pp", entropy_advantage=0.2, whiten=whiten)
        (found,) = trained_advantages(credited(made, [sample], [given], Signals(), {}))
        assert found == pytest.approx(expected, rel=1e-6)


def test_an_engine_without_entropies_is_refused_where_they_count() -> None:
    given = batch(1, 0)
    samples = [s.replace(entropies=None) for s in to_samples([given])]
    with pytest.raises(CapabilityError, match=r"algorithm\.entropy_advantage: got samples without entropies"):
        credited(recipe("aepo"), samples, [given], Signals(), {})


def test_the_trainer_s_own_log_probabilities_are_kept_for_a_correction_only() -> None:
    given = batch(1, 0)
    samples = to_samples([given])
    scored = of_trained(samples, (-0.25,), (-0.75,))
    for correction, expected in ((Correction(), scored), (None, (None, None))):
        found = credited(
            recipe("grpo", correction=correction), samples, [given], Signals(logprobs=scored), {}
        )
        assert [s.old_logprobs for s in found] == [*expected]
        assert [s.logprobs for s in found] == [s.logprobs for s in samples]  # of the sampler, as they were


# Memory.


def test_the_temperature_follows_all_that_was_played_by_hand() -> None:
    """Raw rewards 0, 0, 1, 1: std 0.5, so 0.8 * 0.4 / 0.5. The failed one and penalties do not count."""
    groups = (
        batch(0, 0, key="g"),
        group("h", one_turn("a", 1, 1, penalty=-1), one_turn("b", 1, 1), failed("c")),
    )
    made = recipe("grpo", temperature=AdaptiveTemperature(reference=0.4))
    assert remembered(made, {}, groups, {}, 0.8) == {"temperature": pytest.approx(0.64)}
    assert remembered(made, {"temperature": 0.64}, groups[:1], {}, 0.8) == {"temperature": 2.0}  # all alike
    assert remembered(made, {"temperature": 0.64}, [group("h", failed("c"))], {}, 0.8) == {
        "temperature": 0.64
    }
    assert remembered(made, {}, [], {}, 0.8) == {}


def test_the_kl_coefficient_follows_the_kl_by_hand() -> None:
    """0.03 is three times the target, counted as 1.2 of it: * 1.02. Then 0.009: * (1 - 0.1 / 10)."""
    made = recipe("grpo", kl_coef=0.1, adaptive_kl=AdaptiveKl(target=0.01, horizon=10))
    first = remembered(made, {}, [], {"kl": 0.03, "entropy": 1.0}, 1.0)
    assert first == {"kl_coef": pytest.approx(0.102)}
    second = remembered(made, first, [], {"kl": 0.009}, 1.0)
    assert second == {"kl_coef": pytest.approx(0.10098)}
    assert remembered(made, second, [], {}, 1.0) == second  # a step without an update
    assert made.loss_spec(second).params["kl_coef"] == second["kl_coef"]


def test_the_entropy_bonus_follows_the_entropy_by_hand() -> None:
    """Below the target: up a step, and given out. Above: down a step, and held back. Never under 0."""
    made = recipe("grpo", entropy_target=EntropyTarget(target=0.2, step=1e-3, high=2e-3))
    memory: dict[str, float] = {}
    steps = [(0.1, 1e-3, 1e-3), (0.1, 2e-3, 2e-3), (0.1, 2e-3, 2e-3), (0.3, 1e-3, 0), (0.2, 1e-3, 1e-3),
             (0.3, 0, 0), (0.3, 0, 0)]  # fmt: skip
    for entropy, c, coef in steps:
        memory = remembered(made, memory, [], {"entropy": entropy}, 1.0)
        assert memory == {"entropy_c": pytest.approx(c), "entropy_coef": pytest.approx(coef)}
        assert made.loss_spec(memory).params["entropy_coef"] == memory["entropy_coef"]
    assert remembered(made, memory, [], {}, 1.0) == memory


def test_without_a_controller_nothing_is_remembered() -> None:
    assert remembered(recipe("starpo"), {}, [batch(1, 0)], {"kl": 1.0, "entropy": 0.0}, 1.0) == {}


# Limits by construction.

eighths = st.integers(-16, 16).map(lambda n: n / 8)
played_turns = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4), eighths), min_size=1, max_size=3)
played_groups = st.lists(st.lists(played_turns, min_size=1, max_size=4), min_size=1, max_size=3)


def build(shapes: list[list[list[tuple[int, int, float]]]], added: Sequence[float] = ()) -> list[Group]:
    """Groups of trajectories of turns (shown, said, reward); `added` goes to the last turns of a group."""
    groups = []
    for g, trajectories in enumerate(shapes):
        more = added[g] if added else 0.0
        groups.append(group(f"g{g}", *(
            trajectory(f"{g}/{i}", [turn(f"{g}/{i}/{k}", shown, said, reward + more * (k == len(turns) - 1))
                                    for k, (shown, said, reward) in enumerate(turns)])
            for i, turns in enumerate(trajectories))))  # fmt: skip
    return groups


@given(played_groups, st.sampled_from(["soft", "hard"]))
@settings(max_examples=50, deadline=None)
def test_arpo_without_a_fork_is_grpo(shapes: Any, tree_credit: str) -> None:
    groups = build(shapes)
    assert assigned(recipe("arpo", tree_credit=tree_credit), *groups) == assigned(recipe("grpo"), *groups)


@given(st.integers(1, 6), eighths, st.data())
@settings(max_examples=50, deadline=None)
def test_bi_level_gae_of_one_turn_is_gae(said: int, reward: float, data: st.DataObject) -> None:
    """Whatever the discounts of turns: there is none to come."""
    rates = [data.draw(st.sampled_from([0.0, 0.5, 0.9, 1.0])) for _ in range(4)]
    given = group("g", one_turn("a", said, reward), one_turn("b", said, 0))
    samples = to_samples([given])
    values = data.draw(st.lists(eighths, min_size=said, max_size=said))
    signals = Signals(values=of_trained(samples, values, values))
    of_tokens = {"gamma": rates[0], "lam": rates[1]}
    bi_level = recipe("bi_level_gae", **of_tokens, turn_gamma=rates[2], turn_lam=rates[3])
    for made, other in zip(
        credited(bi_level, samples, [given], signals, {}),
        credited(recipe("ppo", **of_tokens), samples, [given], signals, {}),
        strict=True,
    ):
        np.testing.assert_array_equal(made.advantages, other.advantages)
        np.testing.assert_array_equal(made.returns, other.returns)


@given(played_groups, st.data())
@settings(max_examples=50, deadline=None)
def test_what_all_of_a_group_get_changes_nothing(shapes: Any, data: st.DataObject) -> None:
    added = data.draw(st.lists(eighths, min_size=len(shapes), max_size=len(shapes)))
    for name in ("reinforce", "grpo", "rloo"):
        before, after = (assigned(recipe(name), *build(shapes, more)) for more in ((), added))
        for row, other in zip(before, after, strict=True):
            np.testing.assert_allclose(row, other, rtol=1e-6, atol=1e-9)


@given(played_groups)
@settings(max_examples=50, deadline=None)
def test_reinforce_pp_has_mean_0_and_std_1_over_tokens(shapes: Any) -> None:
    """But for the 1e-8 that is added to the variance of the rewards, each as often as it has tokens."""
    groups = build(shapes)
    joined = np.concatenate(assigned(recipe("reinforce_pp"), *groups))
    everyone = [t for g in groups for t in g.trajectories]
    rewards = np.concatenate([np.full(t.tokens("policy"), t.raw_reward) for t in everyone])
    variance = rewards.var(ddof=1) if len(rewards) > 1 else 0.0
    assert joined.mean() == pytest.approx(0, abs=1e-6)
    if variance:
        assert joined.std(ddof=1) == pytest.approx((variance / (variance + 1e-8)) ** 0.5, rel=1e-6)
