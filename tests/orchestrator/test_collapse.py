"""The likelihood of every first reply under every prompt, against a forward pass for each pair."""

from __future__ import annotations

import asyncio

import pytest
import torch

from silva.algorithms.diagnostics import collapse
from silva.config.sections import TinyModel
from silva.models.loading import load_model
from silva.orchestrator.collapse import collapse_metrics
from silva.trainer.learner import Learner
from silva.trainer.local import LocalTrainer
from silva.trainer.settings import LocalTrainerSettings
from silva.types import Group, Segment, Task, Trajectory, Turn

PROMPTS = [(5, 6, 7), (5, 6, 8, 9), (40, 41)]
REPLIES = [(50, 51), (60,), (70, 71, 72)]


def group(key: str, *pairs: tuple[tuple[int, ...], tuple[int, ...]]) -> Group:
    def trajectory(i: int, prompt: tuple[int, ...], reply: tuple[int, ...]) -> Trajectory:
        answer = Segment("policy", reply, (0.0,) * len(reply), versions=(0,) * len(reply))
        return Trajectory(
            f"{key}/{i}",
            (Turn(f"{key}/{i}/0", (Segment("environment", prompt), answer), fresh=True),),
            "terminated",
        )

    return Group(key, Task(key, "w", 0, {}), tuple(trajectory(i, *pair) for i, pair in enumerate(pairs)))


def test_numbers_of_every_pair() -> None:
    loaded = load_model(TinyModel(dtype="float64"), seed=0)
    trainer = LocalTrainer(Learner(loaded, LocalTrainerSettings(), seed=0))
    groups = [
        group(str(i), pair, (PROMPTS[i], (1,))) for i, pair in enumerate(zip(PROMPTS, REPLIES, strict=True))
    ]
    groups.append(group("again", (PROMPTS[0], (99,))))  # a prompt that is there already
    found = asyncio.run(collapse_metrics(trainer, groups))

    def likelihood(reply: tuple[int, ...], prompt: tuple[int, ...]) -> float:
        tokens = torch.tensor([[*prompt, *reply]])
        with torch.no_grad():
            logprobs = loaded.model(input_ids=tokens).logits[0].log_softmax(-1)
        return sum(float(logprobs[len(prompt) + i - 1, token]) for i, token in enumerate(reply))

    matrix = torch.tensor([[likelihood(r, p) for p in PROMPTS] for r in REPLIES], dtype=torch.float64)
    expected = collapse(matrix, torch.tensor([2, 1, 3]))
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_one_prompt_says_nothing() -> None:
    trainer = LocalTrainer(Learner(load_model(TinyModel(), seed=0), LocalTrainerSettings(), seed=0))
    assert asyncio.run(collapse_metrics(trainer, [group("a", (PROMPTS[0], REPLIES[0]))])) == {}
