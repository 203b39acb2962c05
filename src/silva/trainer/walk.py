"""A trie that is too large to go through the model at once, chunk by chunk, forwards and back.

    forward    chunk 1 -> 2 -> ... -> n    without a graph but the last one's; keys and values that later
                                           chunks look at stay
    backward   chunk n -> ... -> 2 -> 1    each but the last computed again with a graph; what flows into keys
                                           and values of earlier chunks waits there until their turn

Almost one forward pass more than a trie in one piece; memory is one chunk's activations and the keys and
values of the tokens that have something below them. To autograd the whole walk is one function of the
parameters, so a loss on its results need not know of it.

A model that is divided among ranks takes part in every pass of every rank. So a rank with fewer chunks than
another makes idle passes, of its first chunk, with gradients of zero:

    3 chunks     forward 1, 2, 3         backward 3, 2, 1
    1 chunk      idle, idle, forward 1   backward 1, idle, idle
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from silva.models.loading import LoadedModel
from silva.models.trie_attention import (
    FLEX_MIN_TOKENS,
    Chunk,
    KeyValue,
    SharedContextAttention,
    TrieAttention,
)
from silva.models.ulysses import UlyssesAttention
from silva.trainer.exact import last_states
from silva.trainer.gradients import read
from silva.trainer.randomness import States, set_states, states_of

if TYPE_CHECKING:
    from silva.trainer.policy import Pack


class TokenHead(Protocol):
    """From hidden states [N, H], target tokens [N] and temperatures [N] to results [N] of one type each.

    `frozen`: no gradient goes into the hidden states.
    """

    frozen: bool

    def __call__(
        self, hidden: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor
    ) -> tuple[torch.Tensor, ...]: ...


@dataclass(frozen=True)
class LiveChunk:
    """A chunk with its graph: what came in, its kept pieces' keys and values, the head's results, and a
    hidden state, through which every layer is reached."""

    outside: dict[int, list[KeyValue]]
    found: dict[int, list[KeyValue]]
    results: tuple[torch.Tensor, ...]
    anchor: torch.Tensor


class Walk:
    """One walk over a batch; call it once for the results of its head, [M] each.

    Args:
        chunks: each as the shares of the ranks that take part in its pass.
        passes: through the model, at least one for each chunk: idle ones are added up to them.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        head: TokenHead,
        batch: Pack,
        chunks: Sequence[Sequence[Chunk]],
        passes: int = 1,
    ) -> None:
        self.loaded, self.head, self.batch, self.shares = loaded, head, batch, chunks
        self.chunks = [shares[loaded.division.rank] for shares in chunks]
        self.idle = max(0, passes - len(chunks))
        self.kept: dict[int, list[KeyValue]] = {}  # of each piece that later chunks look at, one a layer
        self.random: list[States] = []
        self.last: LiveChunk | None = None
        # The predicted tokens of a chunk: those whose predictor is in it.
        self.of_chunk = [
            ((batch.predictors >= c.start) & (batch.predictors < c.stop)).nonzero()[:, 0] for c in self.chunks
        ]

    def __call__(self) -> tuple[torch.Tensor, ...]:
        if not torch.is_grad_enabled():
            return self.forward(graph=False)
        return _Walked.apply(torch.zeros((), requires_grad=True), self)  # type: ignore[no-any-return]

    @torch.no_grad()
    def forward(self, *, graph: bool) -> tuple[torch.Tensor, ...]:
        """`graph`: whether `backward` follows."""
        results: tuple[torch.Tensor, ...] = ()
        for _ in range(self.idle):
            self._through(0, {})
        for number in range(len(self.chunks)):
            self.random.append(states_of(self.loaded.device))
            if graph and number == len(self.chunks) - 1:
                self.last = self._live(number)
                found, of_chunk = self.last.found, tuple(part.detach() for part in self.last.results)
            else:
                found, of_chunk, _ = self._through(number, {n: self.kept[n] for n in self._outside(number)})
            results = results or tuple(part.new_zeros(len(self.batch.targets)) for part in of_chunk)
            for whole, part in zip(results, of_chunk, strict=True):
                whole[self.of_chunk[number]] = part
            for piece, layers in found.items():  # a view would keep the whole chunk alive
                self.kept[piece] = [(k.clone(), v.clone()) for k, v in layers]
        return tuple(self.loaded.division.total(part) for part in results)

    def _outside(self, number: int) -> list[int]:
        """Pieces of earlier passes that this pass looks at here."""
        shares = self.shares[number]
        looking = shares if self.loaded.division.ulysses else [self.chunks[number]]
        return sorted({n for share in looking for n in share.outside if n < shares[0].first})

    def backward(self, gradients: Sequence[torch.Tensor]) -> None:
        """Add to the gradients of the parameters what these gradients of the results come to."""
        waiting: dict[int, list[KeyValue]] = {}  # gradients of `kept`
        now = states_of(self.loaded.device)
        for number in reversed(range(len(self.chunks))):
            if (live := self.last) is None:
                set_states(self.random[number], self.loaded.device)
                live = self._live(number)
            self.last = None
            places = self.of_chunk[number]
            flows = list(zip(live.results, (gradient[places] for gradient in gradients), strict=True))
            for piece, layers in live.found.items():
                for pair, into_pair in zip(layers, waiting.pop(piece, ()), strict=False):
                    flows += zip(pair, into_pair, strict=True)
                del self.kept[piece]
            _flow(live, flows)
            for piece, layers in live.outside.items():
                flowing = [(_gradient(k), _gradient(v)) for k, v in layers]
                if piece in waiting:
                    flowing = [
                        (k + more_k, v + more_v)
                        for (k, v), (more_k, more_v) in zip(waiting[piece], flowing, strict=True)
                    ]
                waiting[piece] = flowing
        for _ in range(self.idle):
            _flow(self._live(0), [])
        set_states(now, self.loaded.device)

    def _live(self, number: int) -> LiveChunk:
        outside = {
            n: [(k.detach().requires_grad_(), v.detach().requires_grad_()) for k, v in self.kept[n]]
            for n in self._outside(number)
        }
        with torch.enable_grad():
            return LiveChunk(outside, *self._through(number, outside))

    def _through(
        self, number: int, outside: dict[int, list[KeyValue]]
    ) -> tuple[dict[int, list[KeyValue]], tuple[torch.Tensor, ...], torch.Tensor]:
        """Keys and values of the chunk's kept pieces; the head's results on the tokens that it predicts; the
        first hidden state."""
        return self.loaded.division.run(lambda: self._computed(number, outside))

    def _attention(
        self, number: int, outside: dict[int, list[KeyValue]]
    ) -> TrieAttention | SharedContextAttention | UlyssesAttention:
        loaded, shares = self.loaded, self.shares[number]
        about: Any = {"dtype": loaded.dtype, "device": loaded.device}
        if len(shares) == 1:
            rules = loaded.exact.rules if loaded.exact is not None else None
            return TrieAttention(shares[0], outside, **about, rules=rules)
        division = loaded.division
        if division.ulysses:
            trie = self.batch.trie
            flex = trie if loaded.flex and len(self.shares) == 1 and len(trie) >= FLEX_MIN_TOKENS else None
            return UlyssesAttention(shares, division.rank, outside, division.exchange, flex=flex, **about)
        return SharedContextAttention(shares, division.rank, outside, division.gather, **about)

    def _computed(
        self, number: int, outside: dict[int, list[KeyValue]]
    ) -> tuple[dict[int, list[KeyValue]], tuple[torch.Tensor, ...], torch.Tensor]:
        chunk, batch, places = self.chunks[number], self.batch, self.of_chunk[number]
        attention = self._attention(number, outside)
        own = slice(chunk.start, chunk.stop) if len(chunk) else slice(1)  # any token fills up
        if batch.replay is not None:
            batch.replay.tokens = own
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.head.frozen):
            states = last_states(self.loaded, batch.tokens[:, own], batch.positions[:, own], attention)
        hidden = read(states, batch.predictors[places] - chunk.start)
        results = self.head(hidden, batch.targets[places], batch.temperatures[places])
        found = {n: [pair for _, pair in sorted(layers.items())] for n, layers in attention.found.items()}
        return found, results, states[:1].clone()


def _flow(live: LiveChunk, flows: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Backward of a pass: `flows` are results and their gradients.

    Where none flows it is zero, for a pass that only one of the ranks makes would never end.
    """
    flows = [(x, gradient) for x, gradient in flows if len(x)]
    flows = [pair for pair in (*flows, (live.anchor, torch.zeros_like(live.anchor))) if pair[0].requires_grad]
    if flows:  # a frozen head of a critic has none, on any rank
        torch.autograd.backward([x for x, _ in flows], [gradient for _, gradient in flows])


class _Walked(torch.autograd.Function):
    """The anchor is what makes autograd ask for a gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, walk: Walk) -> tuple[torch.Tensor, ...]:
        ctx.walk = walk
        return walk.forward(graph=True)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.walk.backward(gradients)
        return torch.zeros(()), None


def _gradient(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x) if x.grad is None else x.grad
