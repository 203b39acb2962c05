"""ScienceWorld: against a simulator of one room, and against the package where it and Java are installed."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
from tests.environments.foreign.playing import played, texts, wrong

from silva.environments.foreign import scienceworld
from silva.environments.foreign.scienceworld import ScienceWorld
from silva.environments.foreign.scienceworld_engine import Answer, Experiment
from silva.errors import ConfigError

GOLD = ("look around", "pick up Lighter", "move lighter to red box")


class Simulator:
    """One room: the lighter scores 25, and in the box it solves the task. Focusing on a wall fails."""

    def load(self, experiment: Experiment) -> Answer:
        assert experiment.simplify == "easy"
        self.got: list[str] = []
        return self.step("look around")

    def step(self, command: str) -> Answer:
        self.got.append(command)
        if command == "focus on wall":
            return Answer("You focus on the wall.", -100, True)
        solved = self.got[-2:] == ["pick up lighter", "move lighter to red box"]
        score = 100 if solved else 10 + 15 * ("pick up lighter" in self.got)  # a world may begin with some
        known = command in ("look around", *self.commands(), "move lighter to red box")
        return Answer(f"So: {command}." if known else "No known action matches that input.", score, solved)

    def task(self) -> str:
        return "Find a lighter."

    def templates(self) -> list[str]:
        return ["pick up OBJ", "wait1"]

    def commands(self) -> list[str]:
        return ["focus on wall", "pick up lighter"]

    def close(self) -> None:
        pass


@pytest.fixture
def fake(monkeypatch):
    """Settings, in place of the package and its simulator."""
    monkeypatch.setitem(sys.modules, "scienceworld", types.ModuleType("scienceworld"))
    monkeypatch.setattr(scienceworld, "simulator", Simulator)
    monkeypatch.setattr(scienceworld, "gold_path", lambda _: GOLD)
    parts = {"train": range(6), "dev": range(6, 9), "test": range(9, 12)}
    monkeypatch.setattr(scienceworld, "variations", lambda tasks: dict.fromkeys(tasks, parts))
    return ScienceWorld(tasks=("boil", "melt"), max_actions=6)


def test_the_first_text_has_task_forms_and_room(fake) -> None:
    first, _ = played(fake)
    text = first.messages[0].content
    assert text.startswith(
        "Find a lighter.\nForms of commands, with the names of things for OBJ: pick up OBJ,"
    )
    assert text.endswith("So: look around.\nActions left: 6.")
    shown, _ = played(fake.model_copy(update={"show_commands": True}))
    assert "\nPossible commands: focus on wall, pick up lighter.\n" in shown.messages[0].content


def test_the_score_pays_as_it_comes_and_a_wrong_focus_takes_it_back(fake) -> None:
    _, won = played(fake, "pick up lighter", "move lighter to red box")
    assert [step.rewards["score"] for step in won] == [0.25, 0.75]
    assert won[-1].terminated and won[-1].metrics["success"] == 1.0
    _, lost = played(fake, "pick up lighter", "focus on wall")
    assert [step.rewards["score"] for step in lost] == [0.25, -0.25]
    assert lost[-1].terminated and lost[-1].metrics["success"] == 0.0
    _, bare = played(fake.model_copy(update={"partial": False}), "pick up lighter", "move lighter to red box")
    assert [step.rewards["score"] for step in bare] == [0.0, 1.0]


def test_what_is_not_understood_is_answered(fake) -> None:
    _, (step, empty) = played(fake, "sing", "")
    assert texts([step]) == ["No known action matches that input.\nActions left: 5."]
    assert step.metrics == {"action_is_valid": 1.0, "action_is_effective": 0.0}
    assert empty.metrics["action_is_valid"] == 0.0 and empty.shaped["format"] == -0.1


def test_the_package_says_what_is_held_out(fake) -> None:
    def numbers(settings: ScienceWorld, split) -> set[tuple[str, int]]:
        return {(task.data["task"], task.data["variation"]) for task in settings.taskset().tasks(split)}

    both = ("boil", "melt")
    assert numbers(fake, "train") == {(task, number) for task in both for number in range(6)}
    assert numbers(fake, "eval") == {(task, number) for task in both for number in range(9, 12)}
    dev = fake.model_copy(update={"held_out": "dev"})
    assert numbers(dev, "eval") == {(task, number) for task in both for number in range(6, 9)}


def test_nothing_is_wrong_with_the_fake(fake) -> None:
    assert wrong(fake) == []


def test_electrical_tasks_need_electrical_actions() -> None:
    with pytest.raises(ValueError, match="got noElectricalAction, but power-component needs"):
        ScienceWorld(tasks=("boil", "power-component"), simplify=("noElectricalAction",))


def test_a_missing_package_is_named_with_the_command(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "scienceworld", None)
    with pytest.raises(ConfigError, match=r"pip install 'scienceworld>=1\.2\.3'"):
        ScienceWorld().taskset()


@pytest.fixture
def real():
    pytest.importorskip("scienceworld", reason="pip install scienceworld")
    if not shutil.which("java"):
        pytest.skip("no java")
    return ScienceWorld(tasks=("find-non-living-thing",), max_actions=20, train_size=2, eval_size=2)


def test_no_java_is_said(real, monkeypatch) -> None:
    from silva.environments.foreign.scienceworld_engine import JavaSimulator

    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("JAVA_HOME", raising=False)
    with pytest.raises(ConfigError, match=r"java does not start .*: install Java"):
        JavaSimulator()


@pytest.mark.slow
def test_the_real_expert_solves_it(real, expert_rate) -> None:
    assert expert_rate(real, 2) == (1.0, 1.0)


@pytest.mark.slow
def test_the_real_simulator_repeats_itself(real, tmp_path, monkeypatch) -> None:
    """In new Java programs too: in art studios three cups stand in an order that is hashed."""
    monkeypatch.chdir(tmp_path)
    from silva.environments.foreign.scienceworld_engine import JavaSimulator

    said = ["open door to art studio", "teleport to art studio", "look around"]

    def seen(simulator: JavaSimulator) -> list[object]:
        start = simulator.load(Experiment("chemistry-mix-paint-secondary-color", 1, "easy"))
        return [start, *(simulator.step(command) for command in said), simulator.commands()]

    one, other = JavaSimulator(), JavaSimulator()
    other.load(Experiment("boil", 3, "easy"))
    assert seen(one) == seen(other) == seen(one)
    one.close()
    other.close()
    assert not [*tmp_path.iterdir()], "the program writes a file where it is"


@pytest.mark.slow
def test_java_ends_with_a_process_that_is_killed(real) -> None:
    code = (
        "from silva.environments.foreign.scienceworld_engine import JavaSimulator\n"
        "import time; print(JavaSimulator()._process.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        java = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
    until = time.monotonic() + 120
    status = Path(f"/proc/{java}/status")
    while status.exists() and "State:\tZ" not in status.read_text():
        assert time.monotonic() < until, "java lives on"
        time.sleep(0.05)


@pytest.mark.slow
def test_a_real_fork_goes_on_alike(real) -> None:
    taskset = real.taskset()
    episode = taskset.environment(taskset.tasks("train")[0])

    async def run() -> None:
        from silva.types import Message

        await episode.reset()
        await episode.step(Message("assistant", episode.expert_reply()))
        twin = await episode.fork(1)
        reply = Message("assistant", episode.expert_reply())
        assert await twin.step(reply) == await episode.step(reply)
        await twin.close()
        await episode.close()

    asyncio.run(run())
