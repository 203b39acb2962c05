"""What inference servers hold: the same version and the same weights, those that this client has loaded.

    first request, nothing loaded ──> version, model, probe of all servers: equal?
    load ──> every live server ──> probe: the same text, the same log-probabilities?
    a server comes back ──> current snapshot ──> probe ──> requests

Not here: who is alive and who gets a request (servers.py), and what is said to a server (wire.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from silva.engines.remote.servers import Server, Servers, may_pass
from silva.engines.remote.settings import ClientSettings
from silva.engines.remote.wire import Dialect, Facts
from silva.errors import (
    CapabilityError,
    ConfigError,
    ContextOverflow,
    EngineError,
    ModelError,
    OutOfMemory,
    SilvaError,
)
from silva.protocols import EngineCapabilities
from silva.types import Snapshot, TokenScores
from silva.wire.transport import Peer, Refused, Unreachable

PROBE = tuple(b"The same text gives same numbers")  # 32 ids that every vocabulary has
KINDS: Mapping[str, type[SilvaError]] = {
    "ContextOverflow": ContextOverflow,
    "ModelError": ModelError,
    "OutOfMemory": OutOfMemory,
}
"""Errors of a server that mean the same here."""


class Weights:
    """Attributes:
    servers: those that hold them.
    facts: what each server said when it joined.
    version: of the snapshot that was loaded last, or of what servers hold without one.
    capabilities: those that all servers have; None before `meet`.
    """

    def __init__(
        self,
        peers: Sequence[Peer],
        dialect: Dialect,
        settings: ClientSettings,
        *,
        say: Callable[[str], None],
    ) -> None:
        self.servers = Servers(peers, dialect, settings, join=self._join, say=say)
        self.facts: dict[Server, Facts] = {}
        self.version = 0
        self.capabilities: EngineCapabilities | None = None
        self._dialect, self._settings = dialect, settings
        self._wanted: Snapshot | None = None
        self._reference: TokenScores | None = None  # the probe of the current version

    def meet(self, live: Sequence[Server]) -> None:
        """Take what these servers, the first ones, have in common as what servers must be able to do."""
        self.version = max(server.version for server in live)
        facts = [self.facts[server] for server in live]
        own, context = self._settings.context, min(each.context for each in facts)
        if own > context:
            raise ConfigError(f"engine.context: got {own}, expected at most the servers' {context}")
        self.capabilities = EngineCapabilities(
            own or context,
            all(each.entropies for each in facts),
            frozenset.intersection(*(each.loads for each in facts)),
            all(each.routes for each in facts),
        )

    def agree(self) -> None:
        """See that the live servers hold the same, if nothing was loaded that says what they must hold.

        Raises:
            EngineError: they do not.
        """
        if self._wanted is not None or self._reference is not None:
            return
        live = self.servers.live
        for server in live:
            mine, first = self.facts[server], self.facts[live[0]]
            if (mine.version, mine.model) != (first.version, first.model):
                raise EngineError(
                    f"{live[0]} holds {first.model}, version {first.version}, and {server} holds "
                    f"{mine.model}, version {mine.version}: expected the same of all. "
                    "Start them with the same model, or load the same weights into all of them"
                )
        self._reference = live[0].probe
        for server in live:
            self._compare(server)

    async def load(self, snapshot: Snapshot) -> None:
        """As `HttpEngine.load`."""
        before = self._wanted, self._reference
        self._wanted, self._reference = snapshot, None
        updates = (self._update(server, snapshot) for server in self.servers.live)
        failed = [each for each in await asyncio.gather(*updates, return_exceptions=True) if each is not None]
        if failed:
            self._wanted, self._reference = before
            for server in self.servers.live:
                if server.holds is not self._wanted:  # joins again, with the weights before these
                    self.servers.lose(server, Unreachable(f"{server} holds version {snapshot.version}"))
            raise failed[0]
        live = await self.servers.some()  # those that joined meanwhile have loaded it too
        self._reference = live[0].probe
        for server in live:
            self._compare(server)
        self.version = snapshot.version

    def text(self) -> tuple[int, ...]:
        """What is scored. vLLM samples a token after it."""
        smallest = min(each.context for each in self.facts.values())
        return PROBE[: smallest - 1]

    async def _join(self, server: Server) -> None:
        """Bring a server that answers up to date."""
        server.holds = server.probe = None
        facts = await self._dialect.facts(server.peer, self._settings.timeout)
        self._check_facts(server, facts)
        self.facts[server], server.version, server.given = facts, facts.version, [facts.weights]
        if self._wanted is None:
            server.probe = await self._scored(server)
        while server.holds is not self._wanted:  # a newer one may come while this one is loaded
            assert self._wanted is not None
            await self._bring(server, self._wanted)
        if self._reference is not None:
            self._compare(server)

    def _check_facts(self, server: Server, facts: Facts) -> None:
        """What was promised when the first servers joined, those that join later must keep."""
        if self.capabilities is None:
            return
        promised = self.capabilities
        if facts.context < promised.context:
            raise CapabilityError(
                f"{server} has a context of {facts.context}, expected at least {promised.context}"
            )
        if missing := promised.loads - facts.loads:
            raise CapabilityError(f"{server} does not load {', '.join(sorted(missing))}, as the others do")
        if promised.routes and not facts.routes:
            raise CapabilityError(f"{server} does not record which experts tokens go to, as the others do")
        if self._wanted is None and facts.version != self.version:
            raise EngineError(
                f"{server} holds version {facts.version}, expected {self.version}, and no snapshot is known"
            )
        if (model := next(iter(self.facts.values())).model) != facts.model:
            raise EngineError(f"{server} holds {facts.model}, expected {model}, as the others do")

    async def _update(self, server: Server, snapshot: Snapshot) -> None:
        try:
            await self.servers.run(server, partial(self._bring, server, snapshot))
        except Unreachable as fault:
            self.servers.lose(server, fault, silent=True)
            server.wake.set()
        except Refused as refused:
            if not may_pass(refused):
                raise refusal(refused) from refused
            self.servers.lose(server, refused)
            server.wake.set()

    async def _bring(self, server: Server, snapshot: Snapshot) -> None:
        """Load, and see that these weights are what the server computes with now."""
        server.loads += 1
        try:
            async with server.lock:
                before = server.given[-1]
                if before is not None and snapshot.folder is not None:
                    server.given.append(snapshot.folder.digest)
                try:
                    await self._dialect.load(server.peer, snapshot, self._settings.timeout)
                except Refused:  # it keeps what it had
                    server.given.append(before)
                    raise
                server.holds, server.version = None, snapshot.version
                scores = await self._scored(server)
        finally:
            server.loads += 1
        if scores.version != snapshot.version:
            raise EngineError(
                f"{server} computes with version {scores.version} after version {snapshot.version} was loaded"
            )
        server.holds, server.probe = snapshot, scores

    async def _scored(self, server: Server) -> TokenScores:
        """What the server makes of the probe text."""
        asked = self._dialect.score(server.peer, self.text(), 1, server.version)
        try:
            async with asyncio.timeout(self._settings.timeout):
                answer = await asked
        except TimeoutError:
            raise Unreachable(f"{server}: the probe text was not scored in time") from None
        if not {*answer.weights} <= {server.given[-1]}:
            raise Unreachable(foreign(server))
        return answer.found

    def _compare(self, server: Server) -> None:
        reference, probe = self._reference, server.probe
        assert reference is not None and probe is not None
        pairs = zip(probe.logprobs, reference.logprobs, strict=True)
        apart = max((abs(a - b) for a, b in pairs), default=0.0)
        if not apart <= self._settings.probe_tolerance:
            raise EngineError(
                f"{server} holds other weights than the other servers: log-probabilities of the probe text "
                f"differ by {apart:.3g} at version {probe.version}, expected at most "
                f"{self._settings.probe_tolerance:g} ({self._settings.key('probe_tolerance')})"
            )


def foreign(server: Server) -> str:
    return f"{server} has computed with weights that were not loaded from here: who else loads there?"


def refusal(refused: Refused) -> SilvaError:
    """What a server's refusal means here."""
    return KINDS.get(refused.kind, EngineError)(str(refused))
