"""Gradients of several learners in one pass are those of each alone, to the last bit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from silva.compute import ComputeThread
from silva.config.sections import Lora
from silva.errors import SilvaError
from silva.models.loading import LoadedModel
from silva.seeds import with_adapters
from silva.trainer.joined import JoinedLearners
from silva.trainer.learner import Learner
from silva.trainer.settings import LocalTrainerSettings
from silva.types import LossSpec, Sample

LORA = Lora(rank=4, alpha=8.0)
LOSS = LossSpec("clipped")
Rows = Callable[..., list[Sample]]


@pytest.fixture
def compute() -> Iterator[ComputeThread]:
    made = ComputeThread(1)
    yield made
    made.shutdown()


class Company:
    """A learner for each seed, and its double that learns alone."""

    def __init__(
        self, plain: LoadedModel, compute: ComputeThread, lora: Lora = LORA, **settings: Any
    ) -> None:
        given = LocalTrainerSettings(self_check=False, **settings)
        self.compute, self.joined = compute, JoinedLearners(plain, given, lora, compute)
        self.learners, self.alone = (
            [self._learner(plain, seed, given, lora) for seed in range(3)] for _ in "ab"
        )
        self.gradients = [self.joined.add(f"{seed}", each) for seed, each in enumerate(self.learners)]

    def _learner(self, plain: LoadedModel, seed: int, given: LocalTrainerSettings, lora: Lora) -> Learner:
        loaded = with_adapters(plain, lora, seed=seed)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in loaded.model.named_parameters():
                if "lora_B" in name:
                    parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
        return Learner(loaded, given, seed=seed)

    def together(self, rows: Sequence[Sequence[Sample]]) -> list[Any]:
        async def ask() -> list[Any]:
            works = [one(given, LOSS) for one, given in zip(self.gradients, rows, strict=True)]
            return await asyncio.gather(*works, return_exceptions=True)

        return asyncio.run(ask())


def gradients(learner: Learner) -> dict[str, bytes]:
    found = {name: p.grad for name, p in learner.stepper.parameters.items()}
    return {name: b"" if grad is None else grad.numpy().tobytes() for name, grad in found.items()}


@pytest.mark.same_bits
@pytest.mark.parametrize(
    ("settings", "lengths", "passes"),
    [
        ({}, [9, 12, 7], {3: 1}),
        ({"gradient_checkpointing": True}, [9, 12, 7], {3: 1}),
        ({"micro_batch_tokens": 40}, [34, 10], {1: 3, 3: 1}),
    ],
    ids=["one micro-batch", "computed again", "several"],
)
def test_learners_that_meet_share_passes_and_have_the_bits_of_each_alone(
    tiny: Any,
    make_samples: Rows,
    compute: ComputeThread,
    settings: dict[str, Any],
    lengths: list[int],
    passes: dict[int, int],
) -> None:
    company = Company(tiny(), compute, **settings)
    rows = [make_samples(lengths, seed=seed) for seed in range(3)]
    found = company.together(rows)
    for alone, joint, given, metrics in zip(company.alone, company.learners, rows, found, strict=True):
        assert compute.run(alone.forward_backward, given, LOSS) == metrics
        assert gradients(alone) == gradients(joint) and any(gradients(joint).values())
    assert company.joined.passes == passes


def test_dropout_is_computed_alone(tiny: Any, make_samples: Rows, compute: ComputeThread) -> None:
    company = Company(tiny(), compute, Lora(rank=4, dropout=0.3))
    rows = [make_samples([9, 12], seed=seed) for seed in range(3)]
    found = company.together(rows)
    for alone, joint, given, metrics in zip(company.alone, company.learners, rows, found, strict=True):
        assert compute.run(alone.forward_backward, given, LOSS) == metrics
        assert gradients(alone) == gradients(joint)
    assert company.joined.passes == {}


def test_what_is_wrong_with_one_is_its_own(tiny: Any, make_samples: Rows, compute: ComputeThread) -> None:
    company = Company(tiny(), compute)
    rows = [make_samples([9, 12], seed=seed) for seed in range(3)]
    rows[1][0] = rows[1][0].replace(advantages=None)
    found = company.together(rows)
    assert isinstance(found[1], SilvaError) and "advantages" in str(found[1])
    assert not any(gradients(company.learners[1]).values())
    for seed in (0, 2):
        assert compute.run(company.alone[seed].forward_backward, rows[seed], LOSS) == found[seed]


def test_a_loss_that_fails_half_way_leaves_the_others_their_gradients(
    tiny: Any, make_samples: Rows, compute: ComputeThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    company = Company(tiny(), compute)
    rows = [make_samples([9, 12], seed=seed) for seed in range(3)]
    begin = company.learners[1].begin

    def broken(*given: Any) -> Any:
        begun = begin(*given)
        monkeypatch.setattr(begun.update, "loss", lambda *rest: 1 / 0)
        return begun

    monkeypatch.setattr(company.learners[1], "begin", broken)
    found = company.together(rows)
    assert isinstance(found[1], ZeroDivisionError) and not any(gradients(company.learners[1]).values())
    for seed in (0, 2):
        assert compute.run(company.alone[seed].forward_backward, rows[seed], LOSS) == found[seed]
        assert gradients(company.alone[seed]) == gradients(company.learners[seed])
