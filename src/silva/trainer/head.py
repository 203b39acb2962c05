"""The language-model head: hidden states to log-probabilities of given tokens and entropies.

Never more than a byte budget of logits lives at once.
"""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

from silva.models.head import logits_of
from silva.models.loading import LoadedModel
from silva.trainer.exact import ExactLogprobs, exact_logits

LOGIT_BYTES = 256 * 2**20  # logits kept whole up to here: 1,365 rows of a vocabulary of 49,152
CHUNK_ROWS = {"cpu": 128, "cuda": 1024}
"""Rows at a time where not all logits are kept, by the type of the device. Fewer read and write the head's
weight gradient too often (CPU: 1.6 x at 32) and are more launches (H100: 128 in place of 2048 make a whole
step of Qwen3-0.6B 1.34 x as long)."""


class Head:
    """The head of one model and what follows it.

    Logits (`logits_of`) are divided by the token's temperature; the soft-max runs over the full vocabulary in
    float32 or better. Over `chunk_bytes` of logits the head runs on CHUNK_ROWS tokens at a time and again
    in the backward pass, which costs about a quarter of the head.

    Args:
        entropy_grad: whether entropies take part in the gradient.
        chunk_bytes: how many bytes of float logits [N, V] may be kept for the backward pass.
    """

    frozen = False

    def __init__(
        self, loaded: LoadedModel, *, entropy_grad: bool = False, chunk_bytes: int = LOGIT_BYTES
    ) -> None:
        self.model, self._exact = loaded.model, loaded.exact
        self.entropy_grad = entropy_grad
        vocabulary = loaded.model.get_output_embeddings().weight.shape[0]
        self.rows_kept = chunk_bytes // (vocabulary * wide(loaded.dtype).itemsize)
        self.rows_at_once = CHUNK_ROWS.get(loaded.device.type, CHUNK_ROWS["cpu"])

    def __call__(
        self, hidden: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden [N, H], targets [N] or [N, K], temperatures [N] -> log-probabilities, shaped as the targets,
        and entropies [N] in nats."""
        tensors = hidden, targets, temperatures
        if len(hidden) <= self.rows_kept:
            return self._whole(*tensors)
        parts = []
        for chunk in zip(*(tensor.split(self.rows_at_once) for tensor in tensors), strict=True):
            again = torch.is_grad_enabled()
            parts.append(
                checkpoint(self._whole, *chunk, use_reentrant=False) if again else self._whole(*chunk)
            )
        logprobs, entropies = (torch.cat(part) for part in zip(*parts, strict=True))
        return logprobs, entropies

    def _whole(
        self, hidden: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        exact = self._exact
        logits_NV = logits_of(self.model, hidden) if exact is None else exact_logits(exact, hidden)
        if not bool((temperatures == 1).all()):
            logits_NV = logits_NV / temperatures[:, None]
        if exact is not None:
            found, entropies = ExactLogprobs.apply(logits_NV, targets[..., None].flatten(1))  # type: ignore[no-untyped-call]
            return found.view(targets.shape), entropies if self.entropy_grad else entropies.detach()
        logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
        logprobs = logprobs_NV.gather(-1, targets[..., None].flatten(1)).view(targets.shape)
        if self.entropy_grad and torch.is_grad_enabled():
            return logprobs, -(logprobs_NV.exp() * logprobs_NV).sum(-1)
        with torch.no_grad():
            return logprobs, -logprobs_NV.exp().mul_(logprobs_NV).sum(-1)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type log-probabilities are computed in: float32, or float64 for a float64 model."""
    return torch.float64 if dtype == torch.float64 else torch.float32
