"""What a micro-batch's losses read of its samples, as tensors over the trained tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from silva.algorithms.losses import LossInputs
from silva.algorithms.objective import parse
from silva.errors import RecordError
from silva.trainer.policy import TokenLogprobs, trained
from silva.types import LossSpec, Sample


def loss_inputs(
    found: TokenLogprobs,
    samples: Sequence[Sample],
    references: Sequence[np.ndarray] | None,
    loss: LossSpec,
    version: int,
    aged: bool,
) -> LossInputs:
    """`found` of the pack of `samples`, with what was recorded and assigned.

    Args:
        references: the reference policy's log-probabilities, [T] per sample.
        version: of the policy that is trained.
        aged: some token of the update was sampled by another version.

    Raises:
        RecordError: samples without advantages, for a loss that reads them.
    """
    like = found.logprobs
    old = [s.logprobs if s.old_logprobs is None else s.old_logprobs for s in samples]
    scored = any(s.old_logprobs is not None for s in samples)
    return LossInputs(
        logprobs=found.logprobs,
        old_logprobs=flat(samples, old, like),
        sampler_logprobs=flat(samples, [s.logprobs for s in samples], like) if scored else None,
        ages=flat(samples, [version - s.versions for s in samples], like) if aged else None,
        advantages=flat(samples, [_advantages(s, loss) for s in samples], like),
        rows=found.rows,
        reference_logprobs=flat(samples, references, like) if references else None,
        entropies=found.entropies,
    )


def flat(samples: Sequence[Sample], arrays: Sequence[np.ndarray], like: torch.Tensor) -> torch.Tensor:
    """[T] per sample -> [N] over trained tokens, in the order of `policy.pack`."""
    values = np.concatenate([array[trained(sample)] for sample, array in zip(samples, arrays, strict=True)])
    return torch.from_numpy(values).to(like.device, like.dtype)


def needed(sample: Sample, name: str, why: str = "which the critic learns from") -> np.ndarray:
    """Raises RecordError where the sample has none."""
    array: np.ndarray | None = getattr(sample, name)
    if array is None:
        raise RecordError(f"{name} of the sample of {sample.trajectory}, {why}: got None, expected [T]")
    return array


def _advantages(sample: Sample, loss: LossSpec) -> np.ndarray:
    if sample.advantages is None and parse(loss)[0].imitates:
        return np.zeros(len(sample), dtype=np.float32)
    return needed(sample, "advantages", f"which loss {loss.name} reads")
