"""Task sets of verifiers, where it is installed: its openai and mcp are older than Silva's."""

from __future__ import annotations

import pytest
from tests.environments.foreign.playing import call, first_task, played, wrong

from silva.environments.foreign.verifiers import Verifiers
from silva.errors import CapabilityError, ConfigError

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


def answers(settings, *replies):
    """Replies are functions of the right number."""
    number = int(first_task(settings).data["messages"][-1]["content"].split()[0]) + 1
    return played(settings, *(reply(number) for reply in replies))


def test_a_task_with_a_tool_and_two_weighted_rewards(sums) -> None:
    observation, steps = answers(
        sums(), lambda n: call("adder_add", a=n - 1, b=1), lambda n: f"<think>So.</think>{n}"
    )
    assert [message.role for message in observation.messages] == ["system", "user"]
    assert [spec.name for spec in observation.tools] == ["adder_add"]
    assert steps[1].rewards == {"reward": 1.0}
    assert steps[1].metrics == {"turns": 2.0, "success": 1.0}


def test_half_of_it_is_no_success(sums) -> None:
    _, steps = answers(sums(), str)
    assert steps[0].rewards == {"reward": 0.75} and steps[0].metrics["success"] == 0.0


def test_a_reward_that_raises_is_no_result(sums) -> None:
    with pytest.raises(Exception, match="the grader is broken"):
        answers(sums("Broken"), str)


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
    assert wrong(sums()) == []
