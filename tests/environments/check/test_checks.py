"""Every fault that a check knows is found in an environment that has it, and in no other."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.environment_cases import OWN, small
from tests.environments import faulty
from tests.environments.faulty import Faulty

from silva.environments.bases.tool_dialogue import ToolDialogue, ToolDialogueSettings
from silva.environments.check.checks import Examination, examine
from silva.environments.check.play import guessed, value_for
from silva.environments.check.state import called
from silva.environments.tasks import Draft, listed
from silva.protocols import Toolset
from silva.rendering.tool_calls import write_calls
from silva.tools.fixed import Fixed
from silva.types import Message, Step, Task, ToolCall, ToolSpec

FAULTS = {
    "taskset": ("task set", "taskset() raised KeyError: 'no data'", "raise KeyError"),
    "json": ("task set", "is not the same after JSON", "def taskset"),
    "overlap": ("task set", "4 problems are in both splits", "def taskset"),
    "text": ("episodes", "reset() returned str, expected an Observation", "async def reset"),
    "empty": ("episodes", "reset() shows no message", "async def reset"),
    "role": ("episodes", "a message of the role assistant", "async def step"),
    "none": ("episodes", "step() returned NoneType, expected a Step", "async def step"),
    "nan": ("episodes", "rewards['right'] is nan, expected a finite number", "async def step"),
    "success": ("episodes", 'metrics["success"] = None', "async def step"),
    "endless": ("episodes", "did not end in 200 turns", "async def step"),
    "chance": ("equal seeds", "give another episode the second time", "async def reset"),
    "prompt": ("equal seeds", "another episode of the same task begins with another text", "async def reset"),
    "shared": ("equal seeds", "give another episode the second time", "async def step"),
    "crash": (
        "nonsense",
        "step() raised IndexError: list index out of range, after an empty reply",
        "split()[0]",
    ),
    "pays": ("nonsense", "earns 0, more than any of 8 episodes at random", "async def step"),
    "close": ("closing", "close() raised AttributeError", "del self.task"),
    "expert": ("expert", "its expert succeeds in none of 8 episodes", "def expert_reply"),
    "partial": ("rewards", "an episode that failed earned 1, one that succeeded 1", "async def step"),
}
FaultyEpisode = faulty.Episode
LINES = Path(faulty.__file__).read_text().splitlines()


def wrong(settings) -> list[tuple[str, str, str]]:
    return [
        (check.name, finding.text, finding.where)
        for check in examine(settings)
        for finding in check.findings
        if finding.kind == "wrong"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_and_its_line_is_named(fault: str) -> None:
    name, words, line = FAULTS[fault]
    found = wrong(Faulty(fault=fault))
    assert any(check == name and words in text for check, text, _ in found), found
    file, _, number = next(where for check, text, where in found if words in text).rpartition(":")
    assert file == faulty.__file__ and line in LINES[int(number) - 1]


def test_what_is_refused_is_said_once_and_checked_no_further() -> None:
    (check,) = examine(Faulty(fault="refused"))
    assert [(finding.kind, finding.text) for finding in check.findings] == [("wrong", "refused: no images")]


def test_without_a_fault_nothing_is_found_and_what_was_seen_is_said() -> None:
    checks = examine(Faulty())
    assert wrong(Faulty()) == []
    assert {check.name: check.done for check in checks} == {
        "task set": "27 train tasks, 4 eval tasks",
        "episodes": "8 at random, 8 turns",
        "equal seeds": "4 episodes three times, once side by side",
        "nonsense": "6 kinds of replies that are none",
        "closing": "before reset(), and twice",
        "forks": "same state, own noise; 8 played to their end",
        "tools": "none are offered",
        "expert": "succeeds in 8 of 8 episodes",
        "rewards": checks[-1].done,
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["guess_number", "calculator", "reverse_text", "dataset", "wiki_search"])
def test_nothing_is_wrong_with_environments_of_silva(name: str) -> None:
    assert name in OWN
    assert wrong(small(name, eval_size=4, train_size=20)) == []


class Bank(ToolDialogueSettings):
    """Move money. The tools have a state, which `how` shares between an episode and its forks, or not."""

    how: str = "own"
    eval_size: int = 4

    def taskset(self) -> Any:
        drafts = [Draft({"amount": n}, n) for n in range(1, 41)]
        return listed(self, drafts, lambda task: BankEpisode(self, task, []))


class BankEpisode(ToolDialogue):
    settings: Bank

    def __init__(self, settings: Bank, task: Task, toolsets: Sequence[Toolset]) -> None:
        super().__init__(settings, task, toolsets)
        self.account, self.moved = [100], False
        if settings.how == "methods":
            self.toolsets = [Fixed([self.move])]
        if settings.how == "closure":
            account = self.account

            async def move(amount: int) -> str:
                """Take money out."""
                account[0] -= amount
                return str(account[0])

            self.toolsets = [Fixed([move])]

    def opening(self) -> Sequence[Message]:
        return [self.say(f"Take out {self.task.answer}.")]

    def own_tools(self) -> Sequence[Callable[..., Any]]:
        return [self.move] if self.settings.how == "own" else []

    async def move(self, amount: int) -> str:
        """Take money out."""
        self.account[0] -= amount
        return str(self.account[0])

    async def answered(self, message: Message) -> Step:
        self._end()
        right = float(self.account[0] == 100 - self.task.answer)
        return Step(rewards={"moved": right}, terminated=True, metrics={"success": right})

    async def out_of_calls(self, message: Message) -> Step:
        self._end()
        return Step(rewards={"moved": 0.0}, truncated=True, metrics={"success": 0.0})

    def expert_reply(self) -> str:
        if self.calls.left < self.settings.max_tool_calls:
            return "done"
        return write_calls([ToolCall("move", {"amount": self.task.answer})])

    def random_reply(self, seed: int) -> str:
        return "done"


def test_tools_with_a_state_belong_to_a_fork_of_their_own() -> None:
    assert wrong(Bank()) == []
    assert {check.name: check.done for check in examine(Bank())}["tools"] == "1 called"


@pytest.mark.parametrize("how", ["methods", "closure"])
def test_tools_whose_state_a_fork_shares_are_found(how: str) -> None:
    findings = [(check.name, f.kind, f.text) for check in examine(Bank(how=how)) for f in check.findings]
    if how == "methods":
        words = "tool move is a method of the episode BankEpisode, so a fork would use the original's state"
        assert any(name == "forks" and words in text for name, _, text in findings), findings
    else:
        faults = [text for name, kind, text in findings if name == "forks" and kind == "wrong"]
        assert any("it earned 0 in place of 1" in text for text in faults), findings


def test_a_tool_that_always_raises_is_named() -> None:
    class Broken(BankEpisode):
        async def move(self, amount: int) -> str:
            """Take money out."""
            raise KeyError("no bank")

    settings = Bank()
    examination = Examination(settings)
    examination.taskset = listed(
        settings, [Draft({"n": n}, n) for n in range(40)], lambda task: Broken(settings, task, [])
    )
    count, notes = asyncio.run(called(examination._unplayed, examination._some_tasks(1)[0]))
    assert count == 1 and notes == [
        "the tool move raised in 3 of 3 made-up calls: Error: KeyError: 'no bank'"
    ]


class Bare:
    """The methods that every environment has, and no others."""

    def __init__(self, settings, task) -> None:
        inner = FaultyEpisode(settings, task)
        self.reset, self.step, self.close = inner.reset, inner.step, inner.close


def test_an_environment_without_fork_and_expert_is_told_what_it_lacks(monkeypatch) -> None:
    settings = Faulty()
    monkeypatch.setattr(faulty, "Episode", Bare)
    notes = [finding.text for check in examine(settings) for finding in check.findings]
    assert notes == [
        "it has no fork(seed): recipes that branch cannot use it",
        "it has no expert_reply() and random_reply(seed): no warm start, no baselines",
    ]


def test_guessed_calls_fit_their_schema() -> None:
    schema = {
        "type": "object",
        "properties": {
            "n": {"type": "integer", "minimum": 3, "maximum": 5},
            "kind": {"enum": ["a", "b"]},
            "more": {"type": "array", "items": {"type": "boolean"}},
            "maybe": {"anyOf": [{"type": "null"}, {"type": "string"}]},
        },
        "required": ["n", "kind"],
    }
    for seed in range(200):
        value = value_for(schema, random.Random(seed))
        assert 3 <= value["n"] <= 5 and value["kind"] in ("a", "b")
        assert all(isinstance(each, bool) for each in value.get("more", []))
        assert isinstance(value.get("maybe"), str | None)
    messages = [guessed([ToolSpec("t", "", schema)], random.Random(seed), 0) for seed in range(50)]
    calls = [message.tool_calls[0].name for message in messages if message.tool_calls]
    assert set(calls) == {"t"} and 20 < len(calls) < 50
