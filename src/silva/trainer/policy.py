"""Log-probabilities and entropies of trained tokens under the current weights.

Only the positions that predict a trained token reach the language-model head, and never more than a
byte budget of logits lives at once. Not here: losses, micro-batching, gradients' use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from silva.errors import CapabilityError, RecordError
from silva.models.loading import LoadedModel
from silva.types import Sample

LOGIT_BYTES = 64 * 2**20  # logits kept whole up to here: 340 rows of a vocabulary of 49,152
CHUNK_ROWS = 128  # fewer rows read and write the head's weight gradient too often (1.6x at 32)


@dataclass(frozen=True)
class Batch:
    """A micro-batch padded on the right, and its N trained tokens as flat arrays in row-major order."""

    tokens: torch.Tensor  # [B, T] int64
    rows: torch.Tensor  # [N] int64: row of each trained token
    positions: torch.Tensor  # [N] int64: its place in the row, 1 or more
    temperatures: torch.Tensor  # [N]

    @property
    def targets(self) -> torch.Tensor:
        return self.tokens[self.rows, self.positions]


@dataclass(frozen=True)
class TokenLogprobs:
    """Flat over trained tokens; float32, or float64 for a float64 model."""

    logprobs: torch.Tensor  # [N]
    entropies: torch.Tensor  # [N] nats; carry a gradient only if asked
    rows: torch.Tensor  # [N] int64


def trained(sample: Sample) -> np.ndarray:
    """[T] bool: the tokens that carry a loss.

    Raises:
        RecordError: a weight is negative or NaN; the sign of a token belongs into its advantage.
    """
    if not np.all(sample.loss_weights >= 0):
        worst = sample.loss_weights[~(sample.loss_weights >= 0)][0]
        raise RecordError(f"sample of {sample.trajectory}: got a loss weight of {worst}, expected 0 or more")
    return sample.loss_weights > 0


def collate(loaded: LoadedModel, samples: Sequence[Sample]) -> Batch:
    """Pad samples into one batch on the model's device; its trained tokens are those with a loss.

    Raises:
        RecordError: a trained token was sampled greedily; at temperature 0 there is no probability that
            training could change.
    """
    width = max(len(sample) for sample in samples)
    tokens = np.zeros((len(samples), width), dtype=np.int64)  # right padding is never looked at
    rows, positions, temperatures = [], [], []
    for row, sample in enumerate(samples):
        chosen = np.flatnonzero(trained(sample))  # never 0: a Sample refuses a loss on its first token
        if np.any(sample.temperatures[chosen] <= 0):
            where = int(chosen[np.argmax(sample.temperatures[chosen] <= 0)])
            raise RecordError(
                f"sample of {sample.trajectory}: token {where} was sampled at temperature "
                f"{float(sample.temperatures[where])}, which cannot be trained; expected more than 0"
            )
        tokens[row, : len(sample)] = sample.tokens
        rows.append(np.full(len(chosen), row))
        positions.append(chosen)
        temperatures.append(sample.temperatures[chosen])
    return Batch(
        tokens=torch.from_numpy(tokens).to(loaded.device),
        rows=torch.from_numpy(np.concatenate(rows)).to(loaded.device),
        positions=torch.from_numpy(np.concatenate(positions)).to(loaded.device),
        temperatures=torch.from_numpy(np.concatenate(temperatures)).to(loaded.device, wide(loaded.dtype)),
    )


def token_logprobs(
    loaded: LoadedModel, batch: Batch, *, chunk_bytes: int = LOGIT_BYTES, entropy_grad: bool = False
) -> TokenLogprobs:
    """log p of every trained token, and the entropy of the distribution it was drawn from.

    Logits are soft-capped as the model's configuration says, then divided by the token's temperature; the
    soft-max runs over the full vocabulary in float32 or better. Over `chunk_bytes` of logits the head runs
    on 128 tokens at a time and again in the backward pass, which costs about a quarter of the head.

    Args:
        batch: B rows of T tokens, N of them trained.
        chunk_bytes: how many bytes of float logits [N, V] may be kept for the backward pass.
        entropy_grad: whether entropies take part in the gradient.
    """
    hidden = _hidden(loaded, batch)
    head = _Head(loaded, entropy_grad)
    tensors = hidden, batch.targets, batch.temperatures
    if len(hidden) * head.bytes_per_token <= chunk_bytes:
        return TokenLogprobs(*head(*tensors), batch.rows)
    parts = []
    for chunk in zip(*(tensor.split(CHUNK_ROWS) for tensor in tensors), strict=True):
        again = torch.is_grad_enabled()
        parts.append(checkpoint(head, *chunk, use_reentrant=False) if again else head(*chunk))
    logprobs, entropies = (torch.cat(part) for part in zip(*parts, strict=True))
    return TokenLogprobs(logprobs, entropies, batch.rows)


def check_head(loaded: LoadedModel) -> None:
    """Refuse a family whose logits are more than head(hidden) and a soft cap (some scale them).

    Raises:
        CapabilityError: the model's own logits differ from those of this module.
    """
    tokens = torch.arange(1, 4, device=loaded.device)[None]
    with torch.no_grad():
        own = loaded.model(input_ids=tokens, use_cache=False).logits.double()
        hidden = loaded.model.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state
        ours = _Head(loaded).logits(hidden).double()
    gap, size = float((own - ours).abs().max()), float(own.abs().max())
    if gap > 1e-3 * size:
        raise CapabilityError(
            f"model {loaded.name} of the family {loaded.model.config.model_type}: its logits differ by "
            f"{gap:.3g} from its head on its last hidden state (the largest is {size:.3g}), expected 0"
        )


def _hidden(loaded: LoadedModel, batch: Batch) -> torch.Tensor:
    """[N, H]: the hidden states that predict the trained tokens (position t - 1 predicts token t)."""
    rows, width = batch.tokens.shape
    position_ids = torch.arange(width, device=batch.tokens.device).expand(rows, width)
    decoder = loaded.model.get_decoder()
    states = decoder(input_ids=batch.tokens, position_ids=position_ids, use_cache=False).last_hidden_state
    return states[batch.rows, batch.positions - 1]


class _Head:
    """The language-model head of one model and what follows it."""

    def __init__(self, loaded: LoadedModel, entropy_grad: bool = False) -> None:
        self.linear: Any = loaded.model.get_output_embeddings()
        self.cap = getattr(loaded.model.config.get_text_config(), "final_logit_softcapping", None)
        self.dtype = wide(loaded.dtype)
        self.entropy_grad = entropy_grad
        self.bytes_per_token = self.linear.weight.shape[0] * self.dtype.itemsize

    def __call__(
        self, hidden: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden [N, H], targets [N], temperatures [N] -> log-probabilities [N], entropies [N]."""
        logits_NV = self.logits(hidden) / temperatures[:, None]
        logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
        logprobs = logprobs_NV.gather(-1, targets[:, None]).squeeze(-1)
        with torch.set_grad_enabled(self.entropy_grad and torch.is_grad_enabled()):
            entropies = -(logprobs_NV.exp() * logprobs_NV).sum(-1)
        return logprobs, entropies

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.linear(hidden).to(self.dtype)
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type log-probabilities are computed in: float32, or float64 for a float64 model."""
    return torch.float64 if dtype == torch.float64 else torch.float32
