"""A person's episode, with what is read and written."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from silva.environments.play import HELP, play
from silva.environments.worlds.calculator import Calculator
from silva.environments.worlds.frozen_lake import FrozenLake
from silva.environments.worlds.guess_number import GuessNumber
from silva.models.tiny import tiny_tokenizer
from silva.rendering.renderer import Renderer
from silva.types import Task

LAKE = Task("l", "frozen_lake", 0, {"map": ["SF", "HG"]})
CALL = {"name": "calculator", "arguments": {"expression": "3 + 7"}}
SUM = Task("c", "calculator", 0, {"questions": ["What is 3 + 7?"], "calls": [[CALL]]}, ["10"])


def as_read(messages, tools, prefill) -> str:
    renderer = Renderer(tiny_tokenizer())
    return renderer.decode(renderer.context(messages, tools, prefill=prefill))


def session(settings, task: Task, lines: Sequence[str]) -> tuple[dict[str, float], list[str], list[str]]:
    written: list[str] = []
    rest = list(lines)

    def read(prompt: str) -> str:
        assert prompt == "> "
        if not rest:
            raise EOFError
        return rest.pop(0)

    rewards = asyncio.run(play(settings.taskset(), task, read, written.append, as_read))
    return rewards, written, rest


def test_bare_actions_are_put_into_the_format() -> None:
    settings = FrozenLake(size=2, eval_size=1, max_actions=5, format="strict", style="compact")
    rewards, written, rest = session(settings, LAKE, ["fly", "r", "Down", "unused"])
    assert rewards == {"goal": 1.0} and rest == ["unused"]
    assert written[1:] == [
        "P_\nOG\n5",
        "?\nP_\nOG\n4",
        "_P\nOG\n3",
        "__\nO√\n2",
        "The episode is over: goal 1; success 1",
    ]


def test_a_tool_is_called_by_its_name_and_no_command_is_taken_for_an_answer() -> None:
    lines = ["/account", '/tool calculator {"expression": "3+7"}', "/prompt", "/expert", "unused"]
    rewards, written, rest = session(Calculator(), SUM, lines)
    assert '/tool NAME {"argument": "value"}' in written[0] and "/expert" in written[0]
    assert written[3].startswith("/account is no command, and was not sent.")
    assert written[4] == "[tool] 10"
    assert written[5].startswith("<|system|>You can call these tools") and written[5].endswith(
        "<|assistant|>"
    )
    assert "<tool_response>\n10\n</tool_response>" in written[5]
    assert rewards == {"correct": 1.0} and rest == ["unused"]


def test_tools_can_be_called_by_hand() -> None:
    lines = [
        "/tool {oops",
        '/tool {"expression": "3+7"}',
        '/tool {"name": "calculator", "arguments": {}}',
        "10",
    ]
    rewards, written, _ = session(Calculator(), SUM, [*lines, "10"])
    assert rewards == {"correct": 1.0}
    assert written[1].startswith("[tool] calculator: Compute an arithmetic expression")
    assert written[3].startswith("[tool] Error: malformed tool call: Expecting property name")
    assert written[4] == "[tool] 10"
    assert written[5] == "[tool] Error: calculator: argument expression: Field required"
    assert written[-1] == "The episode is over: correct 1; success 1"


def test_the_expert_can_take_over_and_a_player_can_leave() -> None:
    rewards, written, _ = session(Calculator(), SUM, ["/expert", "/expert"])
    assert rewards == {"correct": 1.0} and written[-2] == "10"
    guess = Task("g", "g", 0, {"low": 1, "high": 7}, 6)
    assert session(GuessNumber(), guess, ["3", "/quit", "6"])[0] == {"found": 0.0}
    assert session(GuessNumber(), guess, [])[0] == {}
    cut_short = session(GuessNumber(guesses=1), guess, ["2"])[1]
    assert cut_short[-1] == "The episode was cut short: found 0; success 0"


def test_only_what_the_world_has_is_offered() -> None:
    rewards, written, _ = session(FrozenLake(size=2, eval_size=1), LAKE, ["/tool {}", "r||d"])
    assert written[0] == f"Write a reply. /expert plays an expert's reply, {HELP}"
    assert written[2] == "This environment has no tools." and rewards == {"goal": 1.0}
    bare = Task("c", "calculator", 0, {"questions": ["What is 3 + 7?"]}, ["10"])
    written = session(Calculator(), bare, ["/expert", "/quit"])[1]
    assert "/expert" not in written[0] and written[-1] == "This environment has no expert."
