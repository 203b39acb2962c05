"""Who answers: the policy (through an engine), or an environment's own expert or random play."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import ClassVar

from silva.config.sections import Sampling
from silva.errors import CapabilityError, contained
from silva.ports import derive
from silva.protocols import Engine, Reply, Request, Scripted
from silva.rendering.renderer import Renderer
from silva.rendering.sampling import sample_reply
from silva.types import Completion, SamplingParams, Segment


class ScriptFault(Exception):
    """The environment raised when it was asked to play itself; the cause is its exception."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Samples from an engine."""

    reads_tokens: ClassVar[bool] = True
    engine: Engine
    renderer: Renderer
    sampling: Sampling

    async def reply(self, request: Request) -> Reply:
        prompt, tools, stop = request.tokens, request.tools, tuple(self.sampling.stop)
        params = self._params((*stop, *self.renderer.stop_strings(tools)), request.max_tokens, request.seed)
        sample = partial(self.engine.sample, session=request.session)
        sampled = await sample_reply(sample, self.renderer, prompt, params, stop, tools)
        segment = policy_segment(sampled, len(sampled.tokens), self.sampling.temperature)
        message = self.renderer.parse(
            sampled.tokens, prompt=prompt, prefill=request.prefill, stop=stop, tools=tools
        )
        return Reply((segment,), message, sampled.stop_reason)

    async def sample(
        self, tokens: Sequence[int], stop: tuple[str, ...], max_tokens: int, *, seed: int, session: str
    ) -> Completion:
        """What the engine adds to `tokens`, until a turn ends or one of the strings `stop` is complete."""
        return await self.engine.sample(tokens, self._params(stop, max_tokens, seed), session=session)

    def _params(self, stop: tuple[str, ...], max_tokens: int, seed: int) -> SamplingParams:
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.sampling.temperature,
            top_p=self.sampling.top_p,
            top_k=self.sampling.top_k,
            min_p=self.sampling.min_p,
            stop=stop,
            stop_token_ids=self.renderer.stop_token_ids,
            seed=seed,
        )


def policy_segment(sampled: Completion, count: int, temperature: float) -> Segment:
    """The first `count` tokens that were sampled."""
    return Segment(
        "policy",
        sampled.tokens[:count],
        sampled.logprobs[:count],
        sampled.raw_logprobs[:count],
        sampled.entropies[:count],
        sampled.versions[:count],
        temperature,
    )


@dataclass(frozen=True, slots=True)
class Script:
    """Lets the environment play itself: its expert, with a share of its moves replaced by random ones.

    `noise` counts as the expert's own (1: random play), `mistakes` are played but not to be imitated, so
    they stand in an environment segment.
    """

    reads_tokens: ClassVar[bool] = True

    renderer: Renderer
    mistakes: float = 0.0
    noise: float = 0.0

    async def reply(self, request: Request) -> Reply:
        environment, seed = request.environment, request.seed
        if not isinstance(environment, Scripted):
            raise CapabilityError(
                f"environment {request.label!r} cannot play itself: scripted play ([warm_start], "
                "--policy expert or random) needs expert_reply() and random_reply(seed) on "
                f"{type(environment).__name__}"
            )
        wrong = Random(derive(seed, "mistake")).random() < self.mistakes
        astray = wrong or Random(derive(seed, "noise")).random() < self.noise
        try:
            with contained():
                said = environment.random_reply(seed) if astray else environment.expert_reply()
                text = await said if isinstance(said, Awaitable) else said
            if not isinstance(text, str):
                raise TypeError(f"returned {type(text).__name__}, expected the text of a reply (str)")
            tokens = tuple(self.renderer.script(text.removeprefix(request.prefill), request.tokens))
        except CapabilityError:  # there is no expert in any other episode either
            raise
        except Exception as fault:
            raise ScriptFault("random_reply" if astray else "expert_reply") from fault
        message = self.renderer.parse(
            tokens, prompt=request.tokens, prefill=request.prefill, tools=request.tools
        )
        segment = Segment("environment" if wrong else "expert", tokens)
        return Reply((segment,), message, "stop_token")
