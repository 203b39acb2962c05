"""The forests that a report draws: nodes, what they share, which are chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from silva.monitoring import report_forests
from silva.monitoring.report_forests import forest_of, sample_forests
from silva.storage.rollouts import RolloutRow, rollouts_path, write_rollouts
from silva.types import Message, Segment, ToolCall, Trajectory, Turn


def turn(id: str, *, entropy: float | None = 0.5, context: tuple[Message, ...] = ()) -> Turn:
    entropies = () if entropy is None else (entropy, entropy + 1)
    said = Segment("policy", (7, 8), (-1.0, -1.0), (), entropies, (0, 0))
    shown = (*context, Message("user", f"shown before {id}"))
    return Turn(
        id, (Segment("environment", (1,)), said), (*shown, Message("assistant", f"reply {id}")), fresh=True
    )


def row(
    id: str, *turns: str, group: str = "s1g0", reward: float = 0.0, parent: str | None = None,
    advantage: float | None = None, step: int = 1, **more: Any,
) -> RolloutRow:  # fmt: skip
    status = more.pop("status", "trained")
    trajectory = Trajectory(
        id, tuple(map(turn, turns)), more.pop("stop_reason", "terminated"), {"r": reward}, parent=parent,
        fork_turn=None if parent is None else 1, **more,
    )  # fmt: skip
    return RolloutRow(step, "t0", "lake", group, trajectory, status, advantage=advantage)


def drawn(rows: list[RolloutRow], budget: int = 10_000) -> dict[str, Any]:
    forest = forest_of("s1g0", rows, [budget])
    assert forest is not None
    return forest


def test_turns_that_trajectories_share_are_one_node() -> None:
    forest = drawn([
        row("b", "a/0", "b/1", parent="a", reward=3.0, advantage=1.0),  # before its parent
        row("a", "a/0", "a/1", reward=1.0, advantage=-2.0),
        row("c", "c/0", reward=0.5),
    ])  # fmt: skip
    texts = [node["messages"][-1]["content"] for node in forest["nodes"]]
    assert texts == ["reply a/0", "reply a/1", "reply c/0", "reply b/1"], "parents first"
    assert [(node["parent"], node["depth"]) for node in forest["nodes"]] == [(-1, 0), (0, 1), (-1, 0), (0, 1)]
    assert [node["leaves"] for node in forest["nodes"]] == [2, 1, 1, 1]
    assert [[end["trajectory"] for end in node["ends"]] for node in forest["nodes"]] == [
        [],
        ["a"],
        ["c"],
        ["b"],
    ]
    shared, leaf, alone, _ = forest["nodes"]
    assert (shared["reward"], shared["advantage"], shared["entropy"]) == (2.0, -0.5, 1.0)
    assert (leaf["reward"], leaf["advantage"], alone["advantage"]) == (1.0, -2.0, None)
    assert (forest["leaves"], forest["left_out"], shared["tokens"]) == (3, 0, 2)


def test_thoughts_of_a_state_grow_from_the_best_of_the_state_before() -> None:
    rows = [
        row("w/t1/0", "t1/0", group="w/t1", reward=0.2),
        row("w/t0/0", "t0/0", group="w/t0", reward=0.1),
        row("w/t0/1", "t0/1", group="w/t0", reward=0.9),
        row("w/demonstration", "whole", group="w/demonstration", reward=9.0),
    ]
    nodes = drawn(rows)["nodes"]
    assert [node["messages"][-1]["content"] for node in nodes] == ["reply t0/0", "reply t0/1", "reply t1/0"]
    assert [node["parent"] for node in nodes] == [-1, -1, 1], "under t0/1, which has the higher reward"


def test_failures_have_no_reward_and_unknown_entropies_no_value() -> None:
    failed = Trajectory("f", (turn("f/0", entropy=None),), "error", failure="redo", error="it broke")
    (node,) = drawn([RolloutRow(1, "t0", "lake", "s1g0", failed, "failed", "it broke")])["nodes"]
    assert (node["reward"], node["entropy"], node["advantage"]) == (None, None, None)
    assert node["ends"] == [
        {"trajectory": "f", "reward": None, "stop_reason": "error", "status": "failed", "error": "it broke"}
    ]


def test_a_rewritten_context_shows_what_is_new_and_calls_are_text() -> None:
    before = (Message("user", "old"), Message("assistant", "old reply"))
    call = Message("assistant", "", reasoning="why", tool_calls=(ToolCall("search", {"query": "cats"}),))
    one = turn("a/0", context=before)
    rewritten = Trajectory(
        "a", (Turn("a/0", one.segments, (*one.messages[:-1], call), fresh=True),), "terminated"
    )
    (node,) = drawn([RolloutRow(1, "t0", "lake", "s1g0", rewritten, "trained")])["nodes"]
    assert node["messages"] == [
        {"role": "user", "content": "shown before a/0"},
        {"role": "assistant", "content": "search({'query': 'cats'})", "reasoning": "why"},
    ]


def test_texts_and_nodes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [
        m["content"] for node in drawn([row("a", "a/0", "a/1")], budget=20)["nodes"] for m in node["messages"]
    ]
    assert texts[0] == "shown before a/0" and texts[1].startswith("repl …") and texts[2].startswith(" …")
    monkeypatch.setattr(report_forests, "NODES", 3)
    forest = drawn([row("a", "a/0", "a/1"), row("b", "b/0", "b/1"), row("c", "a/0", "c/1", parent="a")])
    assert (forest["leaves"], forest["left_out"], len(forest["nodes"])) == (2, 1, 3)


def test_nothing_played_is_no_forest() -> None:
    assert (
        forest_of("s1g0", [RolloutRow(1, "t", "lake", "s1g0", Trajectory("a", (), "error"), "failed")], [9])
        is None
    )


def test_of_each_step_the_work_that_branches_most_is_drawn(tmp_path: Path) -> None:
    for step in (1, 2):
        rows = [
            row(f"{step}x", "x/0", group=f"s{step}g0", reward=5.0, step=step),
            row(f"{step}y", "y/0", group=f"s{step}g0", step=step),
            row(f"{step}a", "a/0", "a/1", group=f"s{step}g1", step=step),
            row(f"{step}b", "a/0", "b/1", group=f"s{step}g1", parent=f"{step}a", step=step),
            row(f"{step}e", "e/0", group="", status="eval", step=step),
        ]
        write_rollouts(rollouts_path(tmp_path, step), rows if step == 1 else rows[:2])
    rollouts_path(tmp_path, 3).write_bytes(b"no parquet")
    problems: list[str] = []
    forests = sample_forests(tmp_path, problems)
    assert [(f["step"], f["work"], len(f["nodes"])) for f in forests] == [(1, "s1g1", 3), (2, "s2g0", 2)]
    assert problems == [], "the list of rollouts names the file"
