"""An update on what is shown to the policy: cross-entropy, of which `Batches` bring the rows.

    Batches ──draw──> rows ──normalise──> forward_backward, optim_step ──> metrics

Dialogues of files (`DataBatches`) and scripted play (scripted.py) are such batches; the loop of `silva sft`
(sft.py) and the warm start of `silva rl` make updates of them. Not here: when to stop, evaluate or save.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from silva.algorithms.aggregation import normalise
from silva.config.sections import Optimizer
from silva.evaluation.evaluator import NLL, Evaluation
from silva.evaluation.statistics import Estimate, ratio
from silva.orchestrator.updates import one_update, optim_params
from silva.protocols import Trainer
from silva.types import LossSpec, Sample

if TYPE_CHECKING:
    from silva.data.settings import SupervisedData
    from silva.data.supervised import SupervisedStream
    from silva.rendering.supervised import SupervisedRow

IMITATION = LossSpec("cross_entropy")


@dataclass(frozen=True)
class Supervision:
    """How rows are learned from in `steps` updates at most, which the schedule counts."""

    steps: int
    optimizer: Optimizer
    loss: LossSpec = IMITATION
    aggregation: str = "token_mean"

    async def update(self, trainer: Trainer, rows: Sequence[Sample], number: int) -> dict[str, float]:
        """One optimizer step, counted from 0; its metrics."""
        params = optim_params(number, self.optimizer, self.steps)
        return await one_update(trainer, normalise(rows, self.aggregation), self.loss, params)


class DataBatches:
    """Rows of `[data]`, so many dialogues a batch; `beside`: a loss of RL, by which nothing of them is
    trained."""

    def __init__(self, stream: SupervisedStream, settings: SupervisedData, *, beside: bool = False) -> None:
        self.stream, self.settings, self._beside = stream, settings, beside

    async def draw(self, step: int) -> list[Sample]:
        rows = self.stream.draw(self.settings.dialogues_per_step)
        samples = [supervised_sample(row, f"data/{step}/{i}") for i, row in enumerate(rows)]
        return [_beside(sample, self.settings.mix) for sample in samples] if self._beside else samples

    def metrics(self) -> dict[str, float]:
        counts = self.stream.counts
        found = {"dialogues": counts.dialogues, "rows_cut": counts.truncated, "rows_too_long": counts.dropped,
                 "dialogues_untrained": counts.untrained, "rows_bad": len(counts.bad)}  # fmt: skip
        return {f"data/{name}": float(count) for name, count in found.items()}

    @property
    def left_out(self) -> str:
        return self.stream.left_out

    def state(self) -> Any:
        return self.stream.state()

    def load(self, state: Any) -> None:
        self.stream.load(state)


def supervised_sample(row: SupervisedRow, id: str) -> Sample:
    """A row of training: the replies under the loss, and what other roles say in a stream of the role."""
    trained: dict[str, np.ndarray] = {
        role: mask * np.float32(row.weight) for role, mask in row.trained.items()
    }
    count = len(row.tokens)
    return Sample(
        tokens=np.asarray(row.tokens, np.int64),
        loss_weights=trained.pop("assistant", np.zeros(count, np.float32)),
        logprobs=np.full(count, np.nan),
        temperatures=np.ones(count),
        versions=np.full(count, -1),
        trajectory=id,
        group=id,
        streams=trained,
    )


def _beside(sample: Sample, weight: float) -> Sample:
    streams = {"assistant": sample.loss_weights, **sample.streams}
    return sample.replace(
        loss_weights=np.zeros_like(sample.loss_weights),
        streams={f"data_{role}": (weight * each).astype(np.float32) for role, each in streams.items()},
    )


async def held_out_loss(trainer: Trainer, rows: Sequence[Sample]) -> Evaluation:
    """-log p in nats of the rows, as means over the tokens of the loss and over those of each stream."""
    scored = await trainer.score(rows, frozenset({"logprobs"}))
    assert scored.logprobs is not None
    found = dict[str, Estimate]()
    for name in ["", *sorted({name for row in rows for name in row.streams})]:
        values = [
            -logprobs[weights > 0].astype(np.float64)
            for row, logprobs in zip(rows, scored.logprobs, strict=True)
            if (weights := row.streams.get(name) if name else row.loss_weights) is not None and weights.any()
        ]
        if values:
            sums, counts = (np.array([kind(each) for each in values], float) for kind in (np.sum, len))
            found[f"{name}_{NLL}" if name else NLL] = ratio(sums, counts)
    return Evaluation("validation", found, {}, ())
