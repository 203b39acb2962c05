"""The loss of a micro-batch, and what it reads of its samples: tensors over the trained tokens of streams."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from silva.algorithms import objective
from silva.algorithms.losses import LossInputs
from silva.errors import RecordError
from silva.trainer.policy import TokenLogprobs, trained
from silva.types import LossSpec, Sample


class StreamTokens:
    """The tokens of a pack that one stream of its samples trains.

    Attributes:
        weights: [N], N of these tokens in the order of `policy.pack`.
    """

    def __init__(self, samples: Sequence[Sample], name: str, like: torch.Tensor) -> None:
        self._like, self._samples = like, samples
        self._masks = [trained(sample, name) for sample in samples]
        packed = np.concatenate([m[trained(s)] for m, s in zip(self._masks, samples, strict=True)])
        self._places = None if packed.all() else torch.from_numpy(np.flatnonzero(packed)).to(like.device)
        self.weights = self.flat([s.streams.get(name, s.loss_weights) for s in samples])

    def of(self, packed: torch.Tensor) -> torch.Tensor:
        """Values over all trained tokens of the pack -> [N]."""
        return packed if self._places is None else packed[self._places]

    def flat(self, arrays: Sequence[np.ndarray]) -> torch.Tensor:
        """[T] per sample -> [N]."""
        values = np.concatenate([array[mask] for array, mask in zip(arrays, self._masks, strict=True)])
        return torch.from_numpy(values).to(self._like.device, self._like.dtype)

    def needed(self, name: str, why: str) -> torch.Tensor:
        """[N] of an array that every sample with such tokens must have.

        Raises:
            RecordError: one has none.
        """
        arrays: list[np.ndarray] = []
        for sample, mask in zip(self._samples, self._masks, strict=True):
            array: np.ndarray | None = getattr(sample, name)
            if array is None and mask.any():
                raise RecordError(
                    f"{name} of the sample of {sample.trajectory}, {why}: got None, expected [T]"
                )
            arrays.append(np.zeros(len(sample)) if array is None else array)
        return self.flat(arrays)


IMITATED = LossSpec("cross_entropy")
"""The loss of the streams that samples have beside the one that a call names."""


def streams(samples: Sequence[Sample]) -> list[str]:
    """ "" for that of the loss, and all others of the samples in the order of their names."""
    return ["", *sorted({name for sample in samples for name in sample.streams})]


def weighted_loss(
    found: TokenLogprobs,
    samples: Sequence[Sample],
    references: Sequence[np.ndarray] | None,
    loss: LossSpec,
    version: int,
    aged: bool,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The sum of weights * loss over `found` of the pack of `samples`, and metrics [N], N tokens of their
    stream; those of another stream than the loss's under its name ("tool/nll").

    Args:
        references: the reference policy's log-probabilities, [T] per sample.
        version: of the policy that is trained.
        aged: some token of the update was sampled by another version.

    Raises:
        RecordError: samples without advantages, for a loss that reads them.
    """
    total, metrics = found.logprobs.new_zeros(()), dict[str, torch.Tensor]()
    for name in streams(samples):
        stream = StreamTokens(samples, name, found.logprobs)
        if len(stream.weights) and not name:
            inputs = _inputs(found, samples, stream, references, loss, version if aged else None)
            per_token, metrics = objective.compute(loss, inputs)
            total = total + (stream.weights * per_token).sum()
        elif len(stream.weights):
            per_token, said = objective.compute(IMITATED, _inputs(found, samples, stream, None, IMITATED))
            total = total + (stream.weights * per_token).sum()
            metrics |= {f"{name}/{metric}": values for metric, values in said.items()}
    return total, metrics


def _inputs(
    found: TokenLogprobs,
    samples: Sequence[Sample],
    stream: StreamTokens,
    references: Sequence[np.ndarray] | None,
    loss: LossSpec,
    version: int | None = None,
) -> LossInputs:
    """The inputs of a loss, with what was recorded. `version`: None if the policy sampled all tokens."""
    old = [s.logprobs if s.old_logprobs is None else s.old_logprobs for s in samples]
    scored = any(s.old_logprobs is not None for s in samples)
    imitates = objective.parse(loss)[0].imitates
    return LossInputs(
        logprobs=stream.of(found.logprobs),
        old_logprobs=stream.flat(old),
        sampler_logprobs=stream.flat([s.logprobs for s in samples]) if scored else None,
        ages=None if version is None else stream.flat([version - s.versions for s in samples]),
        advantages=torch.zeros_like(stream.weights)
        if imitates
        else stream.needed("advantages", f"which loss {loss.name} reads"),
        rows=stream.of(found.rows),
        reference_logprobs=stream.flat(references) if references else None,
        entropies=None if found.entropies is None else stream.of(found.entropies),
    )
