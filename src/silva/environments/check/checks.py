"""Plays an environment without a model and says what is wrong with it: `silva envs check`.

It finds what a run would meet late or never see: a crash on a reply that nobody thought of, an episode that
never ends, a reward that is not a number, tasks in both splits, equal seeds that give different episodes. It
does not know whether the questions make sense or the answers are right.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import functools
import inspect
import itertools
import json
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

from silva.environments.check.findings import SHOWN, Check, Finding, file_of, raised
from silva.environments.check.play import MOST_TURNS, CheckedEpisode, always, as_message, at_random, expert
from silva.environments.check.state import called, forked
from silva.environments.settings import EnvironmentSettings
from silva.errors import CapabilityError, ConfigError, contained, one_line
from silva.protocols import Forkable, Scripted
from silva.types import Message, Observation, Split, Step, Task, ToolCall

TASKS = 1000  # of each split that are looked at
DRAWING = 10.0  # seconds for drawing them: a library may take long for each
EPISODES = 8  # at random, each on a task of its own
SLOW = 1.0  # seconds of a step that holds up everything else
PATIENCE = 120.0  # seconds for one check
SPLITS: tuple[Split, ...] = ("train", "eval")
NONSENSE = {
    "an empty reply": Message("assistant", "", id="n"),
    "a reply of 1 MB": Message("assistant", "x" * 1_000_000, id="n"),
    "odd unicode": Message("assistant", "\x00\ud800 \u202e e\u0301 \U0001f9ff", id="n"),
    "tags that are never closed": Message("assistant", "<answer>" * 50 + "</think>" * 50, id="n"),
    "a malformed tool call": Message("assistant", "", errors=("malformed tool call: no value",), id="n"),
    "a call of an unknown tool": Message("assistant", "", tool_calls=(ToolCall("?", {"x": 1}, "c"),), id="n"),
}  # fmt: skip


class Examination:
    """Of one environment. `own`: the file in which a fault is the user's."""

    def __init__(self, settings: EnvironmentSettings) -> None:
        self.settings = settings
        self.own = file_of(type(settings))
        self.checks: list[Check] = []
        self.played: list[CheckedEpisode] = []
        self.taskset: Any = None

    def run(self) -> list[Check]:
        """All checks; those that need what an earlier one could not get are left out."""
        self.checks = []
        if self._checked("task set", self._tasks):
            for name, check in (
                ("episodes", self._episodes),
                ("equal seeds", self._equal_seeds),
                ("nonsense", self._nonsense),
                ("closing", self._closing),
                ("forks", self._forks),
                ("tools", self._tools),
                ("expert", self._expert),
            ):
                self._checked(name, functools.partial(_limited, check))
            self._checked("rewards", self._rewards)
        return self.checks

    # Each check fills `self.check`; what it raises is a finding too.

    def _checked(self, name: str, check: Callable[[], None]) -> bool:
        self.check = Check(name)
        self.checks.append(self.check)
        try:
            with contained():
                check()
        except TimeoutError:
            self._wrong(f"no end after {PATIENCE:g} s", "step")
        except CapabilityError as error:
            self._note(str(error))
        except ConfigError as error:
            self._wrong(str(error))
        except Exception as error:
            self._raised(error, f"during the check of {name}")
        return self.check.ok

    def _tasks(self) -> None:
        try:
            self.taskset = self.settings.taskset()
        except CapabilityError as error:
            self._wrong(f"refused: {error}")
            return
        again = self.settings.taskset()
        seen: dict[Split, list[Task]] = {}
        for split in SPLITS:
            found = self.taskset.tasks(split)
            seen[split] = tasks = _first(found)
            if not tasks:
                self._wrong(f"no tasks in the split {split}", "taskset")
            for task in tasks:
                self._task(task, split)
            repeated = min(len(tasks), EPISODES)
            if list(again.tasks(split)[:repeated]) != tasks[:repeated]:
                self._wrong(f"taskset() gives other {split} tasks when it is called again", "taskset")
        if self.check.ok:
            both = {t.content(): t for t in seen["train"]}.keys() & {t.content() for t in seen["eval"]}
            if both:
                example = next(task for task in seen["eval"] if task.content() in both)
                self._wrong(
                    f"{len(both)} problems are in both splits, such as {one_line(repr(example.data), SHOWN)}",
                    "taskset",
                )
            ids = [task.id for split in SPLITS for task in seen[split]]
            if len(set(ids)) < len(ids):
                self._wrong("two tasks have the same id", "taskset")
        for note in getattr(self.taskset, "notes", ()):
            self._note(note)
        self.check.done = ", ".join(self._counted(split, seen[split]) for split in SPLITS)

    def _counted(self, split: Split, tasks: Sequence[Task]) -> str:
        """How many different tasks there are, or among the first ones that were looked at."""
        found = f"{len({repr((task.data, task.answer)) for task in tasks})} {split} tasks"
        return found if len(tasks) == len(self.taskset.tasks(split)) else f"{found} in the first {len(tasks)}"

    def _task(self, task: Task, split: Split) -> None:
        try:
            plain = json.loads(json.dumps([task.data, task.answer]))
        except (TypeError, ValueError) as error:
            self._wrong(f"task {task.id}: data or answer is no plain JSON: {error}", "taskset")
            return
        if plain != [dict(task.data), task.answer]:
            self._wrong(
                f"task {task.id}: data or answer is not the same after JSON (a tuple, or a key that is no "
                f"text?): {one_line(repr(task.data), SHOWN)}", "taskset",
            )  # fmt: skip
        if task.split != split:
            self._wrong(f"task {task.id} says split {task.split!r}, expected {split!r}", "taskset")

    async def _episodes(self) -> None:
        tasks = self._some_tasks(EPISODES)
        for number, task in enumerate(tasks):
            played = await self._random(task, number)
            self.played.append(played)
            self._looked_at(played)
        turns = sum(len(played.steps) for played in self.played)
        slowest = max((played.slowest for played in self.played), default=0.0)
        if slowest > SLOW and not self.settings.workers:
            self._wrong(
                f"a step took {slowest:.1f} s; if it computed or blocked, all other episodes waited: set "
                "workers = 1, or await asyncio.to_thread(...)", "step",
            )  # fmt: skip
        self.check.done = f"{len(self.played)} at random, {turns} turns"

    def _looked_at(self, played: CheckedEpisode) -> None:
        first, *steps = played.told
        if not isinstance(first, Observation):
            self._wrong(f"reset() returned {type(first).__name__}, expected an Observation", "reset")
            return
        if not first.messages:
            self._wrong("reset() shows no message", "reset")
        for step in steps:
            if not isinstance(step, Step):
                self._wrong(f"step() returned {type(step).__name__}, expected a Step", "step")
                return
            for kind in ("rewards", "shaped", "metrics"):
                for name, value in getattr(step, kind).items():
                    if not isinstance(value, (int, float)) or not math.isfinite(value):
                        self._wrong(f"{kind}[{name!r}] is {value!r}, expected a finite number", "step")
        shown = [getattr(each, "observation", each) for each in played.told]
        if any(m.role == "assistant" for each in shown for m in getattr(each, "messages", ())):
            self._wrong("an observation has a message of the role assistant: that is the model", "step")
        if not played.ended:
            self._wrong(
                f"an episode did not end in {MOST_TURNS} turns: expected `terminated`, or `truncated`",
                "step",
            )
        elif played.success not in (0.0, 1.0):
            self._wrong(
                f'the last step has metrics["success"] = {played.success!r}, expected 0.0 or 1.0',
                "step",
            )

    async def _equal_seeds(self) -> None:
        """Noise is of the task's seed; episodes that run side by side share nothing."""
        tasks = self._some_tasks(4)
        alone = [await self._random(task, seed) for seed, task in enumerate(tasks)]
        again = [await self._random(task, seed) for seed, task in enumerate(tasks)]
        if _told(alone) != _told(again):
            self._wrong(
                "the same task and replies give another episode the second time: random numbers must come "
                "from self.rng, and what is shown must not depend on the order of a set or on the clock",
                _difference(alone, again),
            )
            return
        other = self.taskset.environment(dataclasses.replace(tasks[0], seed=tasks[0].seed + 1))
        try:
            if repr(await other.reset()) != repr(alone[0].told[0]):
                self._wrong(
                    "another episode of the same task begins with another text: what is asked must depend on "
                    "task.data, and only what happens by chance on task.seed", "reset",
                )  # fmt: skip
        finally:
            await other.close()
        together = await asyncio.gather(*(self._random(task, seed) for seed, task in enumerate(tasks)))
        if _told(together) != _told(alone):
            self._wrong(
                "episodes that run side by side change each other: keep state in attributes of the episode",
                _difference(alone, together),
            )
        self.check.done = f"{len(tasks)} episodes three times, once side by side"

    async def _nonsense(self) -> None:
        task = self._some_tasks(1)[0]
        for what, message in NONSENSE.items():
            played = self._unplayed(task)
            try:
                with contained():
                    await played.play(always(message))
            except CapabilityError:
                raise
            except Exception as error:
                self._raised(error, f"after {what}")
                continue
            if not played.ended:
                self._wrong(f"{what}, repeated, never ends the episode", "step")
            elif played.success:
                self._note(f"{what} counts as a success")
            elif self.played and played.reward > max(each.reward for each in self.played):
                self._wrong(
                    f"{what}, repeated, earns {played.reward:g}, more than any of {len(self.played)} "
                    "episodes at random: it must cost what the worst action costs", "step",
                )  # fmt: skip
        self.check.done = f"{len(NONSENSE)} kinds of replies that are none"

    async def _closing(self) -> None:
        task = self._some_tasks(1)[0]
        unused, used = self.taskset.environment(task), self.taskset.environment(task)
        await unused.close()
        first = await used.reset()
        before = copy.deepcopy(first)
        await used.step(as_message("?", 0))
        if first != before:
            self._wrong("step() changes an observation that was returned earlier", "step")
        await used.close()
        await used.close()
        self.check.done = "before reset(), and twice"

    async def _forks(self) -> None:
        tasks = self._some_tasks(4)
        if not isinstance(self.taskset.environment(tasks[0]), Forkable):
            self._note("it has no fork(seed): recipes that branch cannot use it")
            return
        for seed, task in enumerate(tasks):
            for begun in (0, 1):
                for fault in await forked(self._unplayed, task, begun, seed):
                    self._wrong(fault, "fork")
        self.check.done = f"same state, own noise; {2 * len(tasks)} played to their end"

    async def _tools(self) -> None:
        count, notes = await called(self._unplayed, self._some_tasks(1)[0])
        for note in notes:
            self._note(note)
        self.check.done = f"{count} called" if count else "none are offered"

    async def _expert(self) -> None:
        tasks = self._some_tasks(EPISODES)
        if not isinstance(self.taskset.environment(tasks[0]), Scripted):
            self._note("it has no expert_reply() and random_reply(seed): no warm start, no baselines")
            return
        wins = 0
        for task in tasks:
            played = await self._unplayed(task).play(expert)
            self.played.append(played)
            wins += played.success == 1.0
        if not wins:
            self._wrong(f"its expert succeeds in none of {len(tasks)} episodes", "expert_reply")
        self.check.done = f"succeeds in {wins} of {len(tasks)} episodes"

    def _rewards(self) -> None:
        """No partial credit may reach the reward of a solution."""
        ended = [played for played in self.played if played.ended]
        failed = [played.reward for played in ended if played.success == 0.0]
        solved = [played.reward for played in ended if played.success == 1.0]
        if failed and solved and max(failed) >= min(solved):
            self._wrong(
                f"an episode that failed earned {max(failed):g}, one that succeeded {min(solved):g}: partial "
                "credit must stay below the reward of a solution", "step",
            )  # fmt: skip
        self.check.done = f"{len(failed)} failures, {len(solved)} successes"

    # What they use.

    async def _random(self, task: Task, seed: int) -> CheckedEpisode:
        return await self._unplayed(task).play(at_random(seed))

    def _unplayed(self, task: Task) -> CheckedEpisode:
        return CheckedEpisode(self.taskset.environment(task))

    def _some_tasks(self, count: int) -> Sequence[Task]:
        return list(self.taskset.tasks("train")[:count])

    def _wrong(self, text: str, method: str = "") -> None:
        """`method`: of the environment or of its settings, in which the fault is."""
        finding = Finding("wrong", text, self._at(method) if method else "")
        if finding not in self.check.findings:
            self.check.findings.append(finding)

    def _note(self, text: str) -> None:
        self.check.findings.append(Finding("note", text))

    def _raised(self, error: Exception, when: str) -> None:
        self.check.findings.append(raised(error, when, self.own))

    def _at(self, method: str) -> str:
        """File and line of a method of the environment, or of the settings."""
        owners: list[type] = [type(self.settings)]
        with suppress(Exception):  # there is none; what is wrong was said already
            owners.insert(0, type(self.taskset.environment(self._some_tasks(1)[0])))
        for owner in owners:
            function = getattr(owner, method, None)
            code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
            if code is not None:
                return f"{code.co_filename}:{code.co_firstlineno}"
        return self.own


def examine(settings: EnvironmentSettings) -> list[Check]:
    """What `silva envs check` finds."""
    return Examination(settings).run()


def _limited(check: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        with contained():
            async with asyncio.timeout(PATIENCE):  # in this task: exit() in another one ends the loop
                await check()

    asyncio.run(run())


def _first(tasks: Sequence[Task]) -> list[Task]:
    until = time.perf_counter() + DRAWING
    numbers = range(min(len(tasks), TASKS))
    return [tasks[n] for n in itertools.takewhile(lambda n: n == 0 or time.perf_counter() <= until, numbers)]


def _told(played: Sequence[CheckedEpisode]) -> list[str]:
    return [repr(each) for one in played for each in one.told]


def _difference(some: Sequence[CheckedEpisode], others: Sequence[CheckedEpisode]) -> str:
    """The method whose results differ first."""
    pairs = zip(some, others, strict=True)
    return "reset" if any(repr(a.told[0]) != repr(b.told[0]) for a, b in pairs) else "step"
