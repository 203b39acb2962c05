"""Drawing tokens: exact distributions, truncation against transformers, what is recorded."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from silva.engines.local import sampling
from silva.engines.local.sampling import Drawn, draw, inverse_cdf
from silva.types import SamplingParams


def logits_of(vocabulary: int, *, rows: int = 1, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * scale


def params_of(**values: Any) -> SamplingParams:
    return SamplingParams(max_tokens=1, **values)


def draw_many(logits: torch.Tensor, params: SamplingParams, count: int, seed: int = 0) -> Drawn:
    """`count` samples of one row [V] of logits."""
    uniforms = torch.from_numpy(np.random.default_rng(seed).random(count))
    return draw(logits.expand(count, -1), [params] * count, uniforms)


def kept_by_transformers(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Logits [V] after temperature and transformers' own warpers."""
    scores = (logits / params.temperature)[None]
    ids = torch.zeros(1, 1, dtype=torch.long)
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(ids, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(ids, scores)
    if params.min_p > 0:
        scores = MinPLogitsWarper(params.min_p)(ids, scores)
    return scores[0]


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", [2, 7, 256, 257, 600])
def test_tokens_are_drawn_as_often_as_their_probability_says(vocabulary: int) -> None:
    logits, count = logits_of(vocabulary, scale=1.0)[0], 60_000
    drawn = draw_many(logits, params_of(), count)
    observed = np.bincount(drawn.tokens, minlength=vocabulary)
    assert len(observed) == vocabulary
    expected = logits.double().softmax(-1).numpy() * count
    assert stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue > 1e-3


@pytest.mark.slow
def test_a_real_vocabulary_is_drawn_from_evenly() -> None:
    """49,152 tokens in 64 bins of neighbours, and in 64 of alike probability."""
    logits, count = logits_of(49152, scale=3.0)[0], 2000
    probabilities = logits.double().softmax(-1).numpy()
    drawn = (draw_many(logits, params_of(), 100, seed) for seed in range(count // 100))
    tokens = np.concatenate([one.tokens for one in drawn])
    for order in (np.arange(49152), np.argsort(probabilities, kind="stable")):
        edges = np.searchsorted(probabilities[order].cumsum(), np.arange(1, 64) / 64)
        place = np.empty(49152, np.int64)
        place[order] = np.searchsorted(edges, np.arange(49152), side="right")
        share = np.bincount(place, weights=probabilities, minlength=64)
        observed = np.bincount(place[tokens], minlength=64)
        some = share > 0  # a likely token fills several bins
        expected = share[some] / share[some].sum() * count
        assert stats.chisquare(observed[some], expected).pvalue > 1e-3 and observed[~some].sum() == 0


def test_every_token_of_a_long_tail_can_be_drawn() -> None:
    """Shares of 2**-26 near the end of the distribution, where float32 numbers are 2**-24 apart."""
    tail = 2**16
    probabilities = torch.full((100, 1 + tail), 2.0**-26)
    probabilities[:, 0] = 1 - 2.0**-10
    uniforms = 1 - (torch.arange(1100, 1000, -1, dtype=torch.float64) + 0.5) * 2.0**-26
    tokens = inverse_cdf(probabilities, uniforms)
    assert tokens.diff().tolist() == [1] * 99
    assert abs(int(tokens[-1]) - (tail - 1001)) <= 4  # sums of blocks round in float32


@pytest.mark.slow
@given(
    seed=st.integers(0, 10_000),
    vocabulary=st.sampled_from([3, 50, 256, 300, 700]),
    uniform=st.sampled_from([0.0, 0.5, 1 - 2**-24, 1 - 2**-53]) | st.floats(0, 1, exclude_max=True),
    zeros=st.floats(0, 1),
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_an_impossible_token_is_never_drawn(seed: int, vocabulary: int, uniform: float, zeros: float) -> None:
    rng = np.random.default_rng(seed)
    mask = rng.random(vocabulary) < zeros
    mask[rng.integers(vocabulary)] = False
    probabilities = torch.tensor(np.where(mask, 0, rng.exponential(size=vocabulary)), dtype=torch.float32)
    probabilities /= probabilities.sum()
    token = inverse_cdf(probabilities[None], torch.tensor([uniform], dtype=torch.float64))
    assert probabilities[token] > 0


CUTS = list(product((0, 1, 3, 40), (1.0, 0.9, 0.3, 1e-6), (0.0, 0.02, 0.3)))


@pytest.mark.slow
@pytest.mark.parametrize(("top_k", "top_p", "min_p"), CUTS)
def test_what_is_kept_is_what_transformers_keeps(top_k: int, top_p: float, min_p: float) -> None:
    """In this order: temperature, top-k, top-p, min-p."""
    temperature = (1.0, 0.6, 1.7)[CUTS.index((top_k, top_p, min_p)) % 3]
    params = params_of(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = logits_of(300, seed=top_k)[0]
    scores = kept_by_transformers(logits, params)
    count = 400
    uniforms = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    drawn = draw(logits.expand(count, -1), [params] * count, uniforms)
    expected = torch.distributions.Categorical(logits=scores.double())
    tokens = torch.tensor(drawn.tokens)
    assert torch.isfinite(scores[tokens]).all()
    likely = torch.nonzero(expected.probs > 0.005)[:, 0]
    assert set(likely.tolist()) <= set(drawn.tokens)
    np.testing.assert_allclose(drawn.logprobs, expected.log_prob(tokens), atol=1e-5)
    finite = torch.where(expected.probs > 0, expected.probs * expected.logits, 0)
    np.testing.assert_allclose(drawn.entropies, np.full(count, -float(finite.sum())), atol=1e-5)
    raw = logits.double().log_softmax(-1)[tokens]
    np.testing.assert_allclose(drawn.raw_logprobs, raw, atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 3.0])
def test_numbers_equal_a_categorical_distribution(temperature: float) -> None:
    logits = logits_of(500, rows=20)
    params = [params_of(temperature=temperature)] * 20
    drawn = draw(logits, params, torch.linspace(0, 0.999, 20, dtype=torch.float64))
    expected = torch.distributions.Categorical(logits=logits.double() / temperature)
    tokens = torch.tensor(drawn.tokens)
    np.testing.assert_allclose(drawn.logprobs, expected.log_prob(tokens), atol=1e-5)
    np.testing.assert_allclose(drawn.entropies, expected.entropy(), atol=1e-5)
    raw = logits.double().log_softmax(-1)[torch.arange(20), tokens]
    np.testing.assert_allclose(drawn.raw_logprobs, raw, atol=1e-5)


def test_temperature_0_is_greedy_and_certain() -> None:
    logits = logits_of(300, rows=5)
    drawn = draw(logits, [params_of(temperature=0, top_k=k) for k in range(5)], torch.rand(5).double())
    assert drawn.tokens == logits.argmax(-1).tolist()
    assert drawn.logprobs == drawn.entropies == [0.0] * 5
    expected = logits.log_softmax(-1).amax(-1)
    np.testing.assert_allclose(drawn.raw_logprobs, expected, atol=1e-5)


@pytest.mark.parametrize("at_once", [1, 6000, sampling.AT_ONCE])
def test_a_row_does_not_see_the_others(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "AT_ONCE", at_once)  # one row a part, two, all
    logits = logits_of(3000, rows=6)
    params = [
        params_of(),
        params_of(temperature=0),
        params_of(temperature=0.7),
        params_of(top_p=0.9),
        params_of(top_k=3, temperature=0.5),
        params_of(min_p=0.1),
    ]
    uniforms = torch.linspace(0.1, 0.9, 6, dtype=torch.float64)
    together = draw(logits, params, uniforms)
    for i in range(6):
        one = draw(logits[i : i + 1], params[i : i + 1], uniforms[i : i + 1])
        for name in ("tokens", "logprobs", "raw_logprobs", "entropies"):
            assert getattr(one, name) == [getattr(together, name)[i]], (i, name)


@pytest.mark.parametrize("at_once", [sampling.AT_ONCE, 1400])
def test_several_draws_of_a_row_are_those_of_as_many_rows(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the rows are not drawn from all at once."""
    monkeypatch.setattr(sampling, "AT_ONCE", at_once)
    kinds = [
        params_of(),
        params_of(temperature=0.0),
        params_of(top_k=7),
        params_of(temperature=0.5, top_p=0.8),
    ]
    logits, counts = logits_of(700, rows=4), [3, 1, 5, 2]
    uniforms = torch.from_numpy(np.random.default_rng(1).random(sum(counts)))
    rows = np.repeat(np.arange(4), counts)
    expected = draw(logits[rows], [kinds[row] for row in rows], uniforms)
    assert draw(logits, kinds, uniforms, counts) == expected
    assert len(set(expected.tokens)) > 4


def test_masked_vocabulary_entries_do_not_spoil_the_entropy() -> None:
    """Some models give -inf to entries that pad their vocabulary."""
    logits = logits_of(300)
    padded = torch.cat([logits, torch.full((1, 20), float("-inf"))], 1)
    uniforms = torch.tensor([0.4], dtype=torch.float64)
    for params in (params_of(), params_of(temperature=0.5), params_of(top_p=0.9)):
        one, other = draw(logits, [params], uniforms), draw(padded, [params], uniforms)
        assert one.tokens == other.tokens
        np.testing.assert_allclose(one.entropies, other.entropies, atol=1e-6)
