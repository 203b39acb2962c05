"""Environments of verifiers v0, where `load_environment` is installed (verifiers 0.1.8)."""

from __future__ import annotations

import pytest
from tests.environments.foreign.playing import call, first_task, fork_refused, played, wrong

from silva.environments.foreign.verifiers import Verifiers
from silva.errors import CapabilityError, ConfigError

SUMS = '''
import verifiers as vf
from datasets import Dataset

def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b

def load_environment(count: int = 60, broken: bool = False):
    rows = Dataset.from_list([{"question": f"{n} + 1?", "answer": str(n + 1)} for n in range(count)])

    def exact(completion, answer):
        if broken:
            raise RuntimeError("the grader is broken")
        return float(completion[-1]["content"].strip() == answer)

    async def turns(state):
        return float(len(state["trajectory"]))

    rubric = vf.Rubric(funcs=[exact, turns], weights=[1.0, 0.0])
    return vf.ToolEnv(dataset=rows, system_prompt="Add.", rubric=rubric, tools=[add], max_turns=5)
'''


@pytest.fixture
def sums(tmp_path, monkeypatch):
    verifiers = pytest.importorskip("verifiers", reason="pip install verifiers==0.1.8")
    if not hasattr(verifiers, "load_environment"):
        pytest.skip("the installed verifiers has no load_environment: it is not v0")
    (tmp_path / "sums_v0.py").write_text(SUMS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return lambda **config: Verifiers(taskset_id="sums-v0", config=config, eval_size=4)


def answers(settings, *replies):
    """Replies are functions of the right number."""
    number = int(first_task(settings).answer)
    return played(settings, *(reply(number) for reply in replies))


def test_its_own_loop_is_played_reply_by_reply(sums) -> None:
    observation, (called, end) = answers(sums(), lambda n: call("add", a=n - 1, b=1), str)
    assert (observation.messages[0].role, observation.messages[0].content) == ("system", "Add.")
    assert [spec.name for spec in observation.tools] == ["add"]
    assert called.observation.messages[0].role == "tool" and not called.terminated
    assert end.terminated and end.rewards == {"reward": 1.0}
    assert end.metrics == {"exact": 1.0, "turns": 2.0, "success": 1.0}


def test_a_wrong_answer_earns_nothing(sums) -> None:
    _, (end,) = answers(sums(), lambda n: str(n + 1))
    assert end.rewards == {"reward": 0.0} and end.metrics["success"] == 0.0


def test_a_reward_function_that_raises_is_no_result(sums) -> None:
    """v0 itself gives 0 for it."""
    with pytest.raises(RuntimeError, match="a reward function raised") as error:
        answers(sums(broken=True), str)
    assert str(error.value.__cause__) == "the grader is broken"


def test_nothing_is_wrong_with_it(sums) -> None:
    assert wrong(sums()) == []


def test_what_cannot_be_loaded_or_forked_is_said(sums) -> None:
    with pytest.raises(ConfigError, match="unexpected keyword argument 'number'"):
        sums(number=3).taskset()
    with pytest.raises(CapabilityError, match="cannot be forked"):
        fork_refused(sums())
