"""Runs of several clients on one tiny model, and data for them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from silva.config.sections import TinyModel
from silva.models.loading import LoadedModel, copied, load_model
from silva.trainer.settings import LocalTrainerSettings
from silva.trainer.tenants import AdamParams, Datum, Pass, Passed
from silva.trainer.tenants.learner import Tenants

SHAPE: Mapping[str, Any] = {"alpha": 8.0, "seed": 0, "attn": True, "mlp": True, "unembed": False}
STEP = AdamParams(lr=1e-2)
CLIENT = {"rank": 4, **SHAPE}


@functools.cache
def _plain(dtype: str) -> LoadedModel:
    return load_model(TinyModel(layers=2, width=32, heads=4, kv_heads=2, context=128, dtype=dtype), seed=0)


def plain(dtype: str = "float32") -> LoadedModel:
    return copied(_plain(dtype), [])


def tenants(dtype: str = "float32", **settings: Any) -> Tenants:
    return Tenants(plain(dtype), LocalTrainerSettings(**settings))


def data(seed: int, rows: int = 3, *, loss: str = "ppo", k: int | None = None, most: int = 24) -> list[Datum]:
    """Rows that share a beginning of 16 tokens or more, so that they are a trie."""
    rng = np.random.default_rng(seed)
    start, made = rng.integers(0, 256, rng.integers(16, 20)), []
    for _ in range(rows):
        tokens = np.concatenate([start, rng.integers(0, 256, rng.integers(2, most - 19))])
        targets = np.append(tokens[1:], 7) if k is None else rng.integers(0, 256, (len(tokens), k))
        weights = (rng.random(targets.shape) < 0.7) * rng.random(targets.shape)
        marked = (rng.random(targets.shape) < 0.7).astype(np.float32)
        of_loss = {
            "cross_entropy": {"weights": weights},
            "gspo": {"sequence_ratio_mask": marked},
        }.get(loss, {})
        policy = {
            "logprobs": rng.normal(-5.5, 0.2, targets.shape),
            "advantages": marked * rng.normal(size=targets.shape),
        }
        made.append(Datum(tokens, targets, of_loss if loss == "cross_entropy" else {**policy, **of_loss}))
    return made


def passed(found: Sequence[object]) -> list[Passed]:
    """Of passes that must not fail."""
    for each in found:
        if isinstance(each, Exception):
            raise each
    return list(found)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Client:
    """What a client asks for, step by step: its run, its data and its schedule depend on nothing else."""

    name: str
    rank: int
    seed: int
    loss: str = "ppo"
    unembed: bool = False

    def begin(self, learner: Tenants) -> None:
        shape = {**SHAPE, "seed": self.seed, "unembed": self.unembed}
        learner.create(self.name, rank=self.rank, **shape)

    def ask(self, step: int) -> Pass:
        made = data(100 * self.seed + step, 2 + (self.seed + step) % 3, loss=self.loss)
        return Pass(self.name, made, self.loss, {}, backward=True)

    def adam(self, step: int) -> AdamParams:
        return AdamParams(
            lr=0.01 / (1 + self.seed + step),
            weight_decay=0.1 * self.seed,
            grad_clip_norm=float(self.seed % 2),
        )


def weights(learner: Tenants, run: str) -> bytes:
    return b"".join(p.detach().numpy().tobytes() for p in learner.parameters(run).values())


def gradient(learner: Tenants, run: str) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in learner.parameters(run).items() if p.grad is not None}
