"""A process that runs environments for another one.

    python -m silva.environments.process.worker FD TYPE SETTINGS

It sends an empty frame to the socket FD once it is ready, or the `WorkerFault` of its start. Then it takes
one call of `WorkerEpisode` (wire/rpc.py) at a time, after the 8 bytes of the episode's number, and sends
the answer or the `WorkerFault`. A frame is its length in 4 bytes and its bytes. The worker ends when the
socket is closed. What environments print goes to stderr.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from silva.config.plugins import find_settings
from silva.config.schema import import_settings, tagged
from silva.environments import ENVIRONMENTS
from silva.environments.settings import EnvironmentSettings
from silva.errors import CapabilityError, Escaped, contained
from silva.protocols import Environment, Scripted, TaskSet
from silva.types import Task
from silva.wire import rpc
from silva.wire.codec import encode

PR_SET_PDEATHSIG = 1
BELOW = 5  # of priority, so that the event loop gets a core when as many workers as there are cores compute
FAULT = b"fault\n"  # before a Fault, where an answer could stand
LENGTH, NUMBER = 4, 8  # bytes


@dataclass(frozen=True, slots=True)
class WorkerFault:
    """An exception: its type and text, its traceback as text and as (file, line) from the outermost in."""

    text: str
    trace: str
    frames: tuple[tuple[str, int], ...]
    capability: bool  # it was a CapabilityError: no other episode could do it either


class Asked(Environment, Protocol):
    """An environment whose own replies have to be waited for."""

    async def expert_reply(self) -> str: ...
    async def random_reply(self, seed: int) -> str: ...


class WorkerEpisode(Asked, Protocol):
    """An episode in a worker, which knows it by a number."""

    async def make(self, task: Task) -> None: ...
    async def fork(self, seed: int, twin: int | None) -> None: ...  # becomes `twin`; None: takes its place


def frame(data: bytes) -> bytes:
    return len(data).to_bytes(LENGTH, "little") + data


def settings_of(type_: str) -> type[EnvironmentSettings]:
    """The settings class that a `type` in the configuration names."""
    own = find_settings(type_, EnvironmentSettings, installed=True)
    found: Any = own or import_settings(ENVIRONMENTS[type_])
    settings: Any = tagged(found, type_)
    return settings


def serve(channel: socket.socket, taskset: Callable[[], TaskSet]) -> None:
    """Answer calls until the socket is closed."""
    loop, live = asyncio.new_event_loop(), dict[int, Any]()
    with channel, channel.makefile("rb") as stream:
        try:
            with contained():
                make = taskset().environment
        except Exception as error:
            channel.sendall(frame(_fault(error)))
            return
        channel.sendall(frame(b""))
        while len(head := stream.read(LENGTH)) == LENGTH:
            call = stream.read(int.from_bytes(head, "little"))
            episode = _Episode(int.from_bytes(call[:NUMBER], "little"), live, make)
            try:
                data = _result(loop, _run(episode, call[NUMBER:]))
            except Exception as error:
                data = _fault(error)
            channel.sendall(frame(data))


class _Episode(rpc.proxy(Asked)):  # type: ignore[misc]
    """Implements `WorkerEpisode` over the environment of `live` that has this number."""

    def __init__(self, number: int, live: dict[int, Any], make: Callable[[Task], Environment]) -> None:
        self._number, self._live, self._make = number, live, make

    async def make(self, task: Task) -> None:
        self._live[self._number] = self._make(task)

    async def fork(self, seed: int, twin: int | None) -> None:
        self._live[self._number if twin is None else twin] = await self._live[self._number].fork(seed)

    async def close(self) -> None:
        await self._live.pop(self._number).close()

    async def _call(self, method: str, arguments: Sequence[Any]) -> Any:
        environment = self._live[self._number]
        if hasattr(Scripted, method) and not isinstance(environment, Scripted):
            name = type(environment).__name__
            raise CapabilityError(f"{name} has no expert_reply() and random_reply(seed)")
        result = getattr(environment, method)(*arguments)
        return await result if inspect.isawaitable(result) else result


def _result(loop: asyncio.AbstractEventLoop, running: Coroutine[Any, Any, bytes]) -> bytes:
    task = loop.create_task(running)
    try:
        with contained():  # exit() in a task that the environment made ends the loop
            return loop.run_until_complete(task)
    finally:
        task.cancel()


async def _run(episode: _Episode, call: bytes) -> bytes:
    with contained():
        return await rpc.dispatch(episode, WorkerEpisode, call)


def _fault(error: Exception) -> bytes:
    frames = [(f.filename, f.lineno or 0) for f in traceback.extract_tb(error.__traceback__)]
    return FAULT + encode(
        WorkerFault(
            str(error) if isinstance(error, Escaped) else f"{type(error).__name__}: {error}",
            "".join(traceback.format_exception(error)).rstrip(),
            tuple(f for f in frames if f[0] not in (__file__, rpc.__file__)),
            isinstance(error, CapabilityError),
        )
    )


def main(fd: str, type_: str, settings: str) -> None:
    if sys.platform == "linux":  # a parent that is killed closes nothing while a step runs for ever
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGHUP):  # the parent decides
        signal.signal(number, signal.SIG_IGN)
    os.nice(BELOW)
    os.dup2(2, 1)
    serve(
        socket.socket(fileno=int(fd)),
        lambda: settings_of(type_).model_validate_json(settings).taskset(),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
