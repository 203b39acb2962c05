"""Which episodes become rows: each reason by hand, in their order, and what a row says of its origin."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from silva import __version__
from silva.config.sections import Synth
from silva.data.recorded import said_in
from silva.storage.rollouts import RolloutRow
from silva.synthesis.duplicates import EvaluationSets
from silva.synthesis.selection import Teacher, select, usage
from silva.types import Message, Observation, Segment, ToolCall, ToolSpec, Trajectory, Turn
from silva.wire.requests import Prices, Usage

TEACHER = Teacher("teacher", 7)
NONE = EvaluationSets.of({})


def episode(
    reply: str | Message = "yes",
    *,
    task: str = "a",
    sample: int = 0,
    reward: float = 1.0,
    solved: bool = True,
    asked: str = "",
    cut: bool = False,
    **more: Any,
) -> RolloutRow:
    """One of one turn."""
    said = reply if isinstance(reply, Message) else Message("assistant", reply)
    turn = Turn(
        "t", (Segment("environment", (), reported=5), Segment("policy", (), reported=2)),
        (Message("user", asked or f"question {task}?"), said), {"r": reward}, fresh=True,
        stop_reason="length" if cut else "stop_token",
    )  # fmt: skip
    metrics = {"success": float(solved)}
    played = Trajectory(f"synth:{task}/{sample}", (turn,), "terminated", {"r": reward}, {}, metrics, **more)
    return RolloutRow(0, task, "world", "g", played, "eval")


def chosen(episodes: list[RolloutRow], **settings: Any) -> tuple[list[str], dict[str, int]]:
    """The rows by task and sample, and the reasons that left something out."""
    found = select(episodes, Synth(**settings), NONE, TEACHER)
    rows = [row.episode.trajectory.id.removeprefix("synth:") for row in found.rows]
    return rows, {reason: count for reason, count in found.left_out.items() if count}


LOOP = "again and again it says " * 20
BAD = Message("assistant", "", errors=("no JSON",), raw="<tool_call>{</tool_call>")


@pytest.mark.parametrize(
    ("wrong", "settings", "reason"),
    [
        (episode(task="b", failure="redo", error="it broke"), {}, "failed"),
        (episode(task="b", failure="mask", error="too long"), {}, "failed"),
        (episode(task="b", solved=False), {}, "unsolved"),
        (episode(task="b", reward=0.4), {"min_reward": 0.5}, "reward"),
        (episode(task="b", cut=True), {}, "cut off"),
        (episode(BAD, task="b"), {}, "malformed calls"),
        (episode("ye", task="b"), {"min_chars": 3}, "length"),
        (episode("yes!", task="b"), {"max_chars": 3}, "length"),
        (episode("Это совсем не тот ответ", task="b"), {"languages": ("en",)}, "language"),
        (episode(LOOP, task="b"), {}, "repetition"),
        (episode(Message("assistant", "yes", reasoning=LOOP), task="b"), {}, "repetition"),
        (episode(task="b", asked="question a?"), {}, "duplicate"),
        (episode(task="b", asked="q", sample=1), {"max_rows": 1}, "surplus"),
        (episode(task="a", sample=1, reward=0.9, asked="other"), {}, "not the best"),
    ],
)  # fmt: skip
def test_an_episode_is_left_out_for_its_reason(
    wrong: RolloutRow, settings: dict[str, Any], reason: str
) -> None:
    assert chosen([episode(), wrong], **settings) == (["a/0"], {reason: 1})


def test_what_a_key_allows_stays() -> None:
    assert chosen([episode(solved=False)], only_solved=False) == (["a/0"], {})
    assert chosen([episode(reward=0.5)], min_reward=0.5) == (["a/0"], {})
    assert chosen([episode("yes")], min_chars=3, max_chars=3) == (["a/0"], {})
    assert chosen([episode(LOOP)], max_repetition=1.0) == (["a/0"], {})
    assert chosen([episode("Это совсем не тот ответ")], languages=("en", "ru")) == (["a/0"], {})


def test_an_environment_that_knows_no_success_has_no_unsolved_episode() -> None:
    bare = episode(reward=0.0)
    bare = replace(bare, trajectory=replace(bare.trajectory, metrics={}))
    assert chosen([bare]) == (["a/0"], {})


def test_rows_are_by_task_and_then_by_falling_reward() -> None:
    rewards = {"b": (0.2, 0.9, 0.5), "a": (1.0, 0.1, 1.0)}
    episodes = [
        episode(f"{task}{sample}", task=task, sample=sample, reward=reward)
        for task, those in rewards.items()
        for sample, reward in enumerate(those)
    ]
    assert chosen(episodes, best=0)[0] == ["b/1", "b/2", "b/0", "a/0", "a/2", "a/1"]
    assert chosen(episodes, best=2) == (["b/1", "b/2", "a/0", "a/2"], {"not the best": 2})
    assert chosen(episodes, best=2, max_rows=3) == (["b/1", "b/2", "a/0"], {"not the best": 1, "surplus": 2})


def test_the_first_reason_counts_and_what_is_left_out_makes_nothing_a_duplicate() -> None:
    twice = [
        episode(solved=False, reward=0.0),
        episode(task="b", asked="question a?", solved=False, cut=True),
    ]
    assert chosen(twice) == ([], {"unsolved": 2})
    worse = episode("no", sample=1, reward=0.5)
    again = episode("no", task="b", asked="question a?")
    assert chosen([episode(), worse, again]) == (["a/0", "b/0"], {"not the best": 1})


def test_a_share_of_repeated_words_at_the_bound_stays() -> None:
    text = " ".join(f"w{i % 20}" for i in range(30))  # the first 10 again: 20 of 30 words
    assert chosen([episode(text)], max_repetition=20 / 30) == (["a/0"], {})


def test_a_reply_that_was_cut_before_the_last_is_one_too_many() -> None:
    row = episode(cut=True)
    (cut,) = row.trajectory.turns
    turns = (cut, replace(cut, stop_reason="stop_token", fresh=False))
    row = replace(row, trajectory=replace(row.trajectory, turns=turns))
    assert chosen([row]) == ([], {"cut off": 1})


def test_tasks_of_two_environments_may_share_an_id() -> None:
    other = replace(episode("other"), environment="elsewhere")
    assert chosen([episode(), other]) == (["a/0", "a/0"], {})


def test_ids_of_calls_make_no_other_dialogue() -> None:
    def asks(task: str, id: str, number: int = 1) -> RolloutRow:
        call = ToolCall("add", {"a": number}, id)
        return episode(Message("assistant", "", tool_calls=(call,)), task=task, asked="1 + 1?")

    episodes = [asks("a", "call_8f3"), asks("b", "call_c07"), asks("c", "call_8f3", 2)]
    assert chosen(episodes) == (["a/0", "c/0"], {"duplicate": 1})


@pytest.mark.parametrize("example", [[], [Message("assistant", "example"), Message("user", "good")]])
def test_a_context_without_earlier_turns_does_not_repeat_the_task(example: list[Message]) -> None:
    task = (Message("system", "Play."), Message("user", "board 1"), *example)
    shown = [(*task, Message("assistant", "left")),
             (*task, Message("user", "board 2"), Message("assistant", "right")),
             (*task, Message("user", "board 3"), Message("assistant", "up"))]  # fmt: skip
    turns = tuple(replace(episode().trajectory.turns[0], messages=each) for each in shown)
    played = replace(episode().trajectory, turns=turns)
    said = said_in(played, "here")
    assert said and [each.content for each in said.messages] == [
        *(each.content for each in task), "left", "board 2", "right", "board 3", "up",
    ]  # fmt: skip


def test_near_duplicates_of_rows_are_left_out() -> None:
    pytest.importorskip("datasketch")
    text = " ".join(f"w{i}" for i in range(60))
    near = episode(text + " more", task="b", asked="question a?")
    other = episode(" ".join(f"v{i}" for i in range(60)), task="c")
    assert chosen([episode(text), near, other], near_duplicates=0.8) == (
        ["a/0", "c/0"],
        {"near duplicate": 1},
    )
    assert chosen([episode(text), near, other])[1] == {}


def test_contamination_is_counted_by_set() -> None:
    question = "If Ann has 3 apples and Bob has 5 apples, how many apples do they have?"
    sets = EvaluationSets.of({"math": [question], "other": [question + " In all?"], "clean": ["z " * 20]})
    asks = episode(task="b", asked=question)
    calls = Message("assistant", "", tool_calls=(ToolCall("search", {"query": question}),))
    found = select([episode(), asks, episode(calls, task="c")], Synth(), sets, TEACHER)
    assert found.left_out["contaminated"] == 2 and len(found.rows) == 1
    assert found.contaminated == {"math": 2, "other": 2, "clean": 0}
    (turn,) = asks.trajectory.turns
    system = replace(turn, messages=(Message("system", question), Message("user", "?"), turn.messages[-1]))
    played = replace(asks, trajectory=replace(asks.trajectory, turns=(system,)))
    assert len(select([played], Synth(), sets, TEACHER).rows) == 1


def test_a_row_holds_calls_thoughts_tools_and_where_it_is_from() -> None:
    call = Message("assistant", "Let me see.", reasoning="Hm.", tool_calls=(ToolCall("add", {"a": 1}, "c1"),))
    tool = ToolSpec("add", "Adds.", {"type": "object", "properties": {"a": {"type": "integer"}}})
    played = episode(call, sample=3, observation=Observation(tools=(tool,)))
    teacher = Teacher("m", 7, prices=Prices(input=10.0, output=100.0))
    found = select([played], Synth(sampling={"temperature": 0.5}), NONE, teacher)
    (line,) = found.lines().splitlines()
    assert json.loads(line) == {
        "messages": [
            {"role": "user", "content": "question a?"},
            {"role": "assistant", "content": "Let me see.", "reasoning_content": "Hm.", "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]},
        ],
        "tools": [{"type": "function", "function": {
            "name": "add", "description": "Adds.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}],
        "provenance": {
            "environment": "world", "task": "a", "sample": 3, "seed": 7, "model": "m",
            "sampling": {
                "temperature": 0.5, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "stop": []},
            "reward": 1.0, "cost": (5 * 10 + 2 * 100) / 1e6, "version": __version__},
    }  # fmt: skip
    assert found.lost == {}


def test_every_turn_sends_its_context_again() -> None:
    def turn(shown: int, said: int, fresh: bool = False) -> Turn:
        parts = (Segment("environment", (), reported=shown), Segment("policy", (), reported=said))
        return Turn("t", parts, fresh=fresh)

    turns = (turn(10, 2, True), turn(3, 4), turn(8, 1, True))
    assert usage(Trajectory("x", turns, "terminated")) == Usage(10 + (12 + 3) + 8, 2 + 4 + 1)
