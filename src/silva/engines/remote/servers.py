"""Inference servers that share the requests: who is alive, who gets what.

    check ──> answers ──> join (facts, current weights) ──> live ──> requests
      ^          │                    │ fails                 │ no answer, another process, another version
      └──────────┴──── out, with its last words <─────────────┘ its requests are cancelled and go to others

A task per server asks "are you alive?", also while requests run and weights are loaded. A server that is out
joins again when it answers; what joining means is the caller's (weights.py). A server gets no more
requests at once than this process may have connections; the others wait here. Not here: what is said to a
server (wire.py), and how often a request is sent again (engine.py).
"""

from __future__ import annotations

import asyncio
import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from silva.aio import cancelled, first
from silva.engines.remote.settings import ClientSettings
from silva.engines.remote.wire import Dialect, Pulse
from silva.errors import EngineError
from silva.ports import CLOCK
from silva.types import Snapshot, TokenScores
from silva.wire.transport import Peer, Refused, Unreachable, open_files

T = TypeVar("T")

SESSIONS, PREFIXES = 1 << 14, 1 << 16  # remembered by the router
FIRST_PREFIX = 64  # tokens; longer ones are looked at in doubled lengths
UNEVEN = 16  # requests by which the server with the prefix may be ahead of the least loaded one
AT_ONCE = 2048  # requests to a server; fewer if the process may open fewer files
CORE = 2.0  # times `dead_after`: a vLLM core answers only between two of its steps
LONGEST_REST = 30.0  # seconds between tries to join of a server that answers and fails at it


class Server:
    """One server, as the client knows it.

    Attributes:
        live: requests may go there.
        version: of its weights.
        holds: the snapshot that this client loaded there since it joined; None: no one.
        given: what its weights are called (`Pulse.weights`), since it joined: at first what it had, then what
            this client has loaded, from the beginning of the load on.
        counts: what it has done so far, as it said last.
        probe: what it makes of the probe text, with those weights.
        words: why it is out, or the last fault.
        refusal: it answers, and cannot be used.
        running, sent: requests now and so far.
        loads: begun and ended loads, so odd while one runs.
        progressed: when it was last seen to compute, or to answer.
    """

    def __init__(self, number: int, peer: Peer) -> None:
        self.number, self.peer = number, peer
        self.live, self.version = False, 0
        self.holds: Snapshot | None = None
        self.given: list[str | None] = [None]
        self.probe: TokenScores | None = None
        self.words = "not asked yet"
        self.refusal: Exception | None = None
        self.process: Any = None
        self.counts: Mapping[str, float] = {}
        self.running = self.sent = self.loads = self.failures = 0
        self.heard = self.lost_at = self.join_at = self.progressed = 0.0
        self.was_live = False
        self.bind()

    def bind(self) -> None:
        """Everything that belongs to an event loop, for the one that runs now or next."""
        self.lock = asyncio.Lock()  # one load at a time
        self.wake = asyncio.Event()  # check now
        self.checked = asyncio.Event()  # it has joined, or is out for a reason
        self.places = asyncio.Semaphore(AT_ONCE)
        self.lost: asyncio.Future[None] | None = None
        self.joining: asyncio.Task[None] | None = None
        self.running = 0
        self.loads += self.loads % 2

    def __str__(self) -> str:
        return f"{self.peer.name} at {self.peer.address}"


class Router:
    """Which server has the keys and values of a prompt's beginning. A guess: it saw what was sent where."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[str, Server] = OrderedDict()
        self._prefixes: OrderedDict[bytes, Server] = OrderedDict()

    def choose(self, servers: Sequence[Server], tokens: Sequence[int], session: str) -> Server:
        """The server of the session; else the one that has seen at least half of the prompt, unless it is
        much busier; else the least loaded. `servers` are those that may be taken, at least one."""
        least = min(servers, key=lambda server: (server.running, server.sent, server.number))
        prefixes = _prefixes(tokens)
        chosen = self._sessions.get(session) if session else None
        if chosen not in servers:
            # The longest prefix that is looked at is more than half of the prompt.
            chosen = self._prefixes.get(prefixes[-1]) if prefixes else None
            if chosen not in servers or chosen is None or chosen.running > least.running + UNEVEN:
                chosen = least
        assert chosen is not None
        if session:
            _remember(self._sessions, session, chosen, SESSIONS)
        for prefix in prefixes:
            _remember(self._prefixes, prefix, chosen, PREFIXES)
        return chosen

    def forget(self, server: Server) -> None:
        """Its cache is gone, or will be."""
        _forget(self._sessions, server)
        _forget(self._prefixes, server)


def _prefixes(tokens: Sequence[int]) -> list[bytes]:
    """Digests of the first 64, 128, 256, ... tokens."""
    digest, found, end = hashlib.blake2b(digest_size=16), [], FIRST_PREFIX
    while end <= len(tokens):
        begin = end // 2 if end > FIRST_PREFIX else 0
        digest.update(array("q", tokens[begin:end]).tobytes())
        found.append(digest.digest())
        end *= 2
    return found


def _remember(known: OrderedDict[Any, Server], key: Any, server: Server, most: int) -> None:
    known[key] = server
    known.move_to_end(key)
    if len(known) > most:
        known.popitem(last=False)


def _forget(known: OrderedDict[Any, Server], server: Server) -> None:
    for key in [key for key, value in known.items() if value is server]:
        del known[key]


class Servers:
    """Keeps watch over servers and gives requests to those that live. One event loop at a time.

    Args:
        join: brings a server that answers up to date; after it, requests go there.
        say: told when a server is lost and when it is back.
    """

    def __init__(
        self,
        peers: Sequence[Peer],
        dialect: Dialect,
        settings: ClientSettings,
        *,
        join: Callable[[Server], Awaitable[None]],
        say: Callable[[str], None],
    ) -> None:
        if not peers:
            raise EngineError("got no inference server, expected at least one")
        self.all = [Server(number, peer) for number, peer in enumerate(peers)]
        self._dialect, self._settings, self._join, self._say = dialect, settings, join, say
        self._router = Router()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watches: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()

    @property
    def live(self) -> list[Server]:
        return [server for server in self.all if server.live]

    def start(self) -> None:
        """Begin to watch, once in each event loop."""
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        self._loop, self._changed = loop, asyncio.Event()
        share = open_files() // 2 // len(self.all)  # the other half is for episodes
        for server in self.all:
            server.bind()
            server.places = asyncio.Semaphore(max(1, min(AT_ONCE, share)))
            server.lost = loop.create_future()
        self._watches = [loop.create_task(self._watch(server)) for server in self.all]

    async def close(self) -> None:
        """Stop watching and close all connections."""
        tasks = self._watches + [server.joining for server in self.all if server.joining is not None]
        if self._loop is asyncio.get_running_loop():
            await cancelled(tasks)
        self._loop, self._watches = None, []
        for server in self.all:
            await server.peer.close()

    async def first_answers(self) -> None:
        """Wait until each server has joined or is known to be out, `patience` seconds at most."""
        waiting = [asyncio.ensure_future(server.checked.wait()) for server in self.all]
        try:
            await asyncio.wait(waiting, timeout=self._settings.patience)
        finally:
            for each in waiting:
                each.cancel()

    async def some(self) -> list[Server]:
        """The servers that live, as soon as there are any.

        Raises:
            EngineError: all of them refuse to be used, or none answers for `patience` seconds.
        """
        patience = self._settings.patience
        try:
            async with asyncio.timeout(patience):
                while not (live := self.live):
                    if all(server.refusal is not None for server in self.all):
                        raise EngineError(f"no inference server can be used. {self._all_words()}")
                    self._changed.clear()
                    await self._changed.wait()
                return live
        except TimeoutError:
            raise EngineError(
                f"no inference server for {patience:g} s ({self._settings.key('patience')}). "
                f"{self._all_words()}"
            ) from None

    async def choose(self, tokens: Sequence[int], session: str, avoid: Server | None = None) -> Server:
        """The server for a request, one other than `avoid` if there is another."""
        live = await self.some()
        others = [server for server in live if server is not avoid]
        return self._router.choose(others or live, tokens, session)

    async def run(self, server: Server, ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of a request to `server`.

        Raises:
            Unreachable: the server was lost, or has neither answered anybody nor computed anything for
                `timeout` seconds. A request that only waits for its turn takes as long as it takes.
        """
        assert server.lost is not None
        server.running, server.sent = server.running + 1, server.sent + 1
        task, began = asyncio.ensure_future(_in_turn(server, ask)), CLOCK.monotonic()
        both: set[asyncio.Future[Any]] = {task, server.lost}
        try:
            while True:
                left = max(began, server.progressed) + self._settings.timeout - CLOCK.monotonic()
                await asyncio.wait(both, timeout=max(0.0, left), return_when=asyncio.FIRST_COMPLETED)
                if task.done():
                    server.progressed = CLOCK.monotonic()
                    return task.result()
                if server.lost.done():
                    raise Unreachable(server.words)
                if left <= 0:
                    raise Unreachable(
                        f"{server}: no answer, and nothing computed there for {self._settings.timeout:g} s "
                        f"({self._settings.key('timeout')})"
                    )
        finally:
            server.running -= 1
            if not task.done():
                await cancelled([task])  # closes the connection, which tells the server to stop

    def lose(self, server: Server, fault: Exception, *, silent: bool = False) -> None:
        """Take a server out, because of `fault`. `silent`: it gave no answer."""
        server.words, server.refusal = str(fault), None if may_pass(fault) else fault
        if server.joining is not None:
            server.joining.cancel()
        if server.live:
            server.live, server.lost_at = False, CLOCK.monotonic()
            self._router.forget(server)
            if server.lost is not None and not server.lost.done():
                server.lost.set_result(None)
            why = (
                f"does not answer ({server.lost_at - server.heard:.1f} s)" if silent else f"is out ({fault})"
            )
            then = "its requests go to others" if self.live else "requests wait until it is back"
            self._say(f"{server} {why}: {then}")
        server.checked.set()
        self._changed.set()

    async def _watch(self, server: Server) -> None:
        while True:
            server.wake.clear()
            await self._check(server)
            await first(CLOCK.sleep(self._settings.check_every), server.wake.wait())

    async def _check(self, server: Server) -> None:
        loads, began, patience = server.loads, CLOCK.monotonic(), self._settings.dead_after
        core = 0.0 if loads % 2 else CORE * patience  # what loads weights answers nobody
        try:
            pulse = await self._dialect.alive(server.peer, patience, core)
        except Exception as fault:  # whatever it is: a watch that ends would leave everybody waiting
            if CLOCK.monotonic() - began > 1.5 * (patience + core):
                return  # this process slept or was busy, and may have missed the answer
            if core and server.loads != loads:
                return  # a load has begun meanwhile
            self.lose(server, fault, silent=isinstance(fault, Unreachable))
            return
        server.heard = CLOCK.monotonic()
        if server.live and (stale := _stale(server, pulse, loads)):
            self.lose(server, Unreachable(stale))
        if pulse.computes or pulse.counts != server.counts:
            server.progressed = server.heard
        server.process, server.counts = pulse.process, pulse.counts
        if not server.live and server.joining is None and server.heard >= server.join_at:
            server.joining = asyncio.ensure_future(self._joined(server))

    async def _joined(self, server: Server) -> None:
        try:
            await self._join(server)
        except Exception as fault:
            server.failures += 1
            server.join_at = CLOCK.monotonic() + min(LONGEST_REST, 2.0 ** (server.failures - 1))
            server.joining = None
            if not may_pass(fault) and str(fault) != server.words:
                self._say(f"{server} cannot be used: {fault}")
            self.lose(server, fault)
        else:
            self._take_in(server)
        finally:
            server.joining = None

    def _take_in(self, server: Server) -> None:
        server.live, server.refusal, server.failures, server.join_at = True, None, 0, 0.0
        server.lost = asyncio.get_running_loop().create_future()
        if server.was_live:
            gone = CLOCK.monotonic() - server.lost_at
            self._say(f"{server} is back after {gone:.1f} s, with version {server.version}")
        server.was_live = True
        server.checked.set()
        self._changed.set()

    def _all_words(self) -> str:
        return "; ".join(server.words for server in self.all)


async def _in_turn(server: Server, ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
    async with server.places:
        return await ask()


def may_pass(fault: Exception) -> bool:
    """Whether the same request may succeed later."""
    if isinstance(fault, Refused):
        return fault.status >= 500 or fault.status == 429
    return isinstance(fault, Unreachable)


def _stale(server: Server, pulse: Pulse, loads: int) -> str:
    """Why a server that answers has no longer what this client gave it; "" if it has."""
    if server.process != pulse.process and server.process is not None:
        return f"{server} was started again"
    loading = server.loads % 2 == 1 or server.loads != loads
    if loading:
        return ""
    if pulse.version not in (None, server.version):
        return f"{server} holds version {pulse.version}, expected {server.version}"
    if pulse.weights not in (None, server.given[-1]):
        return f"{server} holds other weights as version {pulse.version} than this client has loaded there"
    return ""
