"""Task sets of verifiers, where it is installed: its openai and mcp are older than Silva's."""

from __future__ import annotations

import asyncio
import sys

import pytest

from silva.environments.check.checks import examine
from silva.environments.foreign.verifiers import Verifiers
from silva.errors import CapabilityError, ConfigError
from silva.types import Message, ToolCall

SUMS = '''
import verifiers.v1 as vf

class SumData(vf.TaskData):
    answer: int

class SumConfig(vf.TasksetConfig):
    count: int = 60

class Adder(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    def add(self, a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b

class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=0.75)
    async def exact(self, trace) -> float:
        return float(trace.last_reply == str(self.data.answer))

    @vf.reward(weight=0.25)
    async def used_a_tool(self, trace) -> float:
        return float(any(m.content == str(self.data.answer) for m in trace.tool_messages))

    @vf.metric
    async def turns(self, trace) -> float:
        return float(trace.num_turns)

    @classmethod
    def toolsets(cls, config):
        return [Adder(vf.ToolsetConfig())]

class Sums(vf.Taskset[SumTask, SumConfig]):
    TASK = SumTask
    def load(self):
        for n in range(self.config.count):
            yield self.TASK(SumData(prompt=f"{n} + 1?", system_prompt="Add.", answer=n + 1), self.config.task)

class NeedsRuntime(SumTask):
    @vf.reward
    async def files(self, trace, runtime) -> float:
        return 1.0

class Boxed(Sums):
    TASK = NeedsRuntime

class Raises(SumTask):
    @vf.reward
    async def broken(self, trace) -> float:
        raise RuntimeError("the grader is broken")

class Broken(Sums):
    TASK = Raises

class Images(SumTask):
    @vf.stop
    async def early(self, trace: vf.Trace) -> bool:
        return True

class Stops(Sums):
    TASK = Images
'''


@pytest.fixture
def sums(tmp_path):
    pytest.importorskip("verifiers.v1", reason="pip install 'verifiers>=0.4,<0.5'")
    file = tmp_path / "sums.py"
    file.write_text(SUMS)
    return lambda name="Sums", **keys: Verifiers(taskset_id=f"{file}:{name}", **{"eval_size": 4, **keys})


def played(settings, *replies):
    taskset = settings.taskset()
    task = taskset.tasks("train")[0]
    environment = taskset.environment(task)
    number = int(task.data["messages"][-1]["content"].split()[0]) + 1

    async def run():
        observation = await environment.reset()
        return observation, [await environment.step(reply(number)) for reply in replies]

    return asyncio.run(run())


def add(number: int) -> Message:
    return Message("assistant", "", tool_calls=(ToolCall("adder_add", {"a": number - 1, "b": 1}),), id="r")


def test_a_task_with_a_tool_and_two_weighted_rewards(sums) -> None:
    observation, steps = played(sums(), add, lambda n: Message("assistant", f"<think>So.</think>{n}"))
    assert [message.role for message in observation.messages] == ["system", "user"]
    assert [spec.name for spec in observation.tools] == ["adder_add"]
    assert steps[1].rewards == {"reward": 1.0}
    assert steps[1].metrics == {"turns": 2.0, "success": 1.0}


def test_half_of_it_is_no_success(sums) -> None:
    _, steps = played(sums(), lambda n: Message("assistant", str(n)))
    assert steps[0].rewards == {"reward": 0.75} and steps[0].metrics["success"] == 0.0


def test_a_reward_that_raises_is_no_result(sums) -> None:
    with pytest.raises(Exception, match="the grader is broken"):
        played(sums("Broken"), lambda n: Message("assistant", str(n)))


@pytest.mark.parametrize(
    ("name", "words"), [("Boxed", r"needs a runtime, for files\(\)"), ("Stops", "needs stops")]
)
def test_what_silva_cannot_play_is_refused_at_the_start(sums, name, words) -> None:
    with pytest.raises(CapabilityError, match=words):
        sums(name).taskset()


def test_its_configuration_is_checked(sums) -> None:
    assert len(sums(config={"count": 30}, eval_size=2).taskset()._source._all) == 30
    with pytest.raises(ConfigError, match="does not load with this `config`"):
        sums(config={"number": 30}).taskset()
    with pytest.raises(ConfigError, match=r"is no verifiers\.v1\.Taskset"):
        sums("SumTask").taskset()
    with pytest.raises(ConfigError, match="no task set 'no-such-taskset'"):
        Verifiers(taskset_id="no-such-taskset").taskset()


def test_nothing_is_wrong_with_it(sums) -> None:
    assert [f for check in examine(sums()) if not check.ok for f in check.findings] == []


def test_a_missing_library(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)  # as if it were not installed
    with pytest.raises(
        ConfigError, match=r"environment verifiers: cannot import verifiers.*pip install 'verifiers"
    ):
        Verifiers(taskset_id="gsm8k").taskset()
