"""The event loop of a simulation: virtual time, processes of which any may die at once, threads in turns.

    SimulatedLoop ── tasks of "orchestrator"      each task belongs to the process that made it (PROCESS)
                 ├── tasks of "trainer#1" ...
                 └── threads (asyncio.to_thread): the loop stands still while one of them runs, so that the
                     order of all that happens follows from the seed

A run that nobody will ever wake, that turns in circles, or that takes too much virtual time is a `Hang`.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import threading
from collections import defaultdict
from collections.abc import Callable, Coroutine
from typing import Any

from tests.virtual_clock import Jumping, VirtualLoop

from silva.monitoring.watchdog import stacks
from silva.ports import Clock

MOST_TURNS = 400_000
"""Of the loop in one seed; the longest of 100,000 seeds took a tenth."""
MOST_SECONDS = 3600.0
"""Virtual ones of one seed."""
MOST_STILL = 90.0
"""Virtual seconds in which the run only asks who is alive; its longest limit is a tenth of that."""
MANY = 200  # tasks of a process, before those that have ended are forgotten
ORCHESTRATOR = "orchestrator"
PROCESS: contextvars.ContextVar[str] = contextvars.ContextVar("PROCESS", default="")
"""Which simulated process runs now; "" for the world around them."""


class Hang(AssertionError):
    """Nothing will ever happen again, or nothing but the same."""


class Killed(BaseException):
    """The simulated process is gone. Whatever its code does on the way out has no effect."""


class _Instant(Jumping):
    """No sockets: time passes, nothing arrives."""

    turns, moved, over = 0, 0.0, False

    def select(self, timeout: float | None = None) -> list[Any]:
        self.turns += 1
        if self.over:
            return []
        if timeout is None:
            raise Hang("every task waits for another one")
        if self.turns > MOST_TURNS or self.now > MOST_SECONDS:
            raise Hang(f"no end after {self.turns} turns of the loop and {self.now:.0f} virtual seconds")
        if self.now > self.moved + MOST_STILL:
            raise Hang(f"nothing has moved for {MOST_STILL:g} virtual seconds")
        self.now += max(0.0, timeout)
        return []


class SimulatedLoop(VirtualLoop):
    """`tasks`: by process, in the order they began; many of them have ended."""

    def __init__(self) -> None:
        super().__init__(_Instant())
        self.tasks: dict[str, list[asyncio.Task[Any]]] = defaultdict(list)
        self.threads: list[_Thread] = []
        self.pause: Callable[[], float] = lambda: 0.0  # virtual seconds until a thread has done something
        self.set_task_factory(_made)  # type: ignore[arg-type]

    def moved(self) -> None:
        """The run does something."""
        self._jumping.moved = self._jumping.now  # type: ignore[attr-defined]

    def give_up(self) -> None:
        """Whatever has hung ends now."""
        self._jumping.over = True  # type: ignore[attr-defined]

    @property
    def turns(self) -> int:
        return self._jumping.turns  # type: ignore[attr-defined]

    def run_until(self, ended: asyncio.Future[Any], or_if: Callable[[], bool] = lambda: False) -> None:
        """Returns when `ended` is done, or if `or_if` is true after a `stop`. Hang: neither will ever be."""
        ended.add_done_callback(self._stop_for)
        try:
            while not (ended.done() or or_if()):
                self.run_forever()
        except Hang as hang:
            raise Hang(f"{hang}\n{stacks(self)}") from None
        finally:
            ended.remove_done_callback(self._stop_for)

    def _stop_for(self, ended: asyncio.Future[Any]) -> None:
        self.stop()

    def end(self, process: str) -> None:
        """Cancel what a process does, and wait until all of it has ended, its threads too."""
        while others := [task for task in self.tasks[process] if not task.done()]:
            for task in others:
                task.cancel()
            self.run_until(asyncio.gather(*others, return_exceptions=True))
        while any(thread.process == process for thread in self.threads):
            self.run_until(asyncio.ensure_future(asyncio.sleep(0.001), loop=self))

    def run_in_executor(self, executor: Any, function: Callable[..., Any], *args: Any) -> Any:  # type: ignore[override]
        """What only reads or writes records needs no thread, and takes no time."""
        future = self.create_future()
        call = functools.partial(function, *args)
        inner = function.args[0] if isinstance(function, functools.partial) else function
        if getattr(inner, "__module__", "").startswith("silva.wire."):
            future.set_result(call())
            return future
        thread = _Thread(self, call, future)
        self.threads.append(thread)
        self.call_later(self.pause(), thread.begin)
        return future


def _made(loop: SimulatedLoop, work: Coroutine[Any, Any, Any], **more: Any) -> asyncio.Task[Any]:
    task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, **more)
    context = more.get("context")
    process = context[PROCESS] if context and PROCESS in context else PROCESS.get()
    mine = loop.tasks[process]
    mine.append(task)
    if len(mine) > MANY:
        mine[:] = [each for each in mine if not each.done()]
    return task


class _Thread:
    """A call in another thread. Loop and thread hand the turn to each other and never run at once."""

    current: _Thread | None = None

    def __init__(self, loop: SimulatedLoop, call: Callable[[], Any], future: asyncio.Future[Any]) -> None:
        self.loop, self.call, self.future, self.process = loop, call, future, PROCESS.get()
        self.context = contextvars.copy_context()
        self._mine, self._loops = threading.Semaphore(0), threading.Semaphore(0)
        self._work: Coroutine[Any, Any, Any] | None = None
        self._task: asyncio.Future[Any] | None = None
        self._result: tuple[Any, BaseException | None] | None = None

    def begin(self) -> None:
        _Thread.current = self
        threading.Thread(target=self._run, daemon=True).start()
        self._wait()

    def _run(self) -> None:
        try:
            self._result = self.call(), None
        except BaseException as error:
            self._result = None, error
        self._loops.release()

    def _wait(self) -> None:
        """In the loop: until the thread has ended or waits for a coroutine."""
        self._loops.acquire()
        _Thread.current = None
        if self._result is None:
            work, self._work = self._work, None
            assert work is not None
            self._task = self.loop.create_task(work, context=self.context)
            self._task.add_done_callback(self._go_on)
            return
        self.loop.threads.remove(self)
        found, error = self._result
        if self.future.done():  # whoever asked is gone
            return
        if error is None:
            self.future.set_result(found)
        else:
            self.future.set_exception(error)

    def _go_on(self, task: asyncio.Future[Any]) -> None:
        _Thread.current = self
        self._mine.release()
        self._wait()

    def result(self, work: Coroutine[Any, Any, Any]) -> Any:
        """In the thread: what a coroutine gives that the loop runs."""
        self._work = work
        self._loops.release()
        self._mine.acquire()
        assert self._task is not None
        return self._task.result()


class _Asked:
    """As the future of `asyncio.run_coroutine_threadsafe`: asked for its result at once, as Silva does."""

    def __init__(self, work: Coroutine[Any, Any, Any]) -> None:
        self._work = work

    def result(self) -> Any:
        assert _Thread.current is not None, "only a thread may wait for the loop"
        return _Thread.current.result(self._work)


def run_coroutine_threadsafe(work: Coroutine[Any, Any, Any], loop: SimulatedLoop) -> _Asked:
    """In place of asyncio's."""
    return _Asked(work)


class LoopTime(Clock):
    """Silva's clock, by this loop, also where no loop runs."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop

    def monotonic(self) -> float:
        return self._loop.time()

    def time(self) -> float:
        return 1.7e9 + self._loop.time()
