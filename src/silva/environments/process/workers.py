"""Environments in processes of their own, for those that block the event loop or burn CPU (`workers = n`).

    proxy.step(message) ──bytes of wire/rpc.py──> its worker process ──> environment.step(message)

Where the processes are is the host's affair: on this machine (channel.py), or on the nodes of a cluster.

Tasks are drawn here; an episode lives in one worker, which runs one call at a time. Seeds and results are
those of one process. If a worker dies or is stopped (SIGSTOP), another is started, and each of its episodes
is played again up to where it was when it is called next: what it was called with is kept. An episode whose
call kills two workers gets a fault. A call that is cancelled (`rollout.limits.timeout`) ends its worker, as
nothing else ends code that does not return. A worker has no keys of the run (variables.py), but it is no
sandbox: it may do what the user may.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from silva.environments.process.channel import WorkerProcess
from silva.environments.process.variables import named
from silva.environments.process.worker import FAULT, NUMBER, Asked, WorkerEpisode, WorkerFault
from silva.environments.settings import EnvironmentSettings
from silva.errors import CapabilityError, ConfigError, RemoteFault
from silva.protocols import Environment, Forkable, TaskSet, WorkerChannel, WorkerSpec
from silva.types import Split, Task
from silva.wire import rpc
from silva.wire.codec import decode

Call = tuple[str, Sequence[Any]]  # of `WorkerEpisode`: method and arguments
Start = Callable[[WorkerSpec], WorkerChannel]


class Workers:
    """A task set whose environments run in `settings.workers` processes, started when they are needed.

    Args:
        start: starts one of them.
        first: the number of the first one, among all of the run.
        say: takes what people should know.

    Raises:
        ConfigError: the settings have no `type`, so that another process cannot find their class.
    """

    def __init__(
        self,
        settings: EnvironmentSettings,
        start: Start = WorkerProcess,
        first: int = 0,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        if not settings.type:
            raise ConfigError(f"environment {settings.label}: workers need its `type`, got none")
        self.inner: TaskSet = settings.taskset()
        self.notes: Sequence[str] = getattr(self.inner, "notes", ())
        self.made_up: bool = getattr(self.inner, "made_up", False)
        self.only_held_out: bool = getattr(self.inner, "only_held_out", False)
        given = settings.type, settings.model_dump_json(), named(settings)
        specs = [WorkerSpec(first + i, *given) for i in range(settings.workers)]

        def lost(status: str) -> None:
            say(f"a worker of {settings.label} is lost ({status}): another one plays its episodes again")

        self._workers = [_Worker(spec, start, lost) for spec in specs]
        self._numbers = itertools.count()
        self._proxy: type[_Proxy] | None = None

    def tasks(self, split: Split) -> Sequence[Task]:
        return self.inner.tasks(split)

    def environment(self, task: Task) -> Environment:
        if self._proxy is None:
            forkable = isinstance(self.inner.environment(task), Forkable)
            self._proxy = _ForkableProxy if forkable else _Proxy
        worker = min(self._workers, key=lambda each: each.episodes)
        worker.episodes += 1
        return self._proxy(worker, self._numbers, [("make", [task])])

    def close(self) -> None:
        for worker in self._workers:
            worker.stop()


class _Worker:
    """One process.

    Attributes:
        generation: how often it was started.
        starting: it was started last and has not said that it is ready.
        episodes: how many are open in it.
        status: how it ended when it last died.
    """

    def __init__(self, spec: WorkerSpec, start: Start, lost: Callable[[str], None]) -> None:
        self._spec, self._start, self._lost = spec, start, lost
        self.generation = self.episodes = 0
        self.starting, self.status = False, "it was never started"
        self._lock = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._channel: WorkerChannel | None = None

    @property
    def alone(self) -> asyncio.Lock:
        """Held by the one caller; a lock belongs to one event loop."""
        if (loop := asyncio.get_running_loop()) is not self._loop:
            self._loop, self._lock = loop, asyncio.Lock()
        return self._lock

    @property
    def alive(self) -> bool:
        return self._channel is not None

    async def ask(self, episode: int, method: str, arguments: Sequence[Any]) -> Any:
        """What the method of `WorkerEpisode` returns.

        Raises:
            EOFError: the process died.
            RemoteFault: it could not start, or the method raised.
        """
        call = episode.to_bytes(NUMBER, "little") + rpc.encode(WorkerEpisode, method, arguments)
        try:
            if self._channel is None:
                self._channel, self.starting = self._start(self._spec), True
                self.generation += 1
                _checked(_found("", await self._channel.ready()))
                self.starting = False
            found = _found(method, await self._channel.ask(call))
        except EOFError as error:
            self.status = str(error)
            self.stop()
            self._lost(self.status)
            raise
        except BaseException:  # cancelled, say: what it would answer later is of no use to anybody
            self.stop()
            raise
        return _checked(found)

    def stop(self) -> None:
        if self._channel is not None:
            self._channel.stop()
        self._channel = None


class _Proxy(rpc.proxy(Asked)):  # type: ignore[misc]
    """An environment whose episode lives in a worker. `calls`: all that made it what it is."""

    def __init__(self, worker: _Worker, numbers: itertools.count[int], calls: Sequence[Call]) -> None:
        self._worker, self._numbers = worker, numbers
        self._id = next(numbers)
        self._calls = [*calls]  # those of the episode from which it was forked are its own
        self._generation = 0  # of the worker that knows the episode
        self._alone = self._closed = False

    @property
    def starting(self) -> bool:
        return self._worker.starting

    @contextlib.asynccontextmanager
    async def worker_slot(self) -> AsyncIterator[None]:
        """Held during a call. Waiting for it is not the environment's time."""
        async with self._worker.alone:
            self._alone = True
            try:
                yield
            finally:
                self._alone = False

    async def close(self) -> None:
        """An episode whose worker has died since is closed already."""
        if self._closed:
            return
        self._closed = True
        self._worker.episodes -= 1
        if self._known():
            await self._ask("close")

    async def _call(self, method: str, arguments: Sequence[Any]) -> Any:
        result = await self._ask(method, *arguments)
        if hasattr(Environment, method):  # its own replies change nothing
            self._calls.append((method, arguments))
        return result

    async def _ask(self, method: str, *arguments: Any) -> Any:
        """What the method returns, from a second worker if the first one dies."""
        async with contextlib.nullcontext() if self._alone else self.worker_slot():
            for _ in range(2):
                with contextlib.suppress(EOFError):
                    await self._restore()
                    return await self._worker.ask(self._id, method, arguments)
        raise RemoteFault(f"the worker process died twice ({self._worker.status})")

    async def _restore(self) -> None:
        """Play the episode again in a worker that does not know it."""
        if not self._known():
            for call in self._calls:
                await self._worker.ask(self._id, *call)
            self._generation = self._worker.generation

    def _known(self) -> bool:
        return self._worker.alive and self._generation == self._worker.generation


class _ForkableProxy(_Proxy):
    async def fork(self, seed: int) -> Environment:
        calls = [*self._calls, ("fork", (seed, None))]
        twin = _ForkableProxy(self._worker, self._numbers, calls)
        await self._ask("fork", seed, twin._id)
        twin._generation = self._generation
        self._worker.episodes += 1
        return twin


def _found(method: str, answer: bytes) -> Any:
    """The result or the fault; no method was called if the worker says that it is ready."""
    if answer.startswith(FAULT):
        return decode(WorkerFault, answer.removeprefix(FAULT))
    return rpc.decode(WorkerEpisode, method, answer).result if method else None


def _checked(found: Any) -> Any:
    if not isinstance(found, WorkerFault):
        return found
    if found.capability:
        raise CapabilityError(found.text.partition(": ")[2])
    raise RemoteFault(found.text, trace=found.trace, frames=found.frames)
