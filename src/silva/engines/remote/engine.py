"""An engine whose model runs elsewhere: the client of one or many inference servers.

    sample, score ──> the server with the prefix, else the least loaded ──> answer
                          │ no answer, 5xx: again, another server first, after a pause, `retries` times
                          │ 429, it has enough to do: the same, as often as it takes
                          │ computed with weights that were not loaded from here: the server joins again

    fault                                            what is raised
    prompt too long for the context                  ContextOverflow
    every try of a request failed                    NoReply (of memory: OutOfMemory)
    another status from 400                          EngineError, at once
    no server for `patience` seconds                 EngineError, with the last words of each
    servers that hold different weights              EngineError
    a server that belongs to another run             EngineError
    weights that do not belong to the model          ModelError

The same seed gives the same tokens, so a request may be sent twice. Not here: what servers hold
(weights.py), and processes, which others start and stop.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from silva.engines.remote.servers import Server, may_pass
from silva.engines.remote.settings import ClientSettings
from silva.engines.remote.weights import Weights, foreign, refusal
from silva.engines.remote.wire import Dialect, Facts, ServedResult
from silva.errors import CapabilityError, EngineError, NoReply, OutOfMemory
from silva.ports import derive
from silva.protocols import EngineCapabilities
from silva.types import Completion, SamplingParams, Snapshot, TokenScores
from silva.wire.requests import Requests, Transient
from silva.wire.transport import Peer, Refused, Unreachable

T = TypeVar("T")

TOO_MANY = 429


class HttpEngine:
    """Samples on servers.

    What servers say of themselves is known after `connect`, which the first request calls otherwise.

    Attributes:
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
        self.say = say
        self._settings, self._dialect = settings, dialect
        self._weights = Weights(peers, dialect, settings, say=lambda message: self.say(message))
        self._servers = self._weights.servers
        self._requests = Requests(settings.limits, failed=_failed)

    async def connect(self) -> None:
        """Ask every server what it is; those that do not answer join later.

        Raises:
            EngineError: no server can be used.
        """
        self._servers.start()
        if self._weights.capabilities is not None:
            return
        await self._servers.first_answers()
        if not self._servers.live:
            self.say(f"waiting for an inference server, {self._settings.patience:g} s at most")
        live = await self._servers.some()
        if self._weights.capabilities is None:  # no other request was faster
            self._weights.meet(live)

    async def close(self) -> None:
        """Stop watching the servers, and close all connections."""
        await self._servers.close()

    def reached(self) -> dict[str, Any]:
        """How a trainer in this process reaches the servers: as `trainer.transfer.transfer_of` takes it."""
        servers = [server.peer.again() for server in self._servers.all]
        return {"servers": servers, "patience": self._settings.patience, "timeout": self._settings.timeout}

    @property
    def version(self) -> int:
        """Of the last snapshot that was loaded."""
        return self._weights.version

    @property
    def capabilities(self) -> EngineCapabilities:
        """Those that all servers have."""
        if self._weights.capabilities is None:
            raise EngineError("capabilities: got a question before `connect`, expected it after")
        return self._weights.capabilities

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

    @property
    def probe_tolerance(self) -> float:
        """How far log-probabilities of servers with the same model may differ."""
        return self._settings.probe_tolerance

    @property
    def folders(self) -> bool:
        """Whether requests may name the folder of an adapter."""
        return self._dialect.folders

    async def sample(
        self, tokens: Sequence[int], params: SamplingParams, *, session: str = "", adapter: Path | None = None
    ) -> Completion:
        """Continue `tokens`.

        Args:
            adapter: a folder of one, as PEFT stores it, whose name is its own for ever.

        Raises:
            CapabilityError: servers that take no such adapters.
            ContextOverflow: the prompt leaves no room for a token.
            NoReply: every try failed.
            EngineError: no server can answer, or the request is refused.
        """
        await self.connect()
        self.capabilities.check_prompt(tokens)
        prompt, room = [int(token) for token in tokens], self.capabilities.context - len(tokens)
        asked = dataclasses.replace(params, max_tokens=min(room, params.max_tokens))

        def ask(server: Server) -> Coroutine[Any, Any, ServedResult[Completion]]:
            return self._dialect.sample(server.peer, prompt, asked, server.version, adapter)

        def oldest(found: Completion) -> int:
            return min(found.versions, default=sys.maxsize)

        found = await self._asked(ask, oldest, prompt, session, params.seed)
        if found.stop_reason == "length" and len(found.tokens) < params.max_tokens:
            return dataclasses.replace(found, stop_reason="context_overflow")
        return found

    async def score(
        self, tokens: Sequence[int], start: int, *, adapter: Path | None = None, top: int = 0
    ) -> TokenScores:
        """Log-probabilities (temperature 1) of tokens[start:], start at least 1.

        Args:
            adapter: as of `sample`.
            top: how many of the likeliest tokens are told for each place.

        Raises: as `sample`.
        """
        await self.connect()
        self.capabilities.check_score(tokens, start)
        if start == len(tokens):
            return TokenScores((), (), (), self.version)
        text = [int(token) for token in tokens]

        def ask(server: Server) -> Coroutine[Any, Any, ServedResult[TokenScores]]:
            return self._dialect.score(server.peer, text, start, server.version, adapter, top)

        return await self._asked(ask, lambda found: found.version, text, "", 0)

    async def load(self, snapshot: Snapshot) -> None:
        """Sample from these weights, on every server. One that does not answer gets them when it is back.

        Raises:
            CapabilityError: a snapshot without a folder, or servers that load nothing.
            ModelError: the weights are not those of the folder's digest, or not of this model. Servers keep
                what they had, or get it again.
            EngineError: a server holds other weights after it, or no server answers.
        """
        await self.connect()
        without = snapshot.folder is None and not snapshot.sent
        if without or not self.capabilities.loads:
            got = "a snapshot without a folder" if without else "servers that load nothing"
            raise CapabilityError(f"load: got {got}; other processes share no parameters")
        await self._weights.load(snapshot)

    async def sleep(self) -> None:
        """Every live server gives its memory back until the next request."""
        await self.connect()
        for server in self._servers.live:
            try:
                sleep = partial(self._dialect.sleep, server.peer, self._settings.timeout)
                await self._servers.run(server, sleep)
            except Unreachable:
                server.wake.set()  # nothing else depends on it
            except Refused as refused:
                raise refusal(refused) from refused

    async def _asked(
        self,
        ask: Callable[[Server], Coroutine[Any, Any, ServedResult[T]]],
        oldest: Callable[[T], int],
        tokens: Sequence[int],
        session: str,
        seed: int,
    ) -> T:
        tried: Server | None = None

        async def send() -> T:
            nonlocal tried
            server = tried = await self._servers.choose(tokens, session, tried)
            self._weights.agree()
            try:
                return await self._answered(server, ask, oldest)
            except Unreachable as fault:
                server.wake.set()  # is it still alive?
                raise Transient(str(fault)) from fault
            except Refused as fault:
                if not may_pass(fault):
                    raise refusal(fault) from fault
                raise Transient(str(fault), busy=fault.status == TOO_MANY) from fault

        return await self._requests.call(send, seed=derive(seed, "pause"))

    async def _answered(
        self,
        server: Server,
        ask: Callable[[Server], Coroutine[Any, Any, ServedResult[T]]],
        oldest: Callable[[T], int],
    ) -> T:
        """The answer of a server, if it has computed it with what this client gave it."""
        given, expected = server.given, server.version
        held = max(0, len(given) - (2 if server.loads % 2 else 1))  # a load may not have come so far yet
        answer = await self._servers.run(server, partial(ask, server))
        if not {*answer.weights} <= {*given[held:]}:
            fault = Unreachable(foreign(server))
            if server.live and server.given is given:  # nobody has seen it yet
                self._servers.lose(server, fault)
            raise fault
        if oldest(answer.found) < expected:
            # It was started again after the last check, so these are the weights it started with.
            got = oldest(answer.found)
            raise Unreachable(f"{server} answers with version {got}, expected {expected}")
        return answer.found

    def _known(self, what: str) -> list[Facts]:
        if not self._weights.facts:
            raise EngineError(f"{what}: got a question before `connect`, expected it after")
        return list(self._weights.facts.values())


def _failed(words: str, fault: Transient) -> NoReply | OutOfMemory:
    cause = fault.__cause__
    return (OutOfMemory if isinstance(cause, Refused) and cause.kind == "OutOfMemory" else NoReply)(words)
