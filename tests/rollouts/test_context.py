"""What a model is shown of a dialogue: tables worked by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from silva.config.sections import ContextSettings, FullContext, HideObservations, LastTurns, SingleTurn
from silva.rollouts.context import TurnsSoFar
from silva.types import Message, ToolCall


def user(text: str) -> Message:
    return Message("user", text)


def result(text: str) -> Message:
    return Message("tool", text, name="f")


def reply(number: int, thought: str | None = None, **more: Any) -> Message:
    return Message("assistant", f"a{number}", reasoning=thought, id=f"e/{number}", **more)


def call(number: int, **more: Any) -> Message:
    return reply(number, tool_calls=(ToolCall("f", {"x": number}),), **more)


TASK = [Message("system", "rules"), user("task")]
GAME = [*TASK, reply(0), user("o1"), reply(1), user("o2"), reply(2), user("o3")]
TOOLS = [*TASK, call(0), result("r0"), call(1), result("r1"), reply(2), user("again"), call(3), result("r3")]


def dialogue(messages: list[Message]) -> TurnsSoFar:
    return TurnsSoFar.of(messages, {"e/0", "e/1", "e/2", "e/3"})


def words(messages: list[Message], how: ContextSettings, dropped: int = 0) -> str:
    return " ".join(message.content for message in dialogue(messages).shown(how, dropped))


@pytest.mark.parametrize(
    ("how", "dropped", "game", "tools"),
    [
        (FullContext(), 0, "a0 o1 a1 o2 a2 o3", "a0 r0 a1 r1 a2 again a3 r3"),
        (FullContext(), 1, "o1 a1 o2 a2 o3", "a1 r1 a2 again a3 r3"),
        (FullContext(), 2, "o2 a2 o3", "a2 again a3 r3"),
        (FullContext(), 3, "o3", "again a3 r3"),
        (LastTurns(turns=9), 0, "a0 o1 a1 o2 a2 o3", "a0 r0 a1 r1 a2 again a3 r3"),
        (LastTurns(turns=2), 0, "o1 a1 o2 a2 o3", "a2 again a3 r3"),
        (LastTurns(turns=1), 0, "o2 a2 o3", "again a3 r3"),
        (LastTurns(turns=0), 0, "o3", "again a3 r3"),
        (LastTurns(turns=2), 2, "o2 a2 o3", "a2 again a3 r3"),
        (HideObservations(), 0, "a0 ... a1 ... a2 o3", "a0 ... a1 ... a2 ... a3 r3"),
        (HideObservations(first=2), 0, "a0 o1 a1 ... a2 o3", "a0 r0 a1 ... a2 ... a3 r3"),
        (HideObservations(last=2), 0, "a0 ... a1 o2 a2 o3", "a0 ... a1 ... a2 again a3 r3"),
        (HideObservations(first=3, last=9), 0, "a0 o1 a1 o2 a2 o3", "a0 r0 a1 r1 a2 again a3 r3"),
        (HideObservations(roles=("tool",)), 0, "a0 o1 a1 o2 a2 o3", "a0 ... a1 ... a2 again a3 r3"),
        (HideObservations(), 1, "... a1 ... a2 o3", "a1 ... a2 ... a3 r3"),
    ],
)
def test_what_is_shown_after_the_task(how: ContextSettings, dropped: int, game: str, tools: str) -> None:
    """A turn is a reply with the observation it answers; no result stands without its call."""
    assert words(GAME, how, dropped) == f"rules task {game}"
    assert words(TOOLS, how, dropped) == f"rules task {tools}"


def test_a_single_turn_is_one_user_message() -> None:
    shown = dialogue(GAME).shown(SingleTurn(turns=2))
    assert [m.role for m in shown] == ["system", "user"]
    assert shown[1].content == "task\n\nEarlier turns:\n\no1\n\nYou: a1\n\no2\n\nYou: a2\n\nNow:\n\no3"
    assert words(GAME, SingleTurn(turns=0)) == "rules task\n\nNow:\n\no3"
    assert words(GAME[:2], SingleTurn()) == "rules task"
    examples = [user("q"), Message("assistant", "a"), *GAME[1:4]]
    assert words(examples, SingleTurn()) == "q a task\n\nEarlier turns:\n\nYou: a0\n\nNow:\n\no1"
    assert [m.content for m in TurnsSoFar.of(GAME[2:4], {"e/0"}).shown(SingleTurn())] == [
        "Earlier turns:\n\nYou: a0\n\nNow:\n\no1"
    ]


def test_a_single_turn_writes_calls_as_they_were_said_and_thoughts_only_if_asked() -> None:
    said = "<f>0</f>"
    for raw in (f"<think>hm</think>{said}", f"hm</think>{said}"):  # the prompt may have opened the thought
        messages = [*TASK, call(0, thought="hm", raw=raw), result("r0")]
        assert f"You: {said}\n\nNow" in words(messages, SingleTurn())
        kept = words(messages, SingleTurn(strip_thoughts=False))
        assert f"You: <think>\nhm\n</think>\n\n{said}\n\nNow" in kept
    malformed = reply(0, raw="<f>", errors=("malformed",))
    assert "You: <f>\n\nNow" in words([*TASK, malformed, result("Error: malformed")], SingleTurn())
    nameless = words([*TASK, call(0), result("r0")], SingleTurn())
    assert 'You: a0\n<tool_call>\n{"name": "f", "arguments": {"x": 0}}\n</tool_call>\n\nNow' in nameless


def test_thoughts_are_stripped_from_replies_and_from_nothing_else() -> None:
    example = Message("assistant", "a", reasoning="shown to the model as an example")
    messages = [*TASK, example, user("now you"), reply(0, "hm"), user("o1"), reply(1), user("o2")]
    for how in (FullContext, LastTurns, HideObservations):
        shown = dialogue(messages).shown(how(strip_thoughts=True))
        assert [m.reasoning for m in shown if m.role == "assistant"] == [example.reasoning, None, None]
        assert [m for m in shown if m.id == "e/1"] == [messages[6]]  # had none: it is the same message
        assert [m.reasoning for m in dialogue(messages).shown(how()) if m.id] == ["hm", None]


def test_the_oldest_turns_are_dropped_one_by_one() -> None:
    def order(messages: list[Message], how: ContextSettings) -> list[int]:
        found, dropped = [], 0
        while (following := dialogue(messages).drop_oldest(how, dropped)) is not None:
            assert words(messages, how, following) != words(messages, how, dropped)
            found.append(dropped := following)
        return found

    assert order(GAME, FullContext()) == [1, 2, 3]
    assert order(GAME, LastTurns(turns=2)) == [2, 3]
    assert order(GAME, SingleTurn(turns=1)) == [3]
    assert order(GAME, LastTurns(turns=0)) == [] and order(GAME[:2], FullContext()) == []
    assert order(TOOLS, FullContext()) == [1, 2, 3]  # the last call stays with its result


MODES = st.one_of(
    st.builds(FullContext),
    st.builds(LastTurns, turns=st.integers(0, 4)),
    st.builds(SingleTurn, turns=st.integers(0, 4)),
    st.builds(HideObservations, first=st.integers(1, 4), last=st.integers(1, 4)),
)


@pytest.mark.slow
@given(st.lists(st.booleans(), max_size=6), MODES, st.integers(0, 6))
@settings(deadline=None, derandomize=True, max_examples=200)
def test_the_task_and_the_newest_observation_always_stay(
    tools: list[bool], how: ContextSettings, dropped: int
) -> None:
    messages = list(TASK)
    for i, tool in enumerate(tools):
        messages += [call(i), result(f"r{i}")] if tool else [reply(i), user(f"o{i}")]
    shown = TurnsSoFar.of(messages, {f"e/{i}" for i in range(6)}).shown(how, min(dropped, len(tools)))
    text = "\n".join(message.content for message in shown)
    assert shown[0] == TASK[0] and text.startswith("rules\ntask") and text.endswith(messages[-1].content)
    calls = sum(bool(message.tool_calls) for message in shown)
    assert sum(message.role == "tool" for message in shown) == calls  # none without its own
    assert len(set(map(id, shown))) == len(shown)
