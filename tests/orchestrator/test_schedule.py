"""Schedules on numbers worked by hand."""

from __future__ import annotations

import math

import pytest

from silva.config.sections import Optimizer
from silva.orchestrator.schedule import lr_at, optim_params
from silva.types import OptimParams


def rates(settings: Optimizer, total: int) -> list[float]:
    return [lr_at(update, settings, total) for update in range(total)]


def test_constant_is_constant() -> None:
    assert rates(Optimizer(lr=0.5), 3) == [0.5, 0.5, 0.5]


def test_warmup_rises_to_the_full_rate() -> None:
    assert rates(Optimizer(lr=1.0, warmup=3), 6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_ends_at_the_smallest_rate() -> None:
    settings = Optimizer(lr=2.0, schedule="linear", min_lr_ratio=0.5)
    assert rates(settings, 5) == pytest.approx([2.0, 1.75, 1.5, 1.25, 1.0])


def test_cosine_after_warmup() -> None:
    settings = Optimizer(lr=1.0, schedule="cosine", warmup=1)
    expected = [0.5, 1.0, 0.5 * (1 + math.cos(math.pi / 3)), 0.5 * (1 + math.cos(2 * math.pi / 3)), 0.0]
    assert rates(settings, 5) == pytest.approx(expected)
    assert expected[2:4] == pytest.approx([0.75, 0.25])


def test_past_the_end_the_rate_stays() -> None:
    settings = Optimizer(lr=1.0, schedule="linear", min_lr_ratio=0.1)
    assert lr_at(50, settings, 10) == pytest.approx(0.1)
    assert lr_at(0, settings, 1) == 1.0


def test_every_number_of_an_update_comes_from_the_settings() -> None:
    settings = Optimizer(lr=2.0, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.1, max_grad_norm=None,
                         schedule="linear")  # fmt: skip
    assert optim_params(1, settings, 3) == OptimParams(1.0, (0.8, 0.9), 1e-3, 0.1, None)
