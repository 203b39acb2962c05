"""Programs as environments: functions, commands whose processes never stay, and who gives the reward."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from silva.environments.foreign.command import CommandProgram, ProgramFault
from silva.environments.foreign.harness import HarnessEnvironment
from silva.errors import CapabilityError, RewardError
from silva.protocols import Driven, Endpoint, TaskSet
from silva.types import Message, Step, Task

pytestmark = pytest.mark.slow
ROWS = tuple({"question": f"{i} + {i} = ?", "answer": str(2 * i)} for i in range(12))
TASK = Task("t", "harness", 3, {"question": "1 + 1?", "n": 7}, "2")
PROGRAM = """
import threading
from silva.types import Step

async def slow(task, endpoint):
    return task.data["question"] == "1 + 1?"

def plain(task, endpoint):
    assert threading.current_thread().daemon
    return Step(rewards={"a": 0.5, "b": 0.25}, metrics={"calls": 2.0})

def posts(task, endpoint):
    return None

def lies(task, endpoint):
    return "much"
"""


async def nothing() -> Any: ...


ENDPOINT = Endpoint("http://127.0.0.1:1/s", "silva", nothing, nothing)


def made(tmp_path: Path, name: str, **settings: Any) -> Any:
    (tmp_path / "agent.py").write_text(PROGRAM)
    return HarnessEnvironment(function=f"{tmp_path / 'agent.py'}:{name}", rows=ROWS, **settings).taskset()


def result(tasks: Any) -> Step:
    async def play() -> Step:
        given = await tasks.harness.run(TASK, ENDPOINT)
        return await tasks.graded(TASK, given, [Message("user", "1 + 1?"), Message("assistant", "It is 2.")])

    return asyncio.run(play())


def test_a_function_gives_a_reward_a_step_or_nothing(tmp_path: Path) -> None:
    assert result(made(tmp_path, "slow")) == Step(rewards={"reward": 1.0}, metrics={"success": 1.0})
    step = result(made(tmp_path, "plain", solved_at=0.75))
    assert (step.rewards, step.metrics) == ({"a": 0.5, "b": 0.25}, {"success": 1.0, "calls": 2.0})
    graded = result(made(tmp_path, "posts", reward={"type": "math"}))
    assert (graded.rewards, graded.metrics["success"]) == ({"reward": 1.0}, 1.0)
    with pytest.raises(RewardError, match="neither returned nor posted a reward"):
        result(made(tmp_path, "posts"))
    with pytest.raises(ValueError, match="'much', expected a finite number"):
        result(made(tmp_path, "lies"))


def test_its_tasks_are_rows_and_no_environment_plays_them(tmp_path: Path) -> None:
    tasks = made(tmp_path, "plain", eval_share=0.5)
    tasks.gateway = None  # as whoever plays them sets it
    assert isinstance(tasks, Driven)
    found = [*tasks.tasks("train"), *tasks.tasks("eval")]
    assert {(task.data["question"], task.answer) for task in found} == {tuple(row.values()) for row in ROWS}
    with pytest.raises(CapabilityError, match="a program plays it from beginning to end"):
        tasks.environment(found[0])
    unused: TaskSet = tasks
    assert unused.tasks("eval")


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({}, "expected one of function, command and remote, got none"),
        ({"command": ("x",), "remote": True}, "got command and remote"),
        ({"remote": True, "workers": 1}, "a program runs by itself"),
    ],
)
def test_what_does_not_fit_is_refused(settings: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        HarnessEnvironment(rows=ROWS, **settings)


def run(script: str, *words: str, names: tuple[str, ...] = ()) -> Any:
    return asyncio.run(CommandProgram([sys.executable, "-c", script, *words], names).run(TASK, ENDPOINT))


def test_a_command_is_told_its_task_and_its_endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANTED", "yes")
    monkeypatch.setenv("HF_TOKEN", "secret")
    script = """if True:
        import json, os, sys
        kept = {k: v for k, v in os.environ.items()}
        json.dump([kept, sys.argv[2:], os.getcwd(), os.listdir()], open(sys.argv[1], "w"))
    """
    told = tmp_path / "told.json"
    assert run(script, str(told), "{question}", "{n} {other}", names=("WANTED",)) is None
    variables, words, folder, files = json.loads(told.read_text())
    assert words == ["1 + 1?", "7 {other}"] and files == [] and not Path(folder).exists()
    assert variables["OPENAI_BASE_URL"] == "http://127.0.0.1:1/s/v1"
    assert variables["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:1/s"
    assert json.loads(variables["SILVA_TASK"]) == {"id": "t", "seed": 3, "data": dict(TASK.data)}
    assert variables["WANTED"] == "yes" and not {"HF_TOKEN", "PYTHONPATH"} & variables.keys()


def test_a_command_that_fails_says_why() -> None:
    with pytest.raises(ProgramFault, match=r"status 3: .*no luck"):
        run("import sys; print('no luck'); sys.exit(3)")
    with pytest.raises(ProgramFault, match="status 137: it said nothing"):
        run("import os; os.kill(os.getpid(), 9)")
    with pytest.raises(ProgramFault, match="status 127: no-such-program: No such file"):
        asyncio.run(CommandProgram(["no-such-program"]).run(TASK, ENDPOINT))


FAMILY = """if True:
    import os, subprocess, sys, time
    sleep = [sys.executable, "-S", "-c", "import time; time.sleep(100)"]
    own = subprocess.Popen(sleep)
    away = subprocess.Popen(sleep, start_new_session=True)  # as a daemon does
    with open(sys.argv[1] + ".part", "w") as file:
        print(os.getpid(), own.pid, away.pid, file=file)
    os.rename(sys.argv[1] + ".part", sys.argv[1])
    if sys.argv[2] == "stays":
        time.sleep(100)
"""


def gone(file: Path) -> bool:
    return all(not Path(f"/proc/{number}").exists() for number in file.read_text().split())


@pytest.mark.skipif(sys.platform != "linux", reason="daemons are found on Linux")
@pytest.mark.parametrize("how", ["ends", "stays"])
def test_nothing_that_a_command_has_started_outlives_its_episode(how: str, tmp_path: Path) -> None:
    async def play() -> None:
        command = CommandProgram([sys.executable, "-S", "-c", FAMILY, str(tmp_path / "pids"), how])
        playing = asyncio.ensure_future(command.run(TASK, ENDPOINT))
        while not (tmp_path / "pids").exists():
            await asyncio.sleep(0.01)
        if how == "stays":
            playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)

    asyncio.run(asyncio.wait_for(play(), 60))
    assert gone(tmp_path / "pids")


@pytest.mark.skipif(sys.platform != "linux", reason="daemons are found on Linux")
def test_nothing_outlives_silva_when_it_is_killed(tmp_path: Path) -> None:
    words = [sys.executable, "-S", "-c", FAMILY, str(tmp_path / "pids"), "stays"]
    script = f"""if True:
        import asyncio
        from silva.environments.foreign.command import CommandProgram
        from silva.protocols import Endpoint
        from silva.types import Task
        asyncio.run(CommandProgram({words!r}).run(Task("t", "e", 0, {{}}), Endpoint("", "", None, None)))
    """
    silva = subprocess.Popen([sys.executable, "-c", script])
    wait(lambda: (tmp_path / "pids").exists() or silva.poll() is not None)
    silva.send_signal(signal.SIGKILL)
    silva.wait()
    wait(lambda: gone(tmp_path / "pids"))
    assert gone(tmp_path / "pids")


def wait(condition: Any) -> None:
    async def until() -> None:
        async with asyncio.timeout(300):
            while not condition():
                await asyncio.sleep(0.01)

    asyncio.run(until())
