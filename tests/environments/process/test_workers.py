"""Environments in processes of their own: the same episodes, whatever happens to the processes."""

from __future__ import annotations

import asyncio
import os
import signal
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.contracts.test_environments import message, play

from silva.config.sections import EpisodeLimits
from silva.environments.process import channel
from silva.environments.process.channel import WorkerProcess
from silva.environments.process.variables import named_in
from silva.environments.process.worker import settings_of
from silva.environments.process.workers import Workers
from silva.environments.worlds.dataset import Dataset
from silva.errors import CapabilityError, ConfigError
from silva.protocols import Reply
from silva.rollouts.episode import Episode
from silva.types import Segment

pytestmark = pytest.mark.slow
COUNTING = """
import asyncio, os, random, signal, sys, time
from silva.environments.settings import EnvironmentSettings
from silva.environments.tasks import Draft, generated
from silva.types import Message, Observation, Step


class Counting(EnvironmentSettings):
    '''Adds a random number to a sum in every step; does what a message tells it.'''
    name: str = "counting"
    mark: str = ""
    def taskset(self):
        draw = lambda rng: Draft({"start": rng.randrange(10**6)})
        return generated(self, draw, lambda task: Counter(self, task))

async def leave():
    raise SystemExit(3)

class Counter:
    def __init__(self, settings, task):
        self.settings, self.sum = settings, task.data["start"]
        self.rng = random.Random(task.seed)
    async def reset(self):
        return Observation((Message("user", str(self.sum)),))
    async def step(self, message):
        said = message.content
        self.sum += self.rng.randrange(1000)
        if said == "die" or (said == "die once" and self.first()):
            os.kill(os.getpid(), signal.SIGKILL)
        if said == "stop once" and self.first():
            os.kill(os.getpid(), signal.SIGSTOP)
        if said == "shout":
            os.write(int(sys.argv[1]), b"\\xff" * 4)  # where its answers go
        if said == "hang":
            while True:
                time.sleep(1)
        if said == "raise":
            raise KeyError(said)
        if said == "print":
            print("noise on stdout")
        if said == "leave":
            raise SystemExit(0)
        if said == "interrupt":
            raise KeyboardInterrupt
        if said == "leave in a task":
            await asyncio.gather(leave())
        if said == "leave and go on":
            self.task = asyncio.create_task(leave())
            await asyncio.sleep(0.01)
        if said == "keys":
            secrets = {n: 1.0 for n in os.environ if os.environ[n] == "secret"}
            return Step(Observation((Message("user", ""),)), metrics=secrets)
        return Step(Observation((Message("user", f"{self.sum}"),)), {"sum": float(self.sum)},
                    terminated=said == "end", metrics={"pid": float(os.getpid()), "nice": float(os.nice(0))})
    def first(self):
        if os.path.exists(self.settings.mark):
            return False
        open(self.settings.mark, "w").close()
        return True
    async def fork(self, seed):
        twin = Counter.__new__(Counter)
        twin.settings, twin.sum, twin.rng = self.settings, self.sum, random.Random(seed)
        return twin
    async def close(self):
        pass
"""


said_by_workers: list[str] = []


@pytest.fixture
def counting(tmp_path: Path) -> Iterator[Any]:
    """Makes task sets of the environment above: `make(0)` in this process, `make(n)` in n workers."""
    file = tmp_path / "counting.py"
    file.write_text(textwrap.dedent(COUNTING))
    type_ = f"{file}:Counting"
    made: list[Workers] = []
    said_by_workers.clear()

    def make(workers: int, **keys: Any) -> Any:
        given = {"type": type_, "workers": workers, "mark": str(tmp_path / "died"), "eval_size": 4, **keys}
        settings = settings_of(type_)(**given)
        if not workers:
            return settings.taskset()
        made.append(Workers(settings, say=said_by_workers.append))
        return made[-1]

    yield make
    for each in made:
        each.close()


@dataclass
class Says:
    """An actor whose every reply is the same."""

    said: str
    reads_tokens = False

    async def reply(self, request: Any) -> Reply:
        return Reply((Segment("policy", (), reported=1),), message(self.said), "stop_token", 1)


def texts(told: list[Any]) -> list[str]:
    return [getattr(each, "observation", each).messages[0].content for each in told]


async def played(taskset: Any, said: list[str], index: int = 0) -> list[Any]:
    environment = taskset.environment(taskset.tasks("train")[index])
    return await play(environment, lambda turn: said[turn] if turn < len(said) else "end")


def test_episodes_are_those_of_one_process(counting):
    said = ["a", "print", "b"]

    async def check() -> None:
        alone, apart = counting(0), counting(2)
        for index in range(5):
            here, there = await played(alone, said, index), await played(apart, said, index)
            assert texts(here) == texts(there)
            assert here[-1].rewards == there[-1].rewards

    asyncio.run(check())


def test_episodes_are_spread_over_the_processes(counting):
    async def check() -> list[Any]:
        taskset = counting(2)
        open_ = [taskset.environment(task) for task in taskset.tasks("train")[:4]]
        for each in open_:
            await each.reset()
        steps = await asyncio.gather(*(each.step(message("a")) for each in open_))
        for each in (open_[0], open_[2]):  # of one process, which is the emptier one now
            await each.close()
        for task in taskset.tasks("train")[4:6]:
            open_.append(taskset.environment(task))
            await open_[-1].reset()
            assert (await open_[-1].step(message("a"))).metrics["pid"] == steps[0].metrics["pid"]
        return steps

    steps = asyncio.run(check())
    pids = {step.metrics["pid"] for step in steps}
    assert len(pids) == 2 and os.getpid() not in pids
    # They yield to the event loop; 19 is the lowest priority there is.
    assert {step.metrics["nice"] for step in steps} == {min(os.nice(0) + 5, 19)}


@pytest.mark.parametrize("what, how", [("die once", "exit status -9"), ("stop once", "SIGSTOP")])
def test_a_worker_that_dies_or_is_stopped_is_replaced_and_people_are_told(
    counting, tmp_path, monkeypatch, what, how
):
    monkeypatch.setattr(channel, "LOOK", 0.05)

    async def check() -> None:
        taskset = counting(1)
        other = taskset.environment(taskset.tasks("train")[1])
        await other.reset()
        before = await other.step(message("a"))
        told = await played(taskset, ["a", what, "b"])
        assert (tmp_path / "died").exists()
        after = await other.step(message("b"))  # its process is gone: it is played again in the new one
        assert before.metrics["pid"] != after.metrics["pid"]
        assert texts(told) == texts(await played(counting(0), ["a", what, "b"]))
        assert texts([after]) == texts(await played(counting(0), ["a", "b"], 1))[2:3]

    asyncio.run(check())
    told = f"a worker of counting is lost ({how}): another one plays its episodes again"
    assert said_by_workers == [told]


@pytest.mark.parametrize(
    "said, how",
    [("die", "exit status -9"), ("shout", "it gave no answer that can be read, and did not end")],
)
def test_an_episode_that_kills_every_worker_has_no_result(counting, monkeypatch, said, how):
    monkeypatch.setattr(channel, "LAST", 5.0 if said == "die" else 0.1)
    trajectory = asyncio.run(through_the_rollout(counting(1), said))
    assert (trajectory.failure, trajectory.error) == ("redo", f"step: the worker process died twice ({how})")


@pytest.mark.parametrize("said, what", [("raise", "KeyError: 'raise'"), ("leave", "SystemExit: 0")])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_fault_names_the_place_in_the_environments_own_file(counting, tmp_path, workers, said, what):
    """`exit()` too is a fault of the environment, and ends neither the worker nor the run."""
    raised = {"raise": "raise KeyError(said)", "leave": "raise SystemExit(0)"}[said]
    line = 1 + COUNTING.splitlines().index(f"            {raised}")
    trajectory = asyncio.run(through_the_rollout(counting(workers), said))
    assert trajectory.failure == "redo"
    assert trajectory.error == f"step: {what} ({tmp_path}/counting.py:{line})"


@pytest.mark.parametrize(
    "said, what", [("interrupt", "KeyboardInterrupt"), ("leave in a task", "SystemExit: 3"),
                   ("leave and go on", "SystemExit: 3")],
)  # fmt: skip
def test_what_would_end_a_worker_is_a_fault_of_the_episode(counting, tmp_path, said, what):
    taskset = counting(1)

    async def check() -> Any:
        before = await played(taskset, ["a"])
        return before, await through_the_rollout(taskset, said), await played(taskset, ["a"])

    before, left, after = asyncio.run(check())
    assert left.failure == "redo" and left.error.startswith(f"step: {what}")
    assert f"({tmp_path}/counting.py:" in left.error
    assert [told.metrics["pid"] for told in (before[1], after[1])] == [before[1].metrics["pid"]] * 2


def test_a_step_that_never_ends_is_ended(counting):
    taskset = counting(1)

    async def check() -> Any:
        hung = await through_the_rollout(taskset, "hang", left=0.05)
        return hung, await played(taskset, ["a"])

    hung, after = asyncio.run(check())
    assert (hung.failure, hung.stop_reason) == ("mask", "timeout")
    assert texts(after) == texts(asyncio.run(played(counting(0), ["a"])))


def test_a_worker_that_is_not_replaced_in_time_is_no_fault_of_the_policy(counting):
    settings = counting(1)._workers[0]._spec

    class Opening(WorkerProcess):
        async def ready(self) -> bytes:
            return await (super().ready() if len(started) == 1 else asyncio.Event().wait())

    started: list[Opening] = []

    def start(spec: Any) -> Opening:
        started.append(Opening(spec))
        return started[-1]

    taskset = Workers(settings_of(settings.type).model_validate_json(settings.settings), start)
    trajectory = asyncio.run(through_the_rollout(taskset, "die once", left=0.2))
    assert len(started) == 2 and trajectory.failure == "redo"
    assert trajectory.error == "step: its worker has not started within rollout.limits.timeout = 600 s"
    taskset.close()


def test_waiting_for_a_worker_is_not_the_environments_time(counting):
    """One worker, held by somebody else for a while."""
    taskset = counting(1)

    async def check() -> None:
        other = taskset.environment(taskset.tasks("train")[0])
        await other.reset()
        loop = asyncio.get_running_loop()
        task = taskset.tasks("train")[1]
        episode = Episode(task, taskset, Says("a"), None, EpisodeLimits(timeout=600), "a", 1)
        began, lock = loop.time(), taskset._workers[0].alone
        async with other.worker_slot():
            starting = asyncio.create_task(episode.start())
            while not lock._waiters:
                await asyncio.sleep(0)
            waits = loop.time()
            await asyncio.sleep(0.05)
            waited = loop.time() - waits
        await starting
        spent = 600 - episode.left
        await episode.close()
        assert spent <= loop.time() - began - waited

    asyncio.run(check())


def test_a_fork_goes_on_in_another_process_if_its_own_dies(counting):
    async def forked(taskset: Any, die: bool) -> list[str]:
        environment = taskset.environment(taskset.tasks("train")[0])
        await environment.reset()
        await environment.step(message("a"))
        twin = await environment.fork(7)
        first = await twin.step(message("b"))
        if die:
            os.kill(int(first.metrics["pid"]), signal.SIGKILL)
        steps = [first, await twin.step(message("c")), await environment.step(message("d"))]
        return texts(steps)

    here = asyncio.run(forked(counting(0), die=False))
    assert asyncio.run(forked(counting(1), die=False)) == here
    assert asyncio.run(forked(counting(1), die=True)) == here


def test_an_environment_without_an_expert_says_so(counting):
    async def check() -> None:
        taskset = counting(1)
        environment = taskset.environment(taskset.tasks("train")[0])
        await environment.reset()
        await environment.expert_reply()

    with pytest.raises(CapabilityError, match=r"Counter has no expert_reply\(\)"):
        asyncio.run(check())


def test_processes_end_with_the_task_set(counting):
    async def pid(taskset: Any) -> int:
        return int((await played(taskset, []))[-1].metrics["pid"])

    taskset = counting(1)
    found = asyncio.run(pid(taskset))
    os.kill(found, 0)
    taskset.close()
    with pytest.raises(ProcessLookupError):
        os.kill(found, 0)


def test_a_worker_has_only_the_keys_that_the_settings_name(counting, monkeypatch):
    for name in ("OPENAI_API_KEY", "HF_TOKEN", "ODD_SECRET", "NAMED_KEY", "SERPER_API_KEY"):
        monkeypatch.setenv(name, "secret")
    told = asyncio.run(played(counting(1, variables=("NAMED_KEY",)), ["keys"]))
    assert told[1].metrics == {"NAMED_KEY": 1.0}


def test_keys_of_tools_and_judges_are_named_by_their_settings():
    settings = Dataset.model_validate({
        "path": "x.jsonl", "variables": ("A",),
        "tools": ({"type": "mcp", "command": ("x",), "variables": ("B",)},),
        "reward": {"type": "judge", "model": "m", "key_variable": "C"},
    })  # fmt: skip
    assert {*named_in(settings)} == {"A", "B", "C"}


def test_settings_without_a_type_are_refused(counting):
    settings = counting(0)._settings.model_copy(update={"type": "", "workers": 1})
    with pytest.raises(ConfigError, match="environment counting: workers need its `type`, got none"):
        Workers(settings)


async def through_the_rollout(taskset: Any, said: str, left: float = 600.0) -> Any:
    """The trajectory of an episode whose every reply is `said`; `left`: seconds after its reset."""
    limits = EpisodeLimits(timeout=600, max_turns=3)
    episode = Episode(taskset.tasks("train")[0], taskset, Says(said), None, limits, "a", 1)
    try:
        await episode.start()
        episode.left = left
        while not episode.over:
            await episode.advance()
    finally:
        await episode.close()
    return episode.trajectory()
