"""A trainer behind HTTP: one at a time, built for the orchestrator that opens it.

    POST /open ──> session ──> POST /sessions/SESSION ──> answer              one call at a time
    GET /alive                 answers from the event loop, also while the trainer computes

The bodies are those of trainer/remote.py. What a trainer computes cannot be cut short: if the client goes
away, the call ends first and the next one waits. Not here: how a trainer is built, keys and sizes of bodies
(wire/guard.py), and retries: a trainer whose session is lost is opened again and loads a checkpoint.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from silva import __version__
from silva.errors import CapabilityError, CheckpointError, ConfigError, PartLost
from silva.ports import CLOCK
from silva.protocols import Trainer, TrainerCapabilities
from silva.storage.checkpoints import disk_faults
from silva.storage.run_folder import holder
from silva.trainer.remote import Open, Opened, ServedTrainer
from silva.wire import rpc
from silva.wire.codec import decode, encode
from silva.wire.guard import Application

MAX_BODY = 4 << 30
"""Bytes of one call: all samples of an update with their arrays."""
BODY_SECONDS = 600.0
TAKES = "application/octet-stream"
NOWHERE = Path()
Build = Callable[[Open, Callable[[str], None]], Awaitable[Trainer]]


class TrainerServer:
    """Holds the trainer of the current session.

    Args:
        build: makes a trainer; called with each `open`, after the one before it has been closed.
        runs: the folder whose runs it may train. It reads and writes nowhere else.
    """

    def __init__(self, build: Build, runs: Path) -> None:
        self._build, self._runs = build, Path(os.path.abspath(runs))
        self._trainer: _Served | None = None
        self._session, self._folder = "", Path()
        self._lock = asyncio.Lock()
        self._doing, self._since = "", 0.0

    def app(self) -> Application:
        return Application(
            [
                Route("/alive", self._alive, methods=["GET"]),
                Route("/open", self._open, methods=["POST"]),
                Route("/sessions/{session}", self._call, methods=["POST"]),
            ]
        )

    async def close(self) -> None:
        async with self._lock:
            self._session = ""
            await self._end()

    async def _alive(self, request: Request) -> Response:
        seconds = CLOCK.monotonic() - self._since if self._doing else 0.0
        return JSONResponse({
            "role": "trainer", "pid": os.getpid(), "open": bool(self._session), "doing": self._doing,
            "seconds": round(seconds, 3), "silva": __version__,
        })  # fmt: skip

    async def _open(self, request: Request) -> Response:
        asked = decode(Open, await request.body())
        folder = self._run_folder(asked.folder)
        self._check_free(folder)
        self._session = ""  # from now on: the session before gets no call through
        return await _whole(self._opened(asked, folder))

    def _run_folder(self, given: str) -> Path:
        """The folder of a run, which may itself be a link to another disk."""
        path, runs = _where(given), self._runs.resolve()
        inside = Path(os.path.abspath(given)).is_relative_to(self._runs) or path.is_relative_to(runs)
        if not given or not inside or path in (NOWHERE, runs):
            raise ConfigError(
                f"open: got the run {given!r}, expected a folder in {self._runs}, which is output_dir of "
                "this trainer's configuration"
            )
        return path

    def _check_free(self, folder: Path) -> None:
        """A run in another folder may take the trainer only if nobody runs the one that has it.

        In the same folder it is the next process of the same run: the folder's lock lets no two run at once.
        """
        if self._session and folder != self._folder and (owner := holder(self._folder)):
            raise ConfigError(
                f"this trainer trains {self._folder}, in which process {owner} runs: wait for it, stop "
                "it, or start another trainer"
            )

    async def _opened(self, asked: Open, folder: Path) -> Response:
        async with self._lock:
            with self._at("open"):
                await self._end()
                self._folder, said = folder, list[str]()
                built = await self._build(asked, said.append)
                self._trainer = served = _Served(built, folder, said, self._at)
                self._session = secrets.token_hex(8)
            return _answer(encode(Opened(self._session, served.capabilities, served.version, served.said)))

    async def _end(self) -> None:
        if self._trainer is not None:
            await self._trainer.inner.close()
            self._trainer = None

    async def _call(self, request: Request) -> Response:
        session = request.path_params["session"]
        self._check(session)
        return await _whole(self._answered(session, await request.body()))

    async def _answered(self, session: str, call: bytes) -> Response:
        async with self._lock:
            self._check(session)
            return _answer(await rpc.dispatch(self._trainer, ServedTrainer, call))

    def _check(self, session: str) -> None:
        if not self._session or not secrets.compare_digest(session.encode(), self._session.encode()):
            raise PartLost(f"session {session!r} has ended: the trainer was started or opened again since")

    @contextmanager
    def _at(self, doing: str) -> Iterator[None]:
        """What `/alive` says the trainer is doing."""
        self._doing, self._since = doing, CLOCK.monotonic()
        try:
            yield
        finally:
            self._doing = ""


class InFront(rpc.proxy(Trainer)):  # type: ignore[misc]
    """What stands in front of a trainer: it is as that one is, and `_call` makes its calls."""

    def __init__(self, inner: Trainer) -> None:
        self.inner = inner

    @property
    def capabilities(self) -> TrainerCapabilities:
        return self.inner.capabilities

    @property
    def version(self) -> int:
        return self.inner.version


class _Served(InFront):
    """Implements `ServedTrainer`: it reads and writes in the run's folder alone."""

    def __init__(
        self, inner: Trainer, folder: Path, said: list[str], at: Callable[[str], AbstractContextManager[None]]
    ) -> None:
        super().__init__(inner)
        self._folder, self._said, self._at = folder, said, at

    @property
    def said(self) -> tuple[str, ...]:
        said = tuple(self._said)
        self._said.clear()
        return said

    async def close(self) -> None:
        raise CapabilityError("close: a session ends with the next open")

    async def _call(self, method: str, arguments: Sequence[Any]) -> Any:
        inside = [self._inside(each) if isinstance(each, Path) else each for each in arguments]
        with self._at(method), disk_faults(f"{method} failed in {self._folder}"):
            return await getattr(self.inner, method)(*inside)

    def _inside(self, path: Path) -> Path:
        found = _where(path)
        if not found.is_relative_to(self._folder):
            raise CheckpointError(
                f"got the path {str(path)!r}, expected one in the run's folder {self._folder}"
            )
        return found


def _where(path: str | Path) -> Path:
    """Where a path leads; NOWHERE for characters that no path holds, and for links in a circle."""
    try:
        return Path(path).resolve()
    except (ValueError, RuntimeError):
        return NOWHERE


async def _whole(work: Awaitable[Response]) -> Response:
    """Its result; it ends even if the client goes away, for the model must not be left half-way."""
    return await asyncio.shield(asyncio.ensure_future(work))


def _answer(content: bytes) -> Response:
    return Response(content, media_type=TAKES)
