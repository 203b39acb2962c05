"""Log-probabilities and entropies of trained tokens under the current weights, every shared token once.

    samples ──pack──> trie of their tokens ──model, once──> hidden states [unique] ──head──> values [unique]
                                                                                                │ gather
    losses see one value for each (row, token) pair, rows in the order of the samples  <────────┘

Two ways through the model: the whole trie at once, or, where it exceeds the budget, chunk by chunk with the
keys and values of what is above (walk.py). Not here: losses, the cut into micro-batches, gradients' use.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from silva.errors import RecordError
from silva.models.loading import LoadedModel
from silva.models.routing import ReplayedRoutes, Routing
from silva.models.trie import MIN_SHARED, Trie, build
from silva.models.trie_attention import (
    FLEX_MIN_TOKENS,
    FlexTrieAttention,
    TrieAttention,
    chunks,
    shares,
)
from silva.trainer.exact import last_states
from silva.trainer.gradients import read
from silva.trainer.head import LOGIT_BYTES, Head, wide
from silva.trainer.routed import routed_trie
from silva.trainer.walk import TokenHead as WalkHead
from silva.trainer.walk import Walk
from silva.types import Sample


@dataclass(frozen=True)
class Pack:
    """A micro-batch: M unique (token, temperature) to predict, for N trained tokens of its rows."""

    trie: Trie
    tokens: torch.Tensor  # [1, U] int64, of the trie
    positions: torch.Tensor  # [1, U] int64
    predictors: torch.Tensor  # [M] int64: the place in the trie whose hidden state predicts the target
    targets: torch.Tensor  # [M] int64: token ids
    temperatures: torch.Tensor  # [M]
    pairs: torch.Tensor  # [N] int64: which of the M, for each trained token in row-major order
    rows: torch.Tensor  # [N] int64: the row of each trained token
    places: torch.Tensor  # [N] int64: its place in the row, 1 or more
    replay: ReplayedRoutes | None = None  # what the routers of a mixture of experts do

    def replayed(self) -> AbstractContextManager[None]:
        """Around forward and backward passes of the policy: its routers do what they did in sampling."""
        return self.replay.applied() if self.replay is not None else nullcontext()


@dataclass(frozen=True)
class TokenLogprobs:
    """Flat over trained tokens; float32, or float64 for a float64 model."""

    logprobs: torch.Tensor  # [N]
    entropies: torch.Tensor | None  # [N] nats; carry a gradient only if asked; None: not known
    rows: torch.Tensor  # [N] int64


def trained(sample: Sample, stream: str | None = None) -> np.ndarray:
    """[T] bool: the tokens that carry a loss, or those of one stream ("": of the loss that a call names).

    Raises:
        RecordError: a weight is negative or NaN; the sign of a token belongs into its advantage.
    """
    weights = {"": sample.loss_weights, **sample.streams}
    for each in weights.values():
        if len(wrong := each[~(each >= 0)]):
            got = f"got a loss weight of {wrong[0]}, expected 0 or more"
            raise RecordError(f"sample of {sample.trajectory}: {got}")
    if stream is not None:
        return weights[stream] > 0 if stream in weights else np.zeros(len(sample), bool)
    return np.logical_or.reduce([each > 0 for each in weights.values()])


def attention_cost(loaded: LoadedModel) -> float:
    """What a token costs more for each one that it attends to; 1 is what it costs without.

    Of layers with 12 * width ** 2 parameters (Kaplan et al. 2020, arXiv:2001.08361, section 2.1).
    """
    return 1 / (6 * int(loaded.model.config.get_text_config().hidden_size))


def check_rows(loaded: LoadedModel, samples: Sequence[Sample]) -> None:
    """What a model cannot learn from; asked by all ranks of all rows, before the model sees one.

    Raises:
        RecordError: a token is not in the vocabulary (on a GPU it would end the process), or a trained one
            was sampled greedily: at temperature 0 there is no probability that training could change.
    """
    size = loaded.model.config.get_text_config().vocab_size
    for sample in samples:
        if len(wrong := sample.tokens[(sample.tokens < 0) | (sample.tokens >= size)]):
            got = f"got token {wrong[0]}, expected 0 to {size - 1}"
            raise RecordError(f"sample of {sample.trajectory}: {got}")
        chosen = np.flatnonzero(trained(sample))
        if len(greedy := chosen[~(sample.temperatures[chosen] > 0)]):
            where = int(greedy[0])
            raise RecordError(
                f"sample of {sample.trajectory}: token {where} was sampled at temperature "
                f"{float(sample.temperatures[where])}, which cannot be trained; expected more than 0"
            )


IDLE = Sample(
    tokens=np.zeros(2, np.int64),
    loss_weights=np.array([0.0, 1.0], np.float32),
    logprobs=np.zeros(2),
    temperatures=np.ones(2),
    versions=np.full(2, -1),
    trajectory="",
    group="",
)
"""What a rank without rows sends through its part of the model while others need that part."""


def pack(
    loaded: LoadedModel,
    samples: Sequence[Sample],
    *,
    least: int = MIN_SHARED,
    routing: Routing | None = None,
) -> Pack:
    """Merge samples into one trie on the model's device; its trained tokens are those with a loss.

    Args:
        least: shortest prefix of unrelated rows that is shared.
        routing: the routers that replay the routes of the samples.

    Raises:
        RecordError: routes of a sample are missing.
    """
    if routing is None:
        trie, replay = build([sample.tokens for sample in samples], least), None
    else:
        trie, replay = routed_trie(samples, routing, least, loaded.device)
    before, at, rows, places, temperatures = [], [], [], [], []
    for row, (sample, path) in enumerate(zip(samples, trie.rows, strict=True)):
        chosen = np.flatnonzero(trained(sample))  # never 0: a Sample refuses a loss on its first token
        before.append(path[chosen - 1])
        at.append(path[chosen])
        rows.append(np.full(len(chosen), row))
        places.append(chosen)
        temperatures.append(sample.temperatures[chosen])
    targets = np.rec.fromarrays([np.concatenate(at), np.concatenate(temperatures)])
    unique, first, pairs = np.unique(targets, return_index=True, return_inverse=True)

    def moved(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(loaded.device)

    return Pack(
        trie=trie,
        tokens=moved(trie.tokens)[None],
        positions=moved(trie.positions)[None],
        predictors=moved(np.concatenate(before)[first]),
        targets=moved(trie.tokens[unique["f0"]]),
        temperatures=moved(unique["f1"]).to(wide(loaded.dtype)),
        pairs=moved(pairs.reshape(-1)),
        rows=moved(np.concatenate(rows)),
        places=moved(np.concatenate(places)),
        replay=replay,
    )


def token_logprobs(
    loaded: LoadedModel,
    batch: Pack,
    *,
    budget: int | None = None,
    passes: int = 1,
    chunk_bytes: int = LOGIT_BYTES,
    entropy_grad: bool = False,
) -> TokenLogprobs:
    """log p of every trained token, and the entropy of the distribution it was drawn from.

    Args:
        budget: tokens of the trie that may go through the model at once; None: all.
        passes: at least so many go through the model, see `Walk`.
        chunk_bytes: see `Head`.
        entropy_grad: whether entropies take part in the gradient.
    """
    head = Head(loaded, entropy_grad=entropy_grad, chunk_bytes=chunk_bytes)
    logprobs, entropies = through(loaded, batch, head, budget, passes)
    return TokenLogprobs(logprobs, entropies, batch.rows)


def of_hidden(
    loaded: LoadedModel, batch: Pack, hidden: torch.Tensor, *, entropy_grad: bool = False
) -> TokenLogprobs:
    """The same from the last hidden states [U, H] of the trie, which somebody else has computed."""
    head = Head(loaded, entropy_grad=entropy_grad)
    results = head(read(hidden, batch.predictors), batch.targets, batch.temperatures)
    logprobs, entropies = (read(result, batch.pairs) for result in results)
    return TokenLogprobs(logprobs, entropies, batch.rows)


def through(
    loaded: LoadedModel, batch: Pack, head: WalkHead, budget: int | None = None, passes: int = 1
) -> tuple[torch.Tensor, ...]:
    """What `head` makes of the hidden state before every trained token, [N] each; the rest as above."""
    division = loaded.division
    if batch.replay is not None:
        batch.replay.tokens = slice(None)
    if passes > 1 or division.size > 1 or (budget is not None and len(batch.trie) > budget):
        results = Walk(loaded, head, batch, shares(batch.trie, budget, division.size), passes)()
    else:
        results = division.run(lambda: _at_once(loaded, batch, head))
    return tuple(read(result, batch.pairs) for result in results)


def _at_once(loaded: LoadedModel, batch: Pack, head: WalkHead) -> tuple[torch.Tensor, ...]:
    with torch.set_grad_enabled(torch.is_grad_enabled() and not head.frozen):
        hidden = read(_hidden(loaded, batch), batch.predictors)
    return head(hidden, batch.targets, batch.temperatures)


def _hidden(loaded: LoadedModel, batch: Pack) -> torch.Tensor:
    """[U, H]: the last hidden state of every token of the trie."""
    attention = attention_over(loaded, batch.trie)
    return last_states(loaded, batch.tokens, batch.positions, attention)


def attention_over(loaded: LoadedModel, trie: Trie) -> TrieAttention | FlexTrieAttention:
    """Of a trie that goes through the model in one piece."""
    if loaded.flex and len(trie) >= FLEX_MIN_TOKENS:
        return FlexTrieAttention(trie, loaded.device)
    (whole,) = chunks(trie)
    rules = loaded.exact.rules if loaded.exact is not None else None
    return TrieAttention(whole, {}, dtype=loaded.dtype, device=loaded.device, rules=rules)
