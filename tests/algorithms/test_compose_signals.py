"""What a critic, a reference and the trainer's own log-probabilities add to the credit of a recipe."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tests.algorithms.by_hand import assigned, batch, group, of_trained, one_turn, recipe, trajectory, turn

from silva.algorithms.compose import with_advantages
from silva.algorithms.correction import RolloutCorrection
from silva.errors import RecordError
from silva.rollouts.samples import to_samples
from silva.types import Sample, Signals, StopReason

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
    (sample,) = with_advantages(made, samples, [given], signals, {}, bootstrap={"a": 8.0})
    return sample


def numbers(sample: Sample, name: str) -> list[float]:
    return getattr(sample, name)[sample.loss_weights > 0].tolist()


# gamma = lam = 0.5, rewards 0, 0, 1. delta: 1 - 2 = -1 (last); 0.5 * 2 - 4 = -3; 0.5 * 4 - 1 = 1.
#     A: -1; -3 - 0.25 = -3.25; 1 + 0.25 * -3.25 = 0.1875. Returns: A + V.
# Cut off, 8 after the last token: 1 + 0.5 * 8 - 2 = 3; -3 + 0.25 * 3 = -2.25; 1 + 0.25 * -2.25 = 0.4375.
# Bi-level, turns with 0.25 and 0.5: last token -1; the first turn's 0.25 * 2 - 1 + 0.125 * -1 = -0.625.
#     The token between, within its turn with 0.5 and 0.75: 0.5 * 2 - 4 + 0.375 * -1 = -3.375.
# Cut off: 1 + 0.25 * 8 - 2 = 1; 0.25 * 2 - 1 + 0.125 * 1 = -0.375; 0.5 * 2 - 4 + 0.375 * 1 = -2.625.
PPO = recipe("ppo", gamma=0.5, lam=0.5, whiten=None)
BI_LEVEL = recipe("bi_level_gae", gamma=0.5, lam=0.75, turn_gamma=0.25, turn_lam=0.5, whiten=None)


@pytest.mark.parametrize(
    ("made", "stop", "advantages", "returns"),
    [
        (PPO, "terminated", [0.1875, -3.25, -1], [1.1875, 0.75, 1]),
        (PPO, "truncated", [0.4375, -2.25, 3], [1.4375, 1.75, 5]),
        (BI_LEVEL, "terminated", [-0.625, -3.375, -1], [0.375, 0.625, 1]),
        (BI_LEVEL, "max_turns", [-0.375, -2.625, 1], [0.625, 1.375, 3]),
    ],
)
def test_gae_by_hand(made: Any, stop: StopReason, advantages: list[float], returns: list[float]) -> None:
    sample = learned(made, stop=stop)
    assert numbers(sample, "advantages") == advantages and numbers(sample, "returns") == returns
    assert numbers(sample, "values") == [*VALUES]


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


def test_a_token_that_nobody_sampled_has_no_kl_as_a_reward() -> None:
    """The rewards as above, without the middle one."""
    given = group("g", trajectory("a", [turn("a/0", 1, 1, 2.0), turn("a/1", 3, 2)]))
    samples = to_samples([given])
    places = np.flatnonzero(samples[0].loss_weights > 0)
    unknown = np.where(np.arange(len(samples[0])) == places[1], np.nan, samples[0].logprobs)
    signals = Signals(reference_logprobs=of_trained(samples, (-2.0, -5.0, -0.5)))
    made = recipe("reinforce_pp", whiten=None, kl_reward_coef=0.5, kl_reward_gamma=1.0)
    found = with_advantages(made, [samples[0].replace(logprobs=unknown)], [given], signals, {})
    assert found[0].advantages is not None
    assert found[0].advantages[places].tolist() == [1.75, 2.25, 2.25]


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
    references = tuple(rng.normal(-2, 1, len(s)) for s in samples)
    found = with_advantages(
        recipe("distillation"), samples, [given], Signals(reference_logprobs=references), {}
    )
    for after, sample, reference in zip(found, samples, references, strict=True):
        expected = np.where(sample.loss_weights > 0, -(sample.logprobs - reference), 0)
        np.testing.assert_array_equal(after.advantages, expected)
        assert expected.any()


def test_a_missing_reference_is_an_error() -> None:
    with pytest.raises(RecordError, match="KL as a reward: got no reference_logprobs"):
        assigned(recipe("distillation"), batch(1, 0))


def test_the_trainer_s_own_log_probabilities_are_kept_for_a_correction_only() -> None:
    given = batch(1, 0)
    samples = to_samples([given])
    scored = of_trained(samples, (-0.25,), (-0.75,))
    for correction, expected in ((RolloutCorrection(), scored), (None, (None, None))):
        found = with_advantages(
            recipe("grpo", rollout_correction=correction), samples, [given], Signals(logprobs=scored), {}
        )
        assert [s.old_logprobs for s in found] == [*expected]
        assert [s.logprobs for s in found] == [s.logprobs for s in samples]  # of the sampler, as they were
