"""The reference: what it is, when it follows the policy, and a trainer that has none."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
from tests.trainer.updates import Make, Rows, gradients, make_trainer, relative_error, train

from silva.errors import CapabilityError
from silva.models.loading import LoadedModel
from silva.trainer.reference import Reference
from silva.types import LossSpec, Sample


def warm_start(loaded: LoadedModel, samples: Sequence[Sample]) -> None:
    """Some updates by a trainer that ends, so that adapters are no longer the identity."""
    trainer = make_trainer(loaded)
    for _ in range(3):
        train(trainer, samples, LossSpec("cross_entropy"))


@pytest.mark.slow
@pytest.mark.parametrize("lora", [True, False])
def test_reference_is_the_policy_before_training(tiny: Make, make_samples: Rows, lora: bool) -> None:
    loaded, samples = tiny(lora=lora), make_samples([9, 30])
    warm_start(loaded, samples)
    trainer = make_trainer(loaded, reference=True)
    needs = frozenset({"logprobs", "reference_logprobs"})
    first = asyncio.run(trainer.score(samples, needs))
    assert first.logprobs is not None and first.reference_logprobs is not None
    for current, reference in zip(first.logprobs, first.reference_logprobs, strict=True):
        np.testing.assert_array_equal(current, reference)
    spec = LossSpec("reinforce", {"kl_coef": 0.1, "kl_estimator": "k1"})
    assert train(trainer, samples, spec)["kl"] == 0.0
    second = asyncio.run(trainer.score(samples, needs))
    assert second.logprobs is not None and second.reference_logprobs is not None
    np.testing.assert_array_equal(second.reference_logprobs[1], first.reference_logprobs[1])
    gap = np.concatenate(second.logprobs) - np.concatenate(second.reference_logprobs)
    assert np.nanmax(np.abs(gap)) > 1e-3
    assert train(trainer, samples, spec)["kl"] == pytest.approx(float(np.nanmean(gap)), rel=1e-4)


def test_the_reference_of_adapters_shares_the_base_model(tiny: Make) -> None:
    """What is copied are the adapters: the base model stands in memory once."""
    loaded = tiny(lora=True)
    reference = Reference(loaded, True)
    shared, own = set(), set()
    for name, parameter in reference.model.model.named_parameters():
        same = parameter is loaded.model.get_parameter(name)
        (shared if same else own).add(name)
        assert not (parameter.requires_grad and not same)
    assert own == {n for n, _ in loaded.model.named_parameters() if "lora_" in n} and len(shared) == 20
    assert reference.parameters is not None and reference.parameters.keys() == own


def test_a_refreshed_reference_is_the_policy_of_the_moment(tiny: Make, make_samples: Rows) -> None:
    loaded, samples = tiny(lora=True), make_samples([9, 30])
    trainer, spec = make_trainer(loaded, reference=True), LossSpec("reinforce", {"kl_coef": 0.1})
    train(trainer, samples, spec)
    assert train(trainer, samples, spec)["kl"] > 0
    asyncio.run(trainer.refresh_reference())
    assert train(trainer, samples, spec)["kl"] == 0
    assert train(trainer, samples, spec)["kl"] > 0  # a copy, which does not move with the policy


def test_a_reference_by_adapters_keeps_gradients_so_far(tiny: Make, make_samples: Rows) -> None:
    samples, results = make_samples([9, 30]), []
    spec = LossSpec("reinforce", {"kl_coef": 0.1})
    for parts in ([samples], [samples[:1], samples[1:]]):
        loaded = tiny("float64", lora=True)
        trainer = make_trainer(loaded, reference=True)
        for part in parts:
            asyncio.run(trainer.forward_backward(part, spec))
        results.append(gradients(loaded))
    assert relative_error(results[1], results[0]) < 1e-10


def test_without_a_reference_nothing_pretends_to_have_one(tiny: Make, make_samples: Rows) -> None:
    trainer, samples = make_trainer(tiny(lora=True)), make_samples([9])
    assert trainer.capabilities.needs == {"logprobs"}
    with pytest.raises(CapabilityError, match=r"got the needs \['reference_logprobs'\]"):
        asyncio.run(trainer.score(samples, frozenset({"reference_logprobs"})))
    with pytest.raises(CapabilityError, match=r"kl_coef 0\.1: got a trainer without a reference"):
        asyncio.run(trainer.forward_backward(samples, LossSpec("reinforce", {"kl_coef": 0.1})))


def test_a_reference_that_is_no_copy_cannot_follow(tiny: Make) -> None:
    for given in (tiny(seed=1), False):
        trainer = make_trainer(tiny(), reference=given)
        with pytest.raises(CapabilityError, match="expected a copy of the policy"):
            asyncio.run(trainer.refresh_reference())
