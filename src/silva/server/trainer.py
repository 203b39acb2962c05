"""A trainer behind HTTP: one at a time, built for the orchestrator that opens it.

    POST /open ──> session ──> POST /sessions/SESSION/METHOD ──> reply        one call at a time
    GET /alive                 answers from the event loop, also while the trainer computes

The bodies are records (trainer/wire.py). What a trainer computes cannot be cut short: if the client goes
away, the call ends first and the next one waits. Not here: how a trainer is built, keys and sizes of bodies
(wire/guard.py), and retries: a trainer whose session is lost is opened again and loads a checkpoint.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from silva import __version__
from silva.errors import CheckpointError, ConfigError, PartLost
from silva.ports import CLOCK
from silva.protocols import Trainer
from silva.storage.checkpoints import disk_faults
from silva.storage.run_folder import holder
from silva.trainer.wire import METHODS, Call, Open, Opened, Reply
from silva.wire.codec import decode, encode
from silva.wire.guard import Application, HttpError

MAX_BODY = 4 << 30
"""Bytes of one call: all samples of an update with their arrays."""
BODY_SECONDS = 600.0
TAKES = "application/octet-stream"  # records of wire/codec.py
Build = Callable[[Open, Callable[[str], None]], Awaitable[Trainer]]


class TrainerServer:
    """Holds the trainer of the current session.

    Args:
        build: makes a trainer; called with each `open`, after the one before it has been closed.
        runs: the folder whose runs it may train. It reads and writes nowhere else.
    """

    def __init__(self, build: Build, runs: Path) -> None:
        self._build, self._runs = build, Path(os.path.abspath(runs))
        self._trainer: Trainer | None = None
        self._session, self._folder = "", Path()
        self._lock = asyncio.Lock()
        self._doing, self._since = "", 0.0
        self._said: list[str] = []

    def app(self) -> Application:
        return Application(
            [
                Route("/alive", self._alive, methods=["GET"]),
                Route("/open", self._open, methods=["POST"]),
                Route("/sessions/{session}/{method}", self._call, methods=["POST"]),
            ]
        )

    async def close(self) -> None:
        async with self._lock:
            if self._trainer is not None:
                await self._trainer.close()
            self._trainer, self._session = None, ""

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
        path = Path(os.path.abspath(given))
        inside = path.is_relative_to(self._runs) or path.resolve().is_relative_to(self._runs.resolve())
        if not given or not inside or path.resolve() == self._runs.resolve():
            raise ConfigError(
                f"open: got the run {given!r}, expected a folder in {self._runs}, which is output_dir of "
                "this trainer's configuration"
            )
        return path.resolve()

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
                if self._trainer is not None:
                    await self._trainer.close()
                    self._trainer = None
                self._said.clear()
                self._folder = folder
                self._trainer = await self._build(asked, self._said.append)
                self._session = secrets.token_hex(8)
            able = self._trainer.capabilities
            return _encoded(
                Opened(
                    self._session,
                    tuple(sorted(able.needs)),
                    "folder" if able.publishes == "folder" else "parameters",
                    self._trainer.version,
                    self._heard(),
                )
            )

    async def _call(self, request: Request) -> Response:
        session, method = request.path_params["session"], request.path_params["method"]
        if method not in METHODS:
            raise HttpError(404, f"no method {method!r}; expected one of {', '.join(METHODS)}")
        self._check(session)
        call = await asyncio.to_thread(decode, Call, await request.body())
        return await _whole(self._answered(session, method, call))

    async def _answered(self, session: str, method: str, call: Call) -> Response:
        async with self._lock:
            self._check(session)
            with self._at(method), disk_faults(f"{method} failed in {self._folder}"):
                result = await self._result(method, call)
            assert self._trainer is not None
            reply = Reply(self._trainer.version, self._heard(), **result)
        return await asyncio.to_thread(_encoded, reply)

    async def _result(self, method: str, call: Call) -> dict[str, Any]:
        trainer = self._trainer
        assert trainer is not None
        if method in ("save", "load", "export"):
            await getattr(trainer, method)(self._inside(call.path))
            return {}
        if method in ("refresh_reference", "restart"):
            await getattr(trainer, method)()
            return {}
        if method in ("publish", "snapshot"):
            return {"snapshot": await getattr(trainer, method)()}
        if method == "score":
            return {"signals": await trainer.score(call.samples, frozenset(call.needs))}
        if method == "optim_step" and call.policy is not None:
            return {"numbers": _numbers(await trainer.optim_step(call.policy, call.critic))}
        if method == "forward_backward" and call.loss is not None:
            return {"numbers": _numbers(await trainer.forward_backward(call.samples, call.loss))}
        raise HttpError(400, f"{method}: its arguments are missing")

    def _inside(self, path: str) -> Path:
        found = Path(path).resolve()
        if not path or not found.is_relative_to(self._folder):
            raise CheckpointError(f"got the path {path!r}, expected one in the run's folder {self._folder}")
        return found

    def _check(self, session: str) -> None:
        if not self._session or not secrets.compare_digest(session.encode(), self._session.encode()):
            raise PartLost(f"session {session!r} has ended: the trainer was started or opened again since")

    def _heard(self) -> tuple[str, ...]:
        said = tuple(self._said)
        self._said.clear()
        return said

    def _at(self, doing: str) -> _At:
        return _At(self, doing)


class _At:
    """What `/alive` says the trainer is doing."""

    def __init__(self, server: TrainerServer, doing: str) -> None:
        self._server, self._doing = server, doing

    def __enter__(self) -> None:
        self._server._doing, self._server._since = self._doing, CLOCK.monotonic()

    def __exit__(self, *error: object) -> None:
        self._server._doing = ""


async def _whole(work: Awaitable[Response]) -> Response:
    """Its result; it ends even if the client goes away, for the model must not be left half-way."""
    return await asyncio.shield(asyncio.ensure_future(work))


def _encoded(record: Opened | Reply) -> Response:
    return Response(encode(record), media_type=TAKES)


def _numbers(found: Mapping[str, float]) -> dict[str, float]:
    return {name: float(value) for name, value in found.items()}
