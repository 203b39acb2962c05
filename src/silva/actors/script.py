"""Environments that play themselves: their expert, or random play."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from random import Random
from typing import ClassVar

from silva.errors import CapabilityError, contained
from silva.ports import derive
from silva.protocols import Reply, Request, Scripted
from silva.rendering.renderer import Renderer
from silva.types import Segment


class ScriptFault(Exception):
    """The environment raised when it was asked to play itself; the cause is its exception."""


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
        at_random = wrong or Random(derive(seed, "noise")).random() < self.noise
        try:
            with contained():
                reply = environment.random_reply(seed) if at_random else environment.expert_reply()
                text = await reply if isinstance(reply, Awaitable) else reply
            if not isinstance(text, str):
                raise TypeError(f"returned {type(text).__name__}, expected the text of a reply (str)")
            tokens = tuple(self.renderer.script(text.removeprefix(request.prefill), request.tokens))
        except CapabilityError:  # there is no expert in any other episode either
            raise
        except Exception as fault:
            raise ScriptFault("random_reply" if at_random else "expert_reply") from fault
        message = self.renderer.parse(
            tokens, prompt=request.tokens, prefill=request.prefill, tools=request.tools
        )
        segment = Segment("environment" if wrong else "expert", tokens)
        return Reply((segment,), message, "stop_token")
