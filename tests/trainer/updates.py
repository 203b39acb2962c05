"""Updates of a local trainer, and the gradients that they are compared with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from silva.config.sections import Optimizer
from silva.models.loading import LoadedModel
from silva.orchestrator.updates import optim_params
from silva.trainer.learner import Learner
from silva.trainer.local import LocalTrainer
from silva.trainer.settings import LocalTrainerSettings
from silva.types import LossSpec, Sample

Make = Callable[..., LoadedModel]
Rows = Callable[..., list[Sample]]
REINFORCE = LossSpec("reinforce")


def make_trainer(loaded: LoadedModel, **changes: Any) -> LocalTrainer:
    compute = changes.pop("compute", None)
    outside = {name: changes.pop(name) for name in ("reference", "say") if name in changes}
    settings = LocalTrainerSettings(**{"optimizer": Optimizer(lr=1e-2), **changes})
    return LocalTrainer(Learner(loaded, settings, seed=0, **outside), compute=compute)


def gradients(loaded: LoadedModel) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in loaded.model.named_parameters() if p.grad is not None}


def train(trainer: LocalTrainer, samples: Sequence[Sample], loss: LossSpec = REINFORCE) -> dict[str, float]:
    """One update."""
    metrics = asyncio.run(trainer.forward_backward(samples, loss))
    return {**metrics, **asyncio.run(optim_step(trainer))}


async def optim_step(trainer: LocalTrainer, total_updates: int = 10) -> Mapping[str, float]:
    """As the loop does it: by the schedule of the trainer's settings."""
    learner = trainer.learner
    settings, update = learner.settings, learner.stepper.counters.updates
    critic = optim_params(update, settings.critic.optimizer, total_updates) if learner.critic else None
    return await trainer.optim_step(optim_params(update, settings.optimizer, total_updates), critic)


def relative_error(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert got.keys() == expected.keys()
    difference = sum(float((got[n] - expected[n]).square().sum()) for n in expected)
    return (difference / sum(float(g.square().sum()) for g in expected.values())) ** 0.5


def advantage_weights(sample: Sample) -> np.ndarray:
    assert sample.advantages is not None
    return sample.loss_weights * sample.advantages


def naive_gradients(
    loaded: LoadedModel, samples: Sequence[Sample], weights: Callable[[Sample], Any] = advantage_weights
) -> dict[str, torch.Tensor]:
    """-sum(w log p), one unpadded row after the other, from full logits; `weights` gives w."""
    loss = torch.zeros((), dtype=loaded.dtype)
    for sample in samples:
        tokens = torch.from_numpy(sample.tokens)
        logits = loaded.model(input_ids=tokens[None]).logits[0, :-1] / float(sample.temperatures[0])
        logprobs = torch.log_softmax(logits, -1).gather(-1, tokens[1:, None])[:, 0]
        loss = loss - (torch.from_numpy(weights(sample))[1:] * logprobs).sum()
    names, parameters = zip(*loaded.model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))
