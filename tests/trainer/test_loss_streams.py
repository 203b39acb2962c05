"""Losses by stream: cross-entropy beside the loss of an update, on tokens of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from tests.trainer.updates import (
    REINFORCE,
    Make,
    Rows,
    gradients,
    make_trainer,
    naive_gradients,
    relative_error,
)

from silva.algorithms.aggregation import normalise
from silva.errors import RecordError
from silva.models.loading import LoadedModel
from silva.trainer.learner import Learner
from silva.types import LossSpec, Sample


def spoken(samples: Sequence[Sample]) -> list[Sample]:
    """Every row with two streams: what is not trained otherwise, and the last three tokens."""
    found = []
    for sample in samples:
        others = (sample.loss_weights == 0).astype(np.float32)
        others[0] = 0.0
        last = np.zeros(len(sample), np.float32)
        last[-3:] = 0.5
        found.append(sample.replace(streams={"tool": others, "last": last}))
    return found


def stream_gradients(loaded: LoadedModel, samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """Those of -sum(w log p) of all streams."""
    return naive_gradients(loaded, samples, lambda sample: sum(sample.streams.values()))


@pytest.mark.parametrize("budget", [25, 10_000])
def test_the_gradient_is_the_sum_over_streams(tiny: Make, make_samples: Rows, budget: int) -> None:
    loaded, samples = tiny("float64"), spoken(make_samples([9, 30, 17]))
    of_loss, of_streams = naive_gradients(loaded, samples), stream_gradients(loaded, samples)
    expected = {name: of_loss[name] + of_streams[name] for name in of_loss}
    metrics = asyncio.run(
        make_trainer(loaded, micro_batch_tokens=budget).forward_backward(samples, REINFORCE)
    )
    assert relative_error(gradients(loaded), expected) < 1e-10
    assert {"entropy", "tool/nll", "tool/entropy", "last/nll"} <= metrics.keys()


def test_metrics_are_means_over_the_tokens_of_their_stream(tiny: Make, make_samples: Rows) -> None:
    loaded, samples = tiny("float64"), spoken(make_samples([9, 30], temperature=1.0))
    plain = asyncio.run(
        make_trainer(loaded).forward_backward([s.replace(streams={}) for s in samples], REINFORCE)
    )
    both = asyncio.run(make_trainer(loaded).forward_backward(samples, REINFORCE))
    whole = ("loss", "trained_tokens", "perf/seconds_at_peak")
    assert {name: both[name] for name in plain if name not in whole} == {
        name: value for name, value in plain.items() if name not in whole
    }
    nll = []
    for sample in samples:
        tokens = torch.from_numpy(sample.tokens)
        logprobs = loaded.model(input_ids=tokens[None]).logits[0, :-1].log_softmax(-1)
        nll += (-logprobs.gather(-1, tokens[1:, None])[-3:, 0]).tolist()
    assert both["last/nll"] == pytest.approx(np.mean(nll), rel=1e-9)
    assert both["loss"] == pytest.approx(
        plain["loss"]
        + sum(both[f"{name}/nll"] * sum(s.streams[name].sum() for s in samples) for name in ("tool", "last"))
    )


def test_rows_of_streams_alone_need_nothing_that_a_loss_or_a_critic_reads(
    tiny: Make, make_samples: Rows
) -> None:
    loaded, (row, alone) = tiny("float64"), make_samples([30, 9], temperature=1.0)
    (alone,) = spoken([alone])
    alone = alone.replace(loss_weights=np.zeros(9, np.float32), advantages=None)
    asyncio.run(make_trainer(loaded).forward_backward([row, alone], REINFORCE))
    mixed = gradients(loaded)
    expected, beside = naive_gradients(loaded, [row]), stream_gradients(loaded, [alone])
    assert relative_error(mixed, {n: expected[n] + beside[n] for n in expected}) < 1e-10
    returns = {"returns": np.ones(30), "values": np.zeros(30)}
    of_critics = []
    for rows in ([row.replace(**returns)], [row.replace(**returns), alone]):
        critic = Learner(tiny("float64"), make_trainer(tiny()).learner.settings, seed=0, critic=True)
        critic.forward_backward(rows, REINFORCE)
        assert critic.critic is not None
        parameters = critic.critic.stepper.parameters
        of_critics.append({n: p.grad.clone() for n, p in parameters.items() if p.grad is not None})
    assert relative_error(of_critics[1], of_critics[0]) < 1e-12


def test_a_stream_of_nothing_changes_no_bit(tiny: Make, make_samples: Rows) -> None:
    found = []
    for streams in ({}, {"tool": np.zeros(20, np.float32)}):
        loaded = tiny()
        rows = [s.replace(streams=streams) for s in make_samples([20, 20])]
        asyncio.run(make_trainer(loaded).forward_backward(rows, REINFORCE))
        found.append(gradients(loaded))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_each_stream_has_a_normaliser_of_its_own(make_samples: Rows) -> None:
    """The last 3 of 20 and of 9 tokens, weighed by 0.5: 0.5 / 6 each, whatever divides the loss's weights."""
    plain = make_samples([20, 9])
    alone, beside = (normalise(rows, "constant", constant=7.0) for rows in (plain, spoken(plain)))
    for before, after in zip(alone, beside, strict=True):
        assert after.streams["last"][-3:].tolist() == pytest.approx([0.5 / 6] * 3)
        assert np.array_equal(after.loss_weights, before.loss_weights)
    others = [row.streams["tool"] for row in beside]
    assert sum(map(np.sum, others)) == pytest.approx(1.0) and len({*np.concatenate(others)} - {0.0}) == 1


def test_weights_of_streams_are_checked(tiny: Make, make_samples: Rows) -> None:
    (sample,) = make_samples([9])
    with pytest.raises(RecordError, match=r"tool must align with tokens .*: got 8, expected 9"):
        sample.replace(streams={"tool": np.zeros(8)})
    with pytest.raises(RecordError, match="the first token is never trained"):
        sample.replace(streams={"tool": np.ones(9)})
    negative = sample.replace(streams={"tool": np.linspace(0, -1, 9)})
    with pytest.raises(RecordError, match=r"got a loss weight of -0.125, expected 0 or more"):
        make_trainer(tiny()).learner.forward_backward([negative], LossSpec("cross_entropy"))
