"""Doubles of what a Tinker server gives work to: numbers worked out by hand, and lists of calls."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from silva.errors import CheckpointError, ConfigError, SilvaError
from silva.trainer.tenants import AdamParams, Pass, Passed
from silva.types import Completion, SamplingParams, TokenScores

LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo")


class ScriptedRuns:
    """Each run is a weight and a gradient: a pass gives -(target % 7 + 1) + weight and adds the sum of the
    weights or advantages to the gradient, a step makes 0.9 weight + lr gradient of it: no step can be lost,
    made twice or swapped with another."""

    def __init__(self) -> None:
        self.weights: dict[str, float] = {}
        self.gradients: dict[str, float] = {}
        self.made: dict[str, dict] = {}
        self.together: list[list[str]] = []
        self.calls: list[tuple] = []
        self.hold = threading.Event()
        self.hold.set()

    def create(self, run: str, **how: object) -> None:
        self.weights[run], self.gradients[run], self.made[run] = 0.0, 0.0, how
        self.calls.append(("create", run))

    def passes(self, passes: Sequence[Pass]) -> list[Passed | SilvaError]:
        self.hold.wait(20)
        self.together.append([each.run for each in passes])
        return [self._passed(each) for each in passes]

    def _passed(self, asked: Pass) -> Passed | SilvaError:
        if asked.loss not in LOSSES:
            return ConfigError(f"loss_fn: got {asked.loss!r}, expected {', '.join(LOSSES)}")
        name = "weights" if asked.loss == "cross_entropy" else "advantages"
        for datum in asked.data:
            if len(datum.targets) != len(datum.tokens):
                return ConfigError(f"targets: got {len(datum.targets)}, expected {len(datum.tokens)}")
            if name not in datum.inputs or datum.inputs[name].shape != datum.targets.shape:
                return ConfigError(f"{name}: got none, or none of the shape of targets")
        weight = self.weights[asked.run]
        logprobs = [(weight - (each.targets % 7 + 1)).astype(np.float32) for each in asked.data]
        if asked.backward:
            self.gradients[asked.run] += sum(float(d.inputs[name].sum()) for d in asked.data)
        total = -sum(
            float((d.inputs[name] * each).sum()) for d, each in zip(asked.data, logprobs, strict=True)
        )
        return Passed(logprobs, {"loss:sum": total})

    def optim_step(self, run: str, params: AdamParams) -> Mapping[str, float]:
        self.calls.append(("optim_step", run, params))
        self.weights[run] = 0.9 * self.weights[run] + params.lr * self.gradients[run]
        gradient, self.gradients[run] = self.gradients[run], 0.0
        return {"gradient:mean": gradient}

    def save(self, run: str, folder: Path, *, optimizer: bool = True) -> None:
        self.calls.append(("save", run, optimizer))
        (folder / "weights.json").write_text(json.dumps([self.weights[run], optimizer, self.gradients[run]]))

    def load(self, run: str, folder: Path, *, optimizer: bool) -> None:
        weight, with_optimizer, gradient = json.loads((folder / "weights.json").read_text())
        if optimizer and not with_optimizer:
            raise CheckpointError(f"{folder}: no moments")
        self.weights[run], self.gradients[run] = weight, gradient if optimizer else 0.0
        self.calls.append(("load", run, optimizer))

    def drop(self, run: str) -> None:
        del self.weights[run], self.gradients[run]
        self.calls.append(("drop", run))


class ScriptedSampler:
    """The n-th token is (last token of the prompt + n) % 64, with the log-probability of the adapter's
    weight - n."""

    context, vocabulary, ends = 128, 64, (63,)

    def __init__(self) -> None:
        self.asked: list[tuple[tuple[int, ...], SamplingParams]] = []

    async def sample(self, tokens: Sequence[int], params: SamplingParams, adapter: Path | None) -> Completion:
        self.asked.append((tuple(tokens), params))
        weight = _weight(adapter)
        found: list[int] = []
        reason = "length"
        while len(found) < params.max_tokens and reason == "length":
            found.append((tokens[-1] + len(found) + 1) % 64)
            if found[-1] in params.stop_token_ids:
                reason = "stop_token"
        logprobs = tuple(weight - n for n in range(len(found)))
        zeros = (0.0,) * len(found)
        return Completion(tuple(found), logprobs, zeros, zeros, (0,) * len(found), reason)

    async def score(
        self,
        tokens: Sequence[int],
        start: int,
        adapter: Path | None,
        top: int,
        read: Callable[[torch.Tensor, int], None] | None = None,
    ) -> TokenScores:
        """`read` is told, two places at a time, of half the tokens that they are alike, and of the others
        that they are impossible: of those from the token itself on."""
        for first in range(start, len(tokens), 2) if read else ():
            places = torch.full((min(2, len(tokens) - first), self.vocabulary), -torch.inf)
            for row, token in enumerate(tokens[first : first + 2]):
                places[row, torch.arange(token, token + self.vocabulary // 2) % self.vocabulary] = 3.0
            read(places, first)
        rest, weight = tokens[start:], _weight(adapter)
        logprobs = tuple(weight - token for token in rest)
        first = tuple(tuple((token + n, -0.5 - n) for n in range(top)) for token in rest)
        return TokenScores(logprobs, tuple(rest), logprobs, top=first)


def _weight(adapter: Path | None) -> float:
    return 0.0 if adapter is None else json.loads((adapter / "weights.json").read_text())[0]
