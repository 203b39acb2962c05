"""What the micro-batches of one call have in common: its samples, its loss, and the sums of its metrics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from silva.algorithms import objective
from silva.models import flops
from silva.models.loading import LoadedModel
from silva.trainer.loss_inputs import StreamTokens, streams, weighted_loss
from silva.trainer.plan import RankWork
from silva.trainer.policy import Pack, TokenLogprobs, trained
from silva.trainer.sharding.parallel import Mesh
from silva.types import LossSpec, Sample

if TYPE_CHECKING:
    from silva.trainer.critic import Critic


class Blamed(Protocol):
    def blame(self, loss: torch.Tensor, trajectories: Sequence[str]) -> None: ...


class Update:
    """Micro-batches are lists of indices of its samples.

    Args:
        references: the reference policy's log-probabilities, [T] per sample.
        version: of the policy.
        stepper: takes the blame for a loss that is not finite.
        at_peak: see `seconds_at_peak`.

    Raises:
        RecordError: samples without advantages, for a loss that reads them.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        references: Sequence[np.ndarray] | None,
        loss: LossSpec,
        version: int,
        stepper: Blamed,
        at_peak: Callable[[Pack], float] = lambda batch: 0.0,
    ) -> None:
        self.samples, self._references, self._loss = samples, references, loss
        self._version, self._stepper, self._at_peak = version, stepper, at_peak
        sampled = [s.versions[trained(s, "") & (s.versions >= 0)] for s in samples]
        self._aged = any((versions != version).any() for versions in sampled)
        self.entropy_grad = bool(loss.params.get("entropy_coef", 0))
        if samples and not objective.parse(loss)[0].imitates:  # found by all ranks, which have all samples
            needed = StreamTokens(samples, "", torch.zeros(()))
            needed.needed("advantages", f"which loss {loss.name} reads")
        self.sums: defaultdict[str, torch.Tensor | float] = defaultdict(float)
        self._clipped: list[tuple[Sequence[int], torch.Tensor]] = []  # of each micro-batch

    def rows(self, part: Sequence[int]) -> list[Sample]:
        return [self.samples[i] for i in part]

    def loss(self, found: TokenLogprobs, part: Sequence[int], batch: Pack | None = None) -> torch.Tensor:
        """Of a micro-batch, whose metrics are added up; without samples it is zero, as a rank that has none
        takes part in what others compute. `batch`: what was computed here for `found`.
        """
        if not part:
            return 0 * found.logprobs.sum()
        # The weights hold the normaliser of the whole update: gradients of ranks add up, and are never
        # averaged.
        mine = [self._references[i] for i in part] if self._references else None
        rows = self.rows(part)
        total, metrics = weighted_loss(found, rows, mine, self._loss, self._version, self._aged)
        self._stepper.blame(total, [sample.trajectory for sample in rows])
        self.sums["loss"] += total.detach().double()
        if batch is not None:
            self.sums["at_peak"] += self._at_peak(batch)
        self.add(metrics)
        if "clipped" in metrics:
            self._clipped.append((part, metrics["clipped"]))
        return total

    def add(self, metrics: Mapping[str, torch.Tensor]) -> None:
        """Of the tokens of a micro-batch."""
        for name, values in metrics.items():
            self.sums[name] += values.double().sum()

    def metrics(self, mesh: Mesh) -> dict[str, float]:
        """The sum of the losses, the number of tokens, and means over the tokens of each stream."""
        samples = self.samples
        tokens = sum(int(trained(sample).sum()) for sample in samples)
        means = dict(mesh.sum({name: float(value) for name, value in self.sums.items()}))
        total, at_peak = means.pop("loss", 0.0), means.pop("at_peak", 0.0) / mesh.size
        counts = {name: sum(int(trained(s, name).sum()) for s in samples) for name in streams(samples)}
        means = {
            name: value / counts.get(name.partition("/")[0], counts[""]) for name, value in means.items()
        }
        speed = {"perf/seconds_at_peak": at_peak} if at_peak else {}
        return {"loss": total, "trained_tokens": float(tokens), **means, **speed}

    def clipped(self, asked: Sequence[Sample], mesh: Mesh) -> tuple[np.ndarray, ...]:
        """[T] bool for each of `asked`, which hold its samples: what the loss calls clipped."""
        mine = dict[str, np.ndarray]()
        for part, values in self._clipped:
            flags, start = values.cpu().numpy() > 0, 0
            for i in part:
                of_loss = trained(self.samples[i], "")
                mine[str(i)] = np.zeros(len(of_loss), bool)
                mine[str(i)][of_loss] = flags[start : (start := start + int(of_loss.sum()))]
        shares = mesh.by_share(mesh.gather(mine, Mapping[str, np.ndarray]))
        found = {id(self.samples[int(i)]): array for share in shares for i, array in share.items()}
        return tuple(found.get(id(sample), np.zeros(len(sample), bool)) for sample in asked)


@dataclass(frozen=True)
class Begun:
    """An update before its micro-batches; `dealt` are those of each rank. `critic`: learns beside it.
    `asked`: all samples of the call, of which some may train nothing."""

    asked: Sequence[Sample]
    update: Update
    dealt: list[list[RankWork]]
    critic: Critic | None


def seconds_at_peak(loaded: LoadedModel, peak: float | None = None) -> Callable[[Pack], float]:
    """How long forward and backward passes over a micro-batch would take, if all that a device did were their
    products at its peak.

    Args:
        loaded: the model before it is divided.
        peak: FLOP a second; None: what the device makes.
    """
    flop, device, dtype = flops.flop_of(loaded.model), loaded.device, loaded.dtype

    def seconds(batch: Pack) -> float:
        work = flop.training(len(batch.trie), flops.pairs(batch.trie), len(batch.targets))
        return work / (peak or flops.peak(device, dtype))

    return seconds
