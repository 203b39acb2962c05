"""Returns and advantages of one trajectory; test_credit.py has what joins them to samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.signal import lfilter
from tests.golden.read import read
from torch import Tensor

from silva.algorithms.assign import whiten
from silva.algorithms.gae import bi_level_gae, discounted_returns, gae, token_rewards
from silva.errors import RecordError

GOLDEN = read("advantages_verl")
PLAIN = {"gamma": 1.0, "lam": 1.0}


def golden(name: str) -> Tensor:
    return torch.tensor(GOLDEN[name], dtype=torch.float64)


def float64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_discounted_returns_by_hand() -> None:
    """4; 2 + 0.5 * 4 = 4; 1 + 0.5 * 4 = 3. Rates 0, 0.5 and 1: 4; 2 + 0.5 * 4; 1 + 0."""
    assert discounted_returns(float64(1, 2, 4), 0.5).tolist() == [3, 4, 4]
    assert discounted_returns(float64(1, 2, 4), float64(0, 0.5, 1)).tolist() == [1, 4, 4]
    assert discounted_returns(float64(), 0.5).tolist() == []


eighths = st.integers(-16, 16).map(lambda n: n / 8)
rates = st.sampled_from([0.0, 0.5, 0.9, 0.95, 1.0])


def test_gae_by_hand() -> None:
    """gamma = lam = 0.5; token 1 is the environment's, so the value after token 0 is that of token 2.

    delta: 1 + 0 - 2 = -1 (last); 0 + 0.5 * 2 - 4 = -3; 2 + 0.5 * 4 - 1 = 3
    A:     -1; -3 + 0.25 * -1 = -3.25; 3 + 0.25 * -3.25 = 2.1875
    """
    values, rewards = float64(1, float("nan"), 4, 2), float64(2, 0, 0, 1)
    trained = torch.tensor([True, False, True, True])
    found, returns = gae(values, rewards, trained, gamma=0.5, lam=0.5)
    assert found.tolist() == [2.1875, 0, -3.25, -1]
    assert returns.tolist() == [3.1875, 0, 0.75, 1]


def rows(name: str) -> Any:
    """(values, rewards, trained, turns, what `name` says) of each row of the golden file."""
    trained = golden("mask").bool()
    for b, row in enumerate(GOLDEN["turns"]):
        turns = torch.tensor([k for k, (shown, said) in enumerate(row) for _ in range(shown + said)])
        padded = torch.full((trained.shape[1],), len(row) - 1)
        padded[: len(turns)] = turns
        returns = torch.tensor(GOLDEN[name]["returns"][b], dtype=torch.float64)
        yield golden("values")[b], golden("turn_rewards")[b], trained[b], padded, returns


def test_gae_is_equal_to_verl() -> None:
    found = []
    for values, rewards, trained, _, theirs in rows("gae"):
        own, returns = gae(values, rewards, trained, gamma=GOLDEN["gae"]["gamma"], lam=GOLDEN["gae"]["lam"])
        torch.testing.assert_close(returns[trained], theirs[trained], rtol=1e-12, atol=1e-14)
        found.append(own)
    mask = golden("mask")
    whitened = whiten(torch.stack(found).flatten(), mask.flatten()).view_as(mask)
    theirs = torch.tensor(GOLDEN["gae"]["advantages"], dtype=torch.float64)
    # verl divides sums by the number of tokens + 1e-8: with 39 tokens 2.6e-10 off
    torch.testing.assert_close(whitened * mask, theirs * mask, rtol=1e-9, atol=1e-9)


def test_bi_level_gae_is_equal_to_ragen_where_every_turn_has_a_reward() -> None:
    for values, rewards, trained, turns, theirs in rows("bi_level_gae"):
        own, returns = bi_level_gae(
            values, rewards, trained, turns, gamma=0.9, lam=0.8, turn_gamma=0.95, turn_lam=0.8
        )
        torch.testing.assert_close(returns[trained], theirs[trained], rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(own[trained], (theirs - values)[trained], rtol=1e-12, atol=1e-14)


def test_bi_level_gae_by_hand() -> None:
    """Turns of 2, 1 and 1 tokens; the second earns nothing and is a turn all the same. turn_gamma 0.5,
    turn_lam 1, gamma 1, lam 0.5.

    ends, values 2, 4, 6: 3 - 6 = -3; 0 + 0.5 * 6 - 4 + 0.5 * -3 = -2.5;
                          1 + 0.5 * 4 - 2 + 0.5 * -2.5 = -0.25
    token 0, value 8:     0 + 1 * 2 - 8 + 0.5 * -0.25 = -6.125
    """
    values, rewards = float64(8, 2, float("nan"), 4, 6), float64(0, 1, 0, 0, 3)
    trained, turns = torch.tensor([True, True, False, True, True]), torch.tensor([0, 0, 1, 1, 2])
    found, returns = bi_level_gae(
        values, rewards, trained, turns, gamma=1.0, lam=0.5, turn_gamma=0.5, turn_lam=1.0
    )
    assert found.tolist() == [-6.125, -0.25, 0, -2.5, -3]
    assert returns.tolist() == [1.875, 1.75, 0, 1.5, 3]


@st.composite
def sequences(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Values, rewards, trained, turns of one trajectory."""
    tokens = draw(
        st.lists(st.tuples(eighths, eighths, st.booleans(), st.booleans()), min_size=1, max_size=16)
    )
    values, rewards, trained, new_turn = zip(*tokens, strict=True)
    kept = torch.tensor(trained)
    return float64(*values), float64(*rewards) * kept, kept, torch.tensor(new_turn).long().cumsum(0)


@pytest.mark.slow
@given(sequences(), rates, rates, eighths)
@settings(max_examples=100, deadline=None)
def test_bi_level_gae_of_one_turn_is_gae(
    sequence: tuple[Tensor, ...], gamma: float, lam: float, bootstrap: float
) -> None:
    values, rewards, trained, turns = sequence
    both = {"gamma": gamma, "lam": lam, "bootstrap": bootstrap}
    one = bi_level_gae(
        values, rewards, trained, torch.zeros_like(turns), turn_gamma=gamma, turn_lam=lam, **both
    )
    for ours, theirs in zip(one, gae(values, rewards, trained, **both), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.slow
@given(sequences(), rates)
@settings(max_examples=100, deadline=None)
def test_gae_between_its_two_ends(sequence: tuple[Tensor, ...], gamma: float) -> None:
    """lam = 1: discounted rewards to come minus the value. lam = 0: one step of them."""
    values, rewards, trained, _ = sequence
    v, r = values[trained].numpy(), rewards[trained].numpy()
    if len(v):
        monte_carlo = lfilter([1], [1, -gamma], r[::-1])[::-1]
        found, returns = gae(values, rewards, trained, gamma=gamma, lam=1.0)
        np.testing.assert_allclose(returns[trained].numpy(), monte_carlo, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(found[trained].numpy(), monte_carlo - v, rtol=1e-12, atol=1e-12)
        one_step = r + gamma * np.append(v[1:], 0) - v
        found, _ = gae(values, rewards, trained, gamma=gamma, lam=0.0)
        np.testing.assert_allclose(found[trained].numpy(), one_step, rtol=1e-12, atol=1e-12)
    assert not gae(values, rewards, trained, **PLAIN)[0][~trained].any()


@given(sequences(), rates, rates)
@settings(max_examples=50, deadline=None)
def test_what_the_environment_says_changes_nothing(
    sequence: tuple[Tensor, ...], gamma: float, lam: float
) -> None:
    values, rewards, trained, turns = sequence
    alone = [array[trained] for array in sequence]
    both = {"gamma": gamma, "lam": lam}
    for function, extra, rates_ in (
        (gae, False, both),
        (bi_level_gae, True, {**both, "turn_gamma": 0.95, "turn_lam": 1.0}),
    ):
        whole = function(values, rewards, trained, *([turns] if extra else []), **rates_)
        part = function(*alone[:3], *(alone[3:] if extra else []), **rates_)
        assert all(torch.equal(a[trained], b) for a, b in zip(whole, part, strict=True))


def test_rewards_that_nobody_earned_are_refused() -> None:
    trained = torch.tensor([True, False])
    with pytest.raises(RecordError, match="expected 0 where nothing is trained"):
        gae(float64(1, 2), float64(0, 1), trained, **PLAIN)
    with pytest.raises(RecordError, match=r"must align: got \(2,\), \(1,\) and \(2,\), expected \[T\] each"):
        bi_level_gae(
            float64(1, 2), float64(0), trained, torch.tensor([0, 0]), **PLAIN, turn_gamma=1.0, turn_lam=1.0
        )


def test_token_rewards_stand_on_the_last_trained_token_so_far() -> None:
    """Turn 0 has no trained token and nobody before it, turn 2 none but those of turn 1."""
    turns = torch.tensor([0, 1, 1, 1, 2, 3, 3])
    trained = torch.tensor([False, True, True, False, False, False, True])
    assert token_rewards(float64(1, 2, 4, 8), turns, trained).tolist() == [0, 0, 6, 0, 0, 0, 8]
    assert token_rewards(float64(1), torch.tensor([0, 0]), torch.tensor([False, False])).tolist() == [0, 0]
