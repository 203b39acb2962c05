from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from silva.algorithms.diagnostics import collapse, explained_variance, repetition, response_metrics
from silva.errors import ConfigError, RecordError
from silva.types import CompletionStop, Message, Segment, Turn

ONES = torch.ones(4, dtype=torch.int64)


def matrix(*rows: Sequence[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def test_reasoning_that_fits_its_own_prompt_only() -> None:
    """L = -3 on the diagonal, -inf elsewhere: marginal = log(exp(-3) / 4) = -3 - log 4, the same in all rows.
    The z-score divides log 4 by 0 + 0.001."""
    scores = torch.full((4, 4), -math.inf, dtype=torch.float64).fill_diagonal_(-3.0)
    metrics = collapse(scores, 3 * ONES)
    assert metrics["mutual_information"] == pytest.approx(math.log(4), rel=1e-14)
    assert metrics["mutual_information_bound"] == pytest.approx(math.log(4), rel=1e-14)
    assert metrics["conditional_entropy"] == 3.0
    assert metrics["mi_zscore"] == pytest.approx(1000 * math.log(4), rel=1e-9)
    assert metrics["conditional_entropy_per_token"] == 1.0
    assert metrics["mutual_information_per_token"] == pytest.approx(math.log(4), rel=1e-14)
    assert [metrics[f"retrieval_accuracy@{k}"] for k in (1, 2, 4)] == [1, 1, 1]
    assert [metrics[f"retrieval_chance@{k}"] for k in (1, 2, 4)] == [0.25, 0.5, 1]
    assert "retrieval_accuracy@8" not in metrics


def test_reasoning_that_ignores_its_prompt() -> None:
    """Each row constant: matched = marginal, so no information, whatever the entropy; retrieval is chance."""
    scores = matrix(*([-float(i)] * 4 for i in (1, 2, 5, 8)))
    metrics = collapse(scores, torch.tensor([1, 2, 5, 4]))
    information = pytest.approx(0.0, abs=1e-14)
    assert metrics["mutual_information"] == information == metrics["mutual_information_per_token"]
    assert metrics["mi_zscore"] == pytest.approx(0.0, abs=1e-12)
    assert metrics["conditional_entropy"] == 4.0  # (1 + 2 + 5 + 8) / 4
    assert metrics["conditional_entropy_per_token"] == 1.25  # (1 + 1 + 1 + 2) / 4
    assert [metrics[f"retrieval_accuracy@{k}"] for k in (1, 2, 4)] == [0.25, 0.5, 1]


def test_two_by_two_by_hand() -> None:
    """exp L = [[0.6, 0.2], [0.1, 0.3]]: marginals 0.4 and 0.2, matched / marginal 1.5 in both rows.

    mutual information log 1.5; conditional entropy -(log 0.6 + log 0.3) / 2 = -log(0.18) / 2;
    the marginals' logs are log 0.4 and log 0.2, apart by log 2, so their std (divided by N) is log(2) / 2.
    """
    metrics = collapse(matrix([0.6, 0.2], [0.1, 0.3]).log(), torch.ones(2))
    assert metrics["mutual_information"] == pytest.approx(math.log(1.5), rel=1e-14)
    assert metrics["conditional_entropy"] == pytest.approx(-math.log(0.18) / 2, rel=1e-14)
    assert metrics["mi_zscore"] == pytest.approx(math.log(1.5) / (math.log(2) / 2 + 0.001), rel=1e-13)
    assert metrics["retrieval_accuracy@1"] == 1


def test_its_expectation_is_the_mutual_information_of_the_channel() -> None:
    """Three prompts, four reasonings with known p(z | x): over every way to sample one reasoning a prompt,
    weighted by its probability, the estimates average to H(Z) - H(Z | X) and H(Z | X) of the channel."""
    channel = np.array([[0.7, 0.1, 0.1, 0.1], [0.2, 0.5, 0.2, 0.1], [0.25, 0.25, 0.25, 0.25]])
    information = entropy = 0.0
    for drawn in itertools.product(range(4), repeat=3):
        weight = math.prod(channel[i, z] for i, z in enumerate(drawn))
        metrics = collapse(torch.tensor(channel[:, drawn].T.copy()).log(), torch.ones(3))
        information += weight * metrics["mutual_information"]
        entropy += weight * metrics["conditional_entropy"]
    conditional = scipy.stats.entropy(channel, axis=1).mean()
    assert entropy == pytest.approx(conditional, rel=1e-13)
    assert information == pytest.approx(scipy.stats.entropy(channel.mean(0)) - conditional, rel=1e-13)


small_matrices = st.integers(2, 4).flatmap(
    lambda n: st.lists(st.lists(st.integers(-3, 0), min_size=n, max_size=n), min_size=n, max_size=n)
)


@given(small_matrices)
@settings(max_examples=60, deadline=None)
def test_retrieval_is_the_mean_over_every_order_of_the_columns(rows: list[list[int]]) -> None:
    """Brute force: sort each row, ties in the order of the columns, for every order of the columns."""
    n = len(rows)
    metrics = collapse(torch.tensor(rows), torch.ones(n), ks=range(1, n + 1))
    orders = list(itertools.permutations(range(n)))
    for k in range(1, n + 1):
        hits = [
            i in sorted(order, key=lambda j, row=row: -row[j])[:k]
            for order in orders
            for i, row in enumerate(rows)
        ]
        assert metrics[f"retrieval_accuracy@{k}"] == pytest.approx(sum(hits) / len(hits), rel=1e-12)


def test_collapse_refuses() -> None:
    good = torch.zeros(4, 4)
    for scores, tokens in ((good[:3], ONES[:3]), (good, ONES[:3]), (good[:1, :1], ONES[:1])):
        with pytest.raises(RecordError, match=r"expected \[N, N\] and \[N\] with N >= 2"):
            collapse(scores, tokens)
    for place, value in (((0, 1), math.nan), ((0, 1), math.inf), ((2, 2), -math.inf)):
        bad = good.clone()
        bad[place] = value
        with pytest.raises(RecordError, match="got a log-likelihood that is NaN"):
            collapse(bad, ONES)
    with pytest.raises(RecordError, match="got a reasoning of 0 tokens"):
        collapse(good, torch.tensor([1, 0, 1, 1]))


@pytest.mark.parametrize(
    ("tokens", "n", "expected"),
    [
        ([1, 2, 3, 4, 5], 2, 0.0),
        ([1, 2, 1, 2, 1], 2, 0.5),  # 12, 21, 12, 21: two of four stood before
        ([7, 7, 7, 7, 7], 1, 0.8),  # one of five is new
        ([7, 7, 7, 7, 7, 7], 4, 2 / 3),  # one of three is new
        ([1, 2, 3], 4, 0.0),  # too short
        ([1, 2, 3, 4], 4, 0.0),
        ([], 1, 0.0),
    ],
)
def test_repetition_by_hand(tokens: list[int], n: int, expected: float) -> None:
    assert repetition(tokens, n) == pytest.approx(expected, rel=1e-15)


def test_repetition_refuses() -> None:
    with pytest.raises(ConfigError, match="got n-grams of 0 tokens"):
        repetition([1, 2], 0)


def turn(reply: list[int], *reasoning: str | None, stop_reason: CompletionStop = "stop_token") -> Turn:
    """A turn that shows the replies with the first reasonings, and answers with the last."""
    shown = Segment("environment", (9,) * 50)
    sampled = Segment("policy", tuple(reply), (-1.0,) * len(reply), versions=(0,) * len(reply))
    messages = tuple(Message("assistant", "x", reasoning=r) for r in reasoning)
    return Turn("t", (shown, sampled), messages, fresh=True, stop_reason=stop_reason)


def test_response_metrics_by_hand() -> None:
    """Lengths 5, 2, 8, 1; two were cut; one thinks (blank is no thought, nor is an earlier reply's).
    Four-grams that stood before: 0 of 2, none, 4 of 5 (of sevens), none: a mean of 0.8 / 4."""
    turns = [
        turn([1, 2, 3, 4, 5], "because"),
        turn([1, 2], "earlier", None, stop_reason="length"),
        turn([7] * 8, "\n ", stop_reason="context_overflow"),
        turn([1], "earlier", "", stop_reason="stop_string"),
    ]
    assert response_metrics(turns) == pytest.approx(
        {"tokens_mean": 4.0, "tokens_max": 8.0, "cut": 0.5, "thoughts": 0.25, "repetition": 0.2}, rel=1e-12
    )
    assert response_metrics(iter(turns[:1])) == {
        "tokens_mean": 5.0, "tokens_max": 5.0, "cut": 0.0, "thoughts": 1.0, "repetition": 0.0}  # fmt: skip
    assert response_metrics([]) == {}


def test_explained_variance_by_hand() -> None:
    """Returns 1, 2, 3 (variance 2/3); values 1, 1, 3 leave 0, 1, 0 (variance 2/9): 1 - 1/3."""
    returns = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    assert explained_variance(returns, torch.tensor([1.0, 1.0, 3.0])) == pytest.approx(2 / 3, rel=1e-14)
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(returns, returns + 5) == 1.0  # blind to a constant error
    assert explained_variance(returns, torch.full((3,), 0.1)) == pytest.approx(0.0, abs=1e-14)
    assert explained_variance(returns, -returns) == pytest.approx(-3.0, rel=1e-14)  # 1 - 4


def test_explained_variance_of_equal_returns_and_what_it_refuses() -> None:
    """0.1 + 0.1 + 0.1 divided by 3 is not 0.1 in binary: the rounding must not pass for variance."""
    assert math.isnan(explained_variance(torch.full((3,), 0.1, dtype=torch.float64), torch.zeros(3)))
    for returns, values in ((torch.zeros(3), torch.zeros(2)), (torch.zeros(0), torch.zeros(0))):
        with pytest.raises(RecordError, match="values must align with returns"):
            explained_variance(returns, values)
