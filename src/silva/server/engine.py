"""The engine and the renderer behind the routes: how much they may be asked at once, and for how long.

    request ──admitted?──> engine.sample, once a completion ──> results, in order
               429           └─ the client goes away: cancelled, which frees the engine's places

Not here: the form of requests and answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar, runtime_checkable

from starlette.types import Receive

from silva.aio import first, gather
from silva.errors import ContextOverflow, ModelError, SilvaError
from silva.ports import CLOCK
from silva.protocols import Engine, Streaming
from silva.rendering.renderer import Renderer
from silva.rendering.sampling import Sample, sample_reply
from silva.server.prometheus import ServerCounts
from silva.types import Completion, Message, SamplingParams, Snapshot, TokenScores, ToolSpec
from silva.wire.guard import HttpError

INLINE = 1 << 16  # bytes, or as much work, that the event loop does itself
CHARACTERS = 32  # of a text, for each token of the context; longer texts are refused before they are split
GONE = 499  # as in nginx: no client is left to read the answer
P = ParamSpec("P")
T = TypeVar("T")
LEASE = 10.0  # seconds without a sign of life, after which the owner of the weights has lost them


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Limits of one server."""

    waiting: int = 2048
    """Completions and scorings asked for at once."""
    tokens: int = 1 << 24
    """Tokens of their prompts together."""
    health_seconds: float = 10.0
    """In which a token must come, for the engine to count as healthy."""
    folders: tuple[Path, ...] = ()
    """Weights are loaded from folders inside these only; empty: from any."""


@runtime_checkable
class Countable(Protocol):
    """An engine that says how many of its requests are being computed."""

    @property
    def running(self) -> int: ...


class Listener(Protocol):
    """Hears of completions while they are sampled. `number`: the place of one in its request."""

    def tokens(self, number: int, tokens: Sequence[int], logprobs: Sequence[float]) -> None: ...
    def end(self, number: int, completion: Completion) -> None: ...


class Service:
    """One engine, shared by all requests.

    Attributes:
        counts: for `/metrics`.
        asked: completions and scorings asked for and not answered yet.
        held: names of the weights so far, the newest last: the digest of a folder that was loaded, or that of
            what the engine began with. From the beginning of a load on, answers may be of either.
    """

    def __init__(self, engine: Engine, renderer: Renderer, limits: ServerLimits) -> None:
        self.engine, self.renderer, self.limits = engine, renderer, limits
        self.counts = ServerCounts()
        self.asked = 0
        self._held = 0  # tokens of their prompts
        self._proved = 0.0  # when the last token came
        self._probe: asyncio.Task[dict[str, Any]] | None = None
        self.held = [f"start-{secrets.token_hex(8)}"]
        self._weights = asyncio.Lock()
        self._owner, self._heard, self._sign = "", 0.0, asyncio.Event()

    @property
    def running(self) -> int:
        """Those among `asked` that the engine computes."""
        return min(self.asked, self.engine.running) if isinstance(self.engine, Countable) else self.asked

    @property
    def context(self) -> int:
        """Tokens of a prompt and its answer together."""
        return self.engine.capabilities.context

    def shown(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        """A dialogue as tokens; errors as of `tokens_of`."""
        return self.tokens_of(self.renderer.context(messages, tools))

    def tokens_of(self, prompt: str | Sequence[int]) -> list[int]:
        """A prompt as tokens that the model knows and that leave room for an answer.

        Raises:
            HttpError: an empty prompt, or a token that does not exist.
            ContextOverflow: there is no room.
        """
        context = self.engine.capabilities.context
        if isinstance(prompt, str):
            if len(prompt) > CHARACTERS * context:
                raise self._too_long(f"a prompt of {len(prompt)} characters")
            tokens = self.renderer.encode(prompt)
        else:
            tokens = self.known(prompt)
        if len(tokens) >= context:
            raise self._too_long(f"a prompt of {len(tokens)} tokens")
        if not tokens:
            raise HttpError(400, "prompt: got an empty prompt, expected at least one token")
        return tokens

    def known(self, tokens: Sequence[int], where: str = "prompt") -> list[int]:
        """The tokens, all of which the model knows."""
        size = self.renderer.vocabulary
        for token in (min(tokens, default=0), max(tokens, default=0)):
            if not 0 <= token < size:
                raise HttpError(400, f"{where}: got the token {str(token)[:24]}, expected 0 to {size - 1}")
        return list(tokens)

    def _too_long(self, got: str) -> ContextOverflow:
        context = self.engine.capabilities.context
        return ContextOverflow(f"{got} leaves no room in a context of {context} tokens")

    async def sample(
        self,
        receive: Receive,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        live: Listener | None = None,
        *,
        stop: Sequence[str] = (),
        tools: Sequence[ToolSpec] = (),
    ) -> list[Completion]:
        """A completion of each prompt, in order; all are cancelled if the client goes away.

        Args:
            live: hears of tokens as they are sampled, if the engine can tell, and of the end of each.
            stop, tools: as of `sample_reply`, for replies in a chat.

        Raises:
            HttpError: too much is asked at once, or the client is gone.
            SilvaError: of the engine.
        """
        with self._admitted(len(prompts), sum(map(len, prompts))):
            asked = [
                partial(self._sample, number, *each, live, stop, tools)
                for number, each in enumerate(zip(prompts, params, strict=True))
            ]
            return await unless_gone(receive, gather(each() for each in asked))

    async def score(
        self, receive: Receive, sequences: Sequence[Sequence[int]], start: int
    ) -> list[TokenScores]:
        """What the model makes of tokens[start:] of each; otherwise as `sample`."""
        with self._admitted(len(sequences), sum(map(len, sequences))):
            asked = [partial(self.engine.score, tokens, start) for tokens in sequences]
            scores = await unless_gone(receive, gather(each() for each in asked))
        self.counts.add("scored_tokens", sum(len(each.logprobs) for each in scores))
        return scores

    async def _sample(
        self,
        number: int,
        tokens: Sequence[int],
        params: SamplingParams,
        live: Listener | None,
        stop: Sequence[str],
        tools: Sequence[ToolSpec],
    ) -> Completion:
        sample: Sample = self.engine.sample
        if live is not None and isinstance(self.engine, Streaming):
            sample = partial(self.engine.stream, on_tokens=partial(live.tokens, number))
        found = await sample_reply(sample, self.renderer, tokens, params, stop, tools)
        self._proved = CLOCK.monotonic()
        self.counts.add("prompt_tokens", len(tokens))
        self.counts.add("cached_prompt_tokens", found.cached_tokens)
        self.counts.add("completion_tokens", len(found.tokens))
        if live is not None:
            live.end(number, found)
        return found

    def check_size(self, count: int, tokens: int) -> None:
        """Refuse what could never be admitted: so many completions, of prompts of so many tokens together."""
        for got, most, what in (
            (count, self.limits.waiting, "completions"),
            (tokens, self.limits.tokens, "tokens of prompts"),
        ):
            if got > most:
                raise HttpError(400, f"asks for {got} {what} at once, expected at most {most}")

    @contextlib.contextmanager
    def _admitted(self, count: int, tokens: int) -> Iterator[None]:
        self.check_size(count, tokens)
        limits = self.limits
        if self.asked + count > limits.waiting or self._held + tokens > limits.tokens:
            raise HttpError(
                429,
                f"the server has {self.asked} completions on its list; try again later",
                code="rate_limit_exceeded",
                headers={"retry-after": "1"},
            )
        self.asked += count
        self._held += tokens
        try:
            yield
        finally:
            self.asked -= count
            self._held -= tokens

    async def load(self, make: Callable[[], Snapshot], owner: str = "") -> int:
        """Load the weights that `make` names (it may take long); loads come one after the other.

        Returns:
            The version.

        Raises:
            HttpError: the weights belong to another owner, who is alive.
        """
        self.heard_of(owner)
        async with self._weights:
            await self._take_over(owner)
            try:
                snapshot = await asyncio.to_thread(make)
                assert snapshot.folder is not None
                with self._changing(snapshot.folder.digest):
                    await self.engine.load(snapshot)
            except SilvaError:
                raise
            except OSError as error:
                raise ModelError(f"the weights cannot be read: {error}") from error
            return self.engine.version

    async def begin_again(self, load: Callable[[], Awaitable[None]]) -> None:
        """Load what the engine began with."""
        async with self._weights:
            await self._take_over("")
            with self._changing(self.held[0]):
                await load()

    @contextlib.contextmanager
    def _changing(self, name: str) -> Iterator[None]:
        before = self.held[-1]
        self.held.append(name)
        try:
            yield
        except Exception:  # the engine keeps what it had
            self.held.append(before)
            raise

    def heard_of(self, owner: str) -> None:
        """Whoever asks on behalf of `owner` is alive."""
        if owner and owner == self._owner:
            self._heard = CLOCK.monotonic()
            self._sign.set()

    async def _take_over(self, owner: str) -> None:
        """From now on the weights are `owner`'s, unless another owner gives a sign of life in time."""
        if self._owner not in ("", owner):
            self._sign.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._heard + LEASE - CLOCK.monotonic()):
                    await self._sign.wait()
                raise HttpError(
                    409,
                    f"this server's weights belong to {self._owner}, which is alive: stop it, "
                    "or start another server",
                    code="in_use",
                )
        self._owner, self._heard = owner, CLOCK.monotonic()

    async def health(self) -> dict[str, Any]:
        """Samples one token; all who ask at the same time share it.

        Raises:
            HttpError: 503, with the reason.
        """
        if self._probe is None or self._probe.done():
            self._probe = asyncio.ensure_future(self._sample_one())
            self._probe.add_done_callback(lambda probe: probe.cancelled() or probe.exception())
        return await asyncio.shield(self._probe)

    async def _sample_one(self) -> dict[str, Any]:
        began, limit = CLOCK.monotonic(), self.limits.health_seconds
        prompt = [self.renderer.stop_token_ids[0]]
        try:
            async with asyncio.timeout(limit):
                await self.engine.sample(prompt, SamplingParams(max_tokens=1, temperature=0.0))
        except TimeoutError:
            # An engine whose places are all taken answers the probe late, and still gives tokens to others.
            if self._proved < began:
                reason = f"no token within {limit:g} s ({self.asked} completions on the list)"
                raise HttpError(503, reason, code="unhealthy", headers={"retry-after": "1"}) from None
        except SilvaError as error:
            raise HttpError(503, f"{type(error).__name__}: {error}", code="unhealthy") from error
        seconds = CLOCK.monotonic() - began
        return {"status": "ok", "version": self.engine.version, "seconds": seconds}


async def apart(size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`work(...)`, in a thread if its `size` is such that the event loop would stand still."""
    if size <= INLINE:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled if the client goes away first."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    if (done := await first(work, gone())) is None:
        raise HttpError(GONE, "the client went away")
    return done.result()
