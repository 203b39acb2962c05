"""The learning rate of every update: trainers know no schedule and no length of a run."""

from __future__ import annotations

import math

from silva.config.sections import Optimizer
from silva.types import OptimParams


def optim_params(update: int, settings: Optimizer, total_updates: int) -> OptimParams:
    """What one update, counted from 0, is made with."""
    return OptimParams(
        lr_at(update, settings, total_updates),
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
    )


def lr_at(update: int, settings: Optimizer, total_updates: int) -> float:
    """Learning rate of one update, counted from 0.

    Warm-up of W updates rises linearly, `lr * (update + 1) / (W + 1)`, so that update W is the first at full
    rate; then constant, linear or cosine, reaching `lr * min_lr_ratio` at update `total_updates - 1`.
    """
    if update < settings.warmup:
        return settings.lr * (update + 1) / (settings.warmup + 1)
    if settings.schedule == "constant":
        return settings.lr
    done = min(1.0, (update - settings.warmup) / max(1, total_updates - 1 - settings.warmup))
    left = 1 - done if settings.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return settings.lr * (settings.min_lr_ratio + (1 - settings.min_lr_ratio) * left)
