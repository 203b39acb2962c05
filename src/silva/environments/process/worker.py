"""A process that runs environments for another one.

    python -m silva.environments.process.worker FD TYPE SETTINGS

It sends an empty `Answer` to the socket FD once it is ready, or one with the fault of its start. Then it
takes one `Call` at a time and sends its `Answer`, each as its length in 4 bytes and the bytes of the codec.
It ends when the socket is closed. What environments print goes to stderr.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Literal

from silva.config.plugins import find_settings
from silva.config.schema import import_settings, tagged
from silva.environments import ENVIRONMENTS
from silva.environments.settings import EnvironmentSettings
from silva.errors import CapabilityError, Escaped, contained
from silva.protocols import Scripted, TaskSet
from silva.types import Message, Observation, Step, Task
from silva.wire.codec import decode, encode

PR_SET_PDEATHSIG = 1
BELOW = 5  # of priority, so that the event loop gets a core when as many workers as there are cores compute

Name = Literal["make", "reset", "step", "fork", "close", "expert_reply", "random_reply"]


@dataclass(frozen=True, slots=True)
class Call:
    """A method of an environment; `make` makes one, `fork` makes `episode` from `parent`."""

    name: Name
    episode: int
    task: Task | None = None
    message: Message | None = None
    seed: int | None = None
    parent: int | None = None


@dataclass(frozen=True, slots=True)
class Fault:
    """An exception: its type and text, its traceback as text and as (file, line) from the outermost in."""

    text: str
    trace: str
    frames: tuple[tuple[str, int], ...]
    capability: bool  # it was a CapabilityError: no other episode could do it either


@dataclass(frozen=True, slots=True)
class Answer:
    """What the method returned; all fields are None if that was None."""

    observation: Observation | None = None
    step: Step | None = None
    text: str | None = None
    fault: Fault | None = None


def frame(data: bytes) -> bytes:
    return len(data).to_bytes(4, "little") + data


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
            channel.sendall(frame(encode(Answer(fault=_fault(error)))))
            return
        channel.sendall(frame(encode(Answer())))
        while len(head := stream.read(4)) == 4:
            call = decode(Call, stream.read(int.from_bytes(head, "little")))
            try:
                data = encode(_answer(_result(loop, _run(call, live, make))))
            except Exception as error:
                data = encode(Answer(fault=_fault(error)))
            channel.sendall(frame(data))


def _result(loop: asyncio.AbstractEventLoop, running: Coroutine[Any, Any, Any]) -> Any:
    task = loop.create_task(running)
    try:
        with contained():  # exit() in a task that the environment made ends the loop
            return loop.run_until_complete(task)
    finally:
        task.cancel()


async def _run(call: Call, live: dict[int, Any], make: Callable[[Task], Any]) -> Any:
    with contained():
        return await _called(call, live, make)


async def _called(call: Call, live: dict[int, Any], make: Callable[[Task], Any]) -> Any:
    if call.name == "make":
        live[call.episode] = make(call.task)  # type: ignore[arg-type]
        return None
    if call.name == "close":
        return await live.pop(call.episode).close()
    if call.name == "fork":
        live[call.episode] = await live[call.parent].fork(call.seed)  # type: ignore[index]
        return None
    environment = live[call.episode]
    if call.name in ("expert_reply", "random_reply") and not isinstance(environment, Scripted):
        raise CapabilityError(f"{type(environment).__name__} has no expert_reply() and random_reply(seed)")
    if call.name == "expert_reply":
        return environment.expert_reply()
    if call.name == "random_reply":
        return environment.random_reply(call.seed)
    return await (environment.reset() if call.name == "reset" else environment.step(call.message))


def _answer(result: Any) -> Answer:
    if isinstance(result, Step):
        return Answer(step=result)
    if isinstance(result, Observation):
        return Answer(observation=result)
    if result is None or isinstance(result, str):
        return Answer(text=result)
    raise TypeError(f"got {type(result).__name__}, expected Observation, Step or text")


def _fault(error: Exception) -> Fault:
    frames = [(f.filename, f.lineno or 0) for f in traceback.extract_tb(error.__traceback__)]
    return Fault(
        str(error) if isinstance(error, Escaped) else f"{type(error).__name__}: {error}",
        "".join(traceback.format_exception(error)).rstrip(),
        tuple(f for f in frames if f[0] != __file__),
        isinstance(error, CapabilityError),
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
