"""An engine whose model runs elsewhere: the client of one or many inference servers.

    sample, score ──> the server with the prefix, else the least loaded ──> answer
                          │ no answer, 5xx, 429: again, another server first, after a pause
    load ──> every live server ──> probe: the same text, the same log-probabilities?
    a server comes back ──> current snapshot ──> probe ──> requests

    fault                                            what is raised
    prompt too long for the context                  ContextOverflow
    every try of a request failed                    NoReply (of memory: OutOfMemory)
    another status from 400                          EngineError, at once
    no server for `patience` seconds                 EngineError, with the last words of each
    after a load another version, or other numbers   EngineError
    weights that do not belong to the model          ModelError

The same seed gives the same tokens, so a request may be sent twice. Not here: processes, which others start
and stop.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from silva.engines.http_servers import Server, Servers, may_pass
from silva.engines.http_settings import ClientSettings, HttpEngineSettings
from silva.engines.http_wire import Dialect, Facts, dialect_of
from silva.errors import (
    CapabilityError,
    ConfigError,
    ContextOverflow,
    EngineError,
    ModelError,
    NoReply,
    OutOfMemory,
    SilvaError,
)
from silva.ports import CLOCK, derive, uniform
from silva.protocols import EngineCapabilities
from silva.transport import Peer, Refused, Unreachable
from silva.types import Completion, SamplingParams, Snapshot, TokenScores

T = TypeVar("T")

PROBE = tuple(b"The same text gives same numbers")  # 32 ids that every vocabulary has
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 10.0  # seconds before a request is sent again
KINDS: Mapping[str, type[SilvaError]] = {
    "ContextOverflow": ContextOverflow,
    "ModelError": ModelError,
    "OutOfMemory": OutOfMemory,
}
"""Errors of a server that mean the same here."""


def http_engine(
    settings: HttpEngineSettings, *, vocabulary: int = 0, say: Callable[[str], None] = lambda _: None
) -> HttpEngine:
    """The engine of a configuration.

    Raises:
        ConfigError: the environment variable of the key is not set.
    """
    key = os.environ.get(settings.key_variable, "") if settings.key_variable else ""
    if settings.key_variable and not key:
        raise ConfigError(
            f"engine.key_variable: {settings.key_variable} is not set; set it in the environment or in .env, "
            'or set engine.key_variable = "" if the servers need no key'
        )
    dialect = dialect_of(
        settings.dialect, model=settings.model, vocabulary=vocabulary, top_logprobs=settings.top_logprobs
    )
    peers = [Peer(url, name="inference", key=key) for url in settings.urls]
    return HttpEngine(peers, settings, dialect, say=say)


class HttpEngine:
    """Samples on servers.

    What servers say of themselves is known after `connect`, which the first request calls otherwise.

    Attributes:
        version: of the last snapshot that was loaded.
        say: told when a server is lost and when it is back.

    Args:
        peers: the servers.
        dialect: what they speak.
    """

    def __init__(
        self,
        peers: Sequence[Peer],
        settings: ClientSettings,
        dialect: Dialect,
        *,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.version, self.say = 0, say
        self._settings, self._dialect = settings, dialect
        self._servers = Servers(
            peers, dialect, settings, join=self._join, say=lambda message: self.say(message)
        )
        self._facts: dict[Server, Facts] = {}
        self._capabilities: EngineCapabilities | None = None
        self._wanted: Snapshot | None = None
        self._reference: TokenScores | None = None  # the probe of the current version

    async def connect(self) -> None:
        """Ask every server what it is; those that do not answer join later.

        Raises:
            EngineError: no server can be used.
        """
        self._servers.start()
        if self._capabilities is not None:
            return
        await self._servers.first_answers()
        if not self._servers.live:
            self.say(f"waiting for an inference server, {self._settings.patience:g} s at most")
        live = await self._servers.some()
        if self._capabilities is None:  # no other request was faster
            self.version = max(server.version for server in live)
            facts = [self._facts[server] for server in live]
            own, context = self._settings.context, min(each.context for each in facts)
            if own > context:
                raise ConfigError(f"engine.context: got {own}, expected at most the servers' {context}")
            self._capabilities = EngineCapabilities(
                own or context,
                all(each.entropies for each in facts),
                frozenset.intersection(*(each.loads for each in facts)),
            )

    async def close(self) -> None:
        """Stop watching the servers, and close all connections."""
        await self._servers.close()

    @property
    def capabilities(self) -> EngineCapabilities:
        """Those that all servers have."""
        if self._capabilities is None:
            raise EngineError("capabilities: got a question before `connect`, expected it after")
        return self._capabilities

    @capabilities.setter
    def capabilities(self, capabilities: EngineCapabilities) -> None:
        self._capabilities = capabilities

    @property
    def machine(self) -> Mapping[str, Any]:
        """That of the servers; where they differ, nothing says which of them answers."""
        found = self._known("machine")
        same = all(each.machine == found[0].machine for each in found)
        return found[0].machine if same else {"servers": [dict(each.machine) for each in found]}

    @property
    def notes(self) -> list[str]:
        return list(dict.fromkeys(note for each in self._known("notes") for note in each.notes))

    def memory(self, sequences: int, length: int) -> float:
        return max(each.memory_per_token for each in self._known("memory")) * sequences * length

    def counts(self) -> Mapping[str, float]:
        """Those of all servers, as they told them last."""
        found: Counter[str] = Counter()
        for server in self._servers.all:
            found.update(server.counts)  # type: ignore[arg-type]
        return found

    async def sample(self, tokens: Sequence[int], params: SamplingParams, *, session: str = "") -> Completion:
        """Continue `tokens`.

        Raises:
            ContextOverflow: the prompt leaves no room for a token.
            NoReply: every try failed.
            EngineError: no server can answer, or the request is refused.
        """
        await self.connect()
        if len(tokens) == 0:
            raise EngineError("sample: got an empty prompt, expected at least one token")
        prompt, room = [int(token) for token in tokens], self.capabilities.context - len(tokens)
        if room <= 0:
            raise ContextOverflow(
                f"prompt of {len(tokens)} tokens leaves no room in a context of {self.capabilities.context}"
            )
        asked = dataclasses.replace(params, max_tokens=min(room, params.max_tokens))

        def ask(server: Server) -> Coroutine[Any, Any, Completion]:
            timeout = self._settings.timeout
            return self._dialect.sample(server.peer, prompt, asked, server.version, timeout)

        def oldest(found: Completion) -> int:
            return min(found.versions, default=sys.maxsize)

        found = await self._asked(ask, oldest, prompt, session, params.seed)
        if found.stop_reason == "length" and len(found.tokens) < params.max_tokens:
            return dataclasses.replace(found, stop_reason="context_overflow")
        return found

    async def score(self, tokens: Sequence[int], start: int) -> TokenScores:
        """Log-probabilities (temperature 1) of tokens[start:], start at least 1.

        Raises: as `sample`.
        """
        await self.connect()
        if not 1 <= start <= len(tokens):
            raise EngineError(f"score: start {start} out of range, expected 1 to {len(tokens)}")
        if len(tokens) > self.capabilities.context:
            raise ContextOverflow(
                f"score: got {len(tokens)} tokens, expected at most {self.capabilities.context}"
            )
        if start == len(tokens):
            return TokenScores((), (), (), self.version)
        text = [int(token) for token in tokens]

        def ask(server: Server) -> Coroutine[Any, Any, TokenScores]:
            timeout = self._settings.timeout
            return self._dialect.score(server.peer, text, start, server.version, timeout)

        return await self._asked(ask, lambda found: found.version, text, "", 0)

    async def probe(self) -> TokenScores:
        """What the servers make of the text `PROBE`, from its second token on, with the current weights."""
        await self.connect()
        text = self._text()
        return await self.score(text, 1)

    async def load(self, snapshot: Snapshot) -> None:
        """Sample from these weights, on every server. One that does not answer gets them when it is back.

        Raises:
            CapabilityError: a snapshot without a folder, or servers that load nothing.
            ModelError: the weights are not those of the folder's digest, or not of this model. Servers keep
                what they had, or get it again.
            EngineError: a server holds other weights after it, or no server answers.
        """
        await self.connect()
        if snapshot.folder is None or not self.capabilities.loads:
            got = "a snapshot without a folder" if snapshot.folder is None else "servers that load nothing"
            raise CapabilityError(f"load: got {got}; other processes read weights from folders only")
        before = self._wanted, self._reference
        self._wanted, self._reference = snapshot, None
        updates = (self._update(server, snapshot) for server in self._servers.live)
        failed = [each for each in await asyncio.gather(*updates, return_exceptions=True) if each is not None]
        if failed:
            self._wanted, self._reference = before
            for server in self._servers.live:
                if server.holds is not self._wanted:  # joins again, with the weights before these
                    self._servers.lose(server, Unreachable(f"{server} holds version {snapshot.version}"))
            raise failed[0]
        live = await self._servers.some()  # those that joined meanwhile have loaded it too
        self._reference = live[0].probe
        for server in live:
            self._compare(server)
        self.version = snapshot.version

    async def sleep(self) -> None:
        """Every live server gives its memory back until the next request."""
        await self.connect()
        for server in self._servers.live:
            try:
                await self._servers.run(server, self._dialect.sleep(server.peer, self._settings.timeout))
            except Unreachable:
                server.wake.set()  # nothing else depends on it
            except Refused as refused:
                raise _refusal(refused) from refused

    async def _asked(
        self,
        ask: Callable[[Server], Coroutine[Any, Any, T]],
        oldest: Callable[[T], int],
        tokens: Sequence[int],
        session: str,
        seed: int,
    ) -> T:
        tried: Server | None = None
        fault: Unreachable | Refused | None = None
        for attempt in range(self._settings.retries + 1):
            if attempt:
                longest = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** (attempt - 1))
                share = 0.5 + 0.5 * float(uniform(derive(seed, "pause"), attempt))
                await CLOCK.sleep(longest * share)
            server = await self._servers.choose(tokens, session, tried)
            expected = server.version
            try:
                found = await self._servers.run(server, ask(server))
                if oldest(found) >= expected:
                    return found
                # It was started again after the last check, so these are the weights it started with.
                raise Unreachable(f"{server} answers with version {oldest(found)}, expected {expected}")
            except Unreachable as error:
                fault = error
                server.wake.set()  # is it still alive?
            except Refused as error:
                if not may_pass(error):
                    raise _refusal(error) from error
                fault = error
            tried = server
        tries = f"{attempt + 1} {'tries' if attempt else 'try'}"
        kind = OutOfMemory if isinstance(fault, Refused) and fault.kind == "OutOfMemory" else NoReply
        raise kind(f"{fault} (after {tries})") from fault

    async def _join(self, server: Server) -> None:
        """Bring a server that answers up to date."""
        server.holds = server.probe = None
        facts = await self._dialect.facts(server.peer, self._settings.timeout)
        self._check_facts(server, facts)
        self._facts[server], server.version = facts, facts.version
        while server.holds is not self._wanted:  # a newer one may come while this one is loaded
            assert self._wanted is not None
            await self._bring(server, self._wanted)
        if self._reference is not None:
            self._compare(server)

    def _check_facts(self, server: Server, facts: Facts) -> None:
        """What was promised when the first servers joined, those that join later must keep."""
        if self._capabilities is None:
            return
        promised = self._capabilities
        if facts.context < promised.context:
            raise CapabilityError(
                f"{server} has a context of {facts.context}, expected at least {promised.context}"
            )
        if missing := promised.loads - facts.loads:
            raise CapabilityError(f"{server} does not load {', '.join(sorted(missing))}, as the others do")
        if self._wanted is None and facts.version != self.version:
            raise EngineError(
                f"{server} holds version {facts.version}, expected {self.version}, and no snapshot is known"
            )

    async def _update(self, server: Server, snapshot: Snapshot) -> None:
        try:
            await self._servers.run(server, self._bring(server, snapshot))
        except Unreachable as fault:
            self._servers.lose(server, fault, silent=True)
            server.wake.set()
        except Refused as refused:
            if not may_pass(refused):
                raise _refusal(refused) from refused
            self._servers.lose(server, refused)
            server.wake.set()

    async def _bring(self, server: Server, snapshot: Snapshot) -> None:
        """Load, and see that these weights are what the server computes with now."""
        server.loads += 1
        try:
            async with server.lock:
                await self._dialect.load(server.peer, snapshot, self._settings.timeout)
                server.holds, server.version = None, snapshot.version
                text = self._text()
                scores = await self._dialect.score(
                    server.peer, text, 1, snapshot.version, self._settings.timeout
                )
        finally:
            server.loads += 1
        if scores.version != snapshot.version:
            raise EngineError(
                f"{server} computes with version {scores.version} after version {snapshot.version} was loaded"
            )
        server.holds, server.probe = snapshot, scores

    def _compare(self, server: Server) -> None:
        reference, probe = self._reference, server.probe
        assert reference is not None and probe is not None
        pairs = zip(probe.logprobs, reference.logprobs, strict=True)
        apart = max((abs(a - b) for a, b in pairs), default=0.0)
        if not apart <= self._settings.probe_tolerance:
            raise EngineError(
                f"{server} holds other weights than the other servers: log-probabilities of the probe text "
                f"differ by {apart:.3g} at version {probe.version}, expected at most "
                f"{self._settings.probe_tolerance:g} (engine.probe_tolerance)"
            )

    def _text(self) -> tuple[int, ...]:
        """vLLM samples a token after it."""
        smallest = min(each.context for each in self._facts.values())
        return PROBE[: smallest - 1]

    def _known(self, what: str) -> list[Facts]:
        if not self._facts:
            raise EngineError(f"{what}: got a question before `connect`, expected it after")
        return list(self._facts.values())


def _refusal(refused: Refused) -> SilvaError:
    return KINDS.get(refused.kind, EngineError)(str(refused))
