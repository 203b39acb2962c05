"""What the local engine knows of a request on its way, and counts of all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from silva.engines.local.kv_cache import CacheRow
from silva.errors import EngineError, OutOfMemory, SilvaError
from silva.models.memory import is_out_of_memory
from silva.protocols import OnTokens, ReadLogits
from silva.routes import after
from silva.types import Completion, CompletionStop, SamplingParams, TokenScores

if TYPE_CHECKING:
    from silva.engines.local.adapted import StepAdapter
    from silva.engines.local.drafts import Lookahead
    from silva.engines.settings import LocalEngineSettings


@dataclass(eq=False)
class EngineRequest:
    """Tokens to be continued, or to be scored from place `score_from` on (0: continued).

    Attributes:
        draft: tokens that are computed in this step as if they had been drawn (drafts.py).
        source: the row that its next token is drawn from; None: its own (following.py).
        lookahead: what may come next (drafts.py).
        computes: nobody else has its text.
        adapter: None: the model alone.
        top: how many of the likeliest tokens its scores tell at each place.
        read: is given the logits of some of the places to be scored, and which place is the first of them.
        failure: why it alone ends without a result.
    """

    prompt: np.ndarray
    params: SamplingParams
    future: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    score_from: int = 0
    top: int = 0
    read: ReadLogits | None = None
    adapter: StepAdapter | None = None
    on_tokens: OnTokens | None = None
    told: int = 0  # tokens that it has heard of
    scores: TokenScores | None = None
    row: CacheRow | None = None
    cached: int = 0
    blocked: tuple[CacheRow, int] | None = None  # waits until this row, now computing, is so far
    cancelled: bool = False
    failure: EngineError | None = None
    stop_reason: CompletionStop | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    draft: list[int] = field(default_factory=list)
    lookahead: Lookahead | None = None
    source: CacheRow | None = None
    computes: bool = False
    routes: np.ndarray | None = None  # [., layers, k], of the experts that its first tokens went to

    @property
    def done(self) -> bool:
        return self.scores is not None or self.stop_reason is not None or self.failure is not None

    @property
    def number(self) -> int:
        """Of its adapter, in the cache."""
        return 0 if self.adapter is None else self.adapter.number

    def tell(self) -> None:
        """What is new since the last time."""
        if self.on_tokens is not None and self.told < len(self.tokens) and not self.cancelled:
            told, self.told = self.told, len(self.tokens)
            self.on_tokens(self.tokens[told:], self.logprobs[told:])

    def result(self) -> Completion | TokenScores:
        if self.scores is not None:
            return self.scores
        assert self.stop_reason is not None
        logprobs = tuple(self.logprobs)
        return Completion(
            tuple(self.tokens),
            logprobs,
            logprobs if self.raw_logprobs == self.logprobs else tuple(self.raw_logprobs),
            tuple(self.entropies),
            tuple(self.versions),
            self.stop_reason,
            self.cached,
            *self._routes(),
        )

    def _routes(self) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Of the reply, and of the prompt."""
        if self.routes is None:
            return None, None
        found, prompt = after(self.routes), len(self.prompt)
        return found[prompt:], found[:prompt]


@dataclass
class EngineStats:
    """Counts since the engine was made.

    `seconds_saved` by drafts is an estimate, from the time that steps without drafts take.
    """

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0  # of replies, but the first ones, which prompts give
    shared_tokens: int = 0  # of these: drawn from what another request has computed
    cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    seconds: float = 0.0
    seconds_saved: float = 0.0


def ids(tokens: Sequence[int]) -> np.ndarray:
    return np.asarray(tokens, np.int64)


def row_of(request: EngineRequest) -> CacheRow:
    assert request.row is not None
    return request.row


def source_of(request: EngineRequest) -> CacheRow:
    """The row that its next token is drawn from."""
    return request.source or row_of(request)


def is_ready(request: EngineRequest) -> bool:
    """Whether that row has computed all of the request's tokens."""
    return source_of(request).computed >= row_of(request).length


def explained(error: Exception, settings: LocalEngineSettings) -> SilvaError:
    """What requests fail with after `error` of a forward pass."""
    if not is_out_of_memory(error):
        return EngineError(f"sampling failed: {type(error).__name__}: {error}")
    first = str(error).partition("\n")[0] or type(error).__name__
    return OutOfMemory(
        "memory ran out while sampling: lower engine.max_concurrent "
        f"(now {settings.max_concurrent}), engine.cached_sequences "
        f"(now {settings.cached_sequences}) or rollout.limits.max_episode_tokens. ({first})"
    )
