"""The examples of docs/algorithms.md do what the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from silva.algorithms import advantages, losses
from silva.algorithms.advantages import ADVANTAGES, Scores
from silva.algorithms.losses import LOSSES, LossInputs
from silva.algorithms.objective import compute
from silva.types import LossSpec

PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()


def example(name: str, module: Any) -> dict[str, Any]:
    """What the example that registers `name` defines, run as a part of the module it is meant for."""
    (code,) = [
        text for text in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if f'..., "{name}"' in text
    ]
    found = {**vars(module), "Tensor": torch.Tensor, "Metrics": dict[str, torch.Tensor]}
    exec(code.replace("{...,", "{"), found)
    return found


def test_a_loss_of_one_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """log p = -1, -2, -3 with A = 2, 0.5, -1. From 0: 2, 1, 0. From 1: 2, 2, 3."""
    found = example("positive", losses)
    monkeypatch.setitem(LOSSES, "positive", found["LOSSES"]["positive"])
    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    inputs = LossInputs(logprobs, logprobs.detach(), torch.tensor([2.0, 0.5, -1.0]), torch.arange(3))
    loss, metrics = compute(LossSpec("positive"), inputs)
    assert loss.tolist() == [2.0, 1.0, 0.0] and set(metrics) == {"ratio", "mismatch_kl"}
    assert torch.autograd.grad(loss.sum(), logprobs)[0].tolist() == [-2.0, -0.5, 0.0]
    assert compute(LossSpec("positive", {"least": 1.0}), inputs)[0].tolist() == [2.0, 2.0, 3.0]


def test_an_advantage_of_one_s_own() -> None:
    """Means 2 and 5: 3 is above, and the lone 5 is not."""
    entry = example("best_only", advantages)["ADVANTAGES"]["best_only"]
    scores = Scores(torch.tensor([1.0, 3.0, 2.0, 5.0]), torch.tensor([0, 0, 0, 1]))
    assert entry.function(scores).tolist() == [0, 1, 0, 0]
    assert entry.zero_if_equal and "best_only" not in ADVANTAGES
