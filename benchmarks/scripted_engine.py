"""An engine without a model: canned replies at once, for tests of what stands around an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from silva.errors import ContextOverflow
from silva.protocols import EngineCapabilities, OnTokens
from silva.types import Completion, CompletionStop, SamplingParams, Snapshot, TokenScores


class ScriptedEngine:
    """Answers `reply(prompt, params)` up to a stop token; each token counts as certain (log-probability 0).

    Attributes:
        requests: every call so far: prompt, parameters and session.

    Args:
        reply: the tokens of an answer; more than `params.max_tokens` are cut off.
        context: tokens of prompt and answer together.
    """

    def __init__(
        self, reply: Callable[[Sequence[int], SamplingParams], Sequence[int]], *, context: int = 1 << 20
    ) -> None:
        self.version = 0
        self.capabilities = EngineCapabilities(context=context)
        self.requests: list[tuple[tuple[int, ...], SamplingParams, str]] = []
        self._reply = reply
        self.machine: Mapping[str, Any] = {}
        self.notes: Sequence[str] = ()

    async def sample(self, tokens: Sequence[int], params: SamplingParams, *, session: str = "") -> Completion:
        self.requests.append((tuple(tokens), params, session))
        await asyncio.sleep(0)
        context = self.capabilities.context
        if len(tokens) >= context:
            raise ContextOverflow(f"prompt of {len(tokens)} tokens in a context of {context}")
        most = min(context - len(tokens), params.max_tokens)
        reply = tuple(self._reply(tokens, params))[:most]
        stop: CompletionStop = "length" if most == params.max_tokens else "context_overflow"
        ends = [i for i, token in enumerate(reply) if token in params.stop_token_ids]
        if ends:
            reply, stop = reply[: ends[0] + 1], "stop_token"
        zeros = (0.0,) * len(reply)
        return Completion(reply, zeros, zeros, zeros, (self.version,) * len(reply), stop)

    async def stream(self, tokens: Sequence[int], params: SamplingParams, on_tokens: OnTokens) -> Completion:
        """What `sample` answers, token by token."""
        found = await self.sample(tokens, params)
        for token, logprob in zip(found.tokens, found.logprobs, strict=True):
            on_tokens([token], [logprob])
            await asyncio.sleep(0)
        return found

    async def score(self, tokens: Sequence[int], start: int) -> TokenScores:
        zeros = (0.0,) * (len(tokens) - start)
        return TokenScores(zeros, tuple(tokens[start:]), zeros, self.version)

    async def load(self, snapshot: Snapshot) -> None:
        self.version = snapshot.version

    async def sleep(self) -> None:
        pass

    def memory(self, sequences: int, length: int) -> float:
        return 0.0

    def counts(self) -> Mapping[str, float]:
        return {}
