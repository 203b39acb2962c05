"""Rows to imitate from a run's rollouts, and who reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from silva.cli import main
from silva.environments.worlds.dataset import Dataset
from silva.environments.worlds.demonstrations import Demonstrations
from silva.rewards.exact_match import ExactMatch
from silva.storage.rollouts import RolloutRow, rollouts_path, write_rollouts
from silva.types import Message, Trajectory, Turn


def one_turn(id: str, group: str, answer: str, reward: float, **more: Any) -> RolloutRow:
    messages = (Message("user", f"state of {group}"), Message("assistant", "x", reasoning="t", raw=answer))
    status = more.pop("status", "trained")
    turns = (Turn(f"{id}/0", (), messages, fresh=True),)
    return RolloutRow(
        1, "task", "lake", group, Trajectory(id, turns, "terminated", {"p": reward}, **more), status
    )


def two_turns(id: str, group: str) -> RolloutRow:
    first = (Message("user", "go"), Message("assistant", "up", raw="<think>a</think>up"))
    second = (*first, Message("user", "on"), Message("assistant", "down", raw="down"))  # rewritten: all of it
    turns = (Turn(f"{id}/0", (), first, fresh=True), Turn(f"{id}/1", (), second, fresh=True))
    return RolloutRow(1, "task", "lake", group, Trajectory(id, turns, "terminated", {"p": 0.4}), "trained")


def saved(run: Path, rows: list[RolloutRow]) -> Path:
    (run / "rollouts").mkdir()
    write_rollouts(rollouts_path(run / "rollouts", 1), rows)
    return run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    rows = [
        one_turn("a", "s1g0/t0", "<think>bad</think>x", 0.1),
        one_turn("b", "s1g0/t0", "<think>good</think>x", 0.9),
        one_turn("c", "s1g0/t1", "<think>only</think>x", 0.3),
        one_turn("d", "s1g1/t0", "<think>eval</think>x", 5.0, status="eval"),
        one_turn("e", "s1g2/t0", "<think>failed</think>x", 5.0, status="failed", failure="redo", error="no"),
        two_turns("f", "s1g0/demonstration"),
    ]
    return saved(tmp_path, rows)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_best_thought_of_each_state_is_a_row(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demonstrations", str(run)]) == 0
    assert "2 demonstrations from 2 groups, mean reward 0.600, 2 with thoughts" in capsys.readouterr().out
    best, only = rows_of(run / "demonstrations.jsonl")
    prompt = [{"role": "user", "content": "state of s1g0/t0"}]
    about = {"reward": 0.9, "task": "task", "step": 1}
    assert best == {"prompt": prompt, "answer": "<think>good</think>x", **about}
    assert only["answer"] == "<think>only</think>x"


def test_rows_of_states_are_imitated_by_dataset(run: Path) -> None:
    path = run / "best.jsonl"
    assert main(["demonstrations", str(run), "--min-reward=0.5", "--output", str(path)]) == 0
    (row,) = rows_of(path)
    rows = tuple(dict(row, prompt=f"{n} {row['prompt'][0]['content']}") for n in range(40))
    tasks = Dataset(rows=rows, reward=ExactMatch(), eval_size=2).taskset()
    assert tasks.environment(tasks.tasks("train")[0]).expert_reply() == "<think>good</think>x"  # type: ignore


def test_episodes_are_imitated_by_demonstrations(tmp_path: Path) -> None:
    rows = [two_turns("f", "s1g3"), one_turn("a", "s1g4", "right", 0.1)]
    assert main(["demonstrations", str(saved(tmp_path, rows))]) == 0
    whole, short = rows_of(tmp_path / "demonstrations.jsonl")
    assert [m["content"] for m in whole["messages"]] == ["go", "<think>a</think>up", "on", "down"]
    assert [m["role"] for m in short["messages"]] == ["user", "assistant"]
    several = tmp_path / "several.jsonl"
    rows = [{"messages": [{"role": "user", "content": f"go {n}"}, *whole["messages"][1:]]} for n in range(40)]
    several.write_text("".join(json.dumps(row) + "\n" for row in rows))
    played = Demonstrations(path=str(several), thoughts=True, eval_size=2).taskset()
    replies = [m["content"] for m in played.tasks("train")[0].data["messages"] if m["role"] == "assistant"]
    assert replies == ["<think>a</think>up", "down"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "got no run; expected its folder"),
        (
            ["{run}", "--min-reward", "9"],
            "got 2 groups of training and no rollout with a raw reward of 9 or more",
        ),
        (["{run}", "--min-reward", "much"], "--min-reward: got 'much', expected a number"),
        (["{run}/nowhere"], "expected the folder of a run with rollouts"),
        (["{run}", "more"], "got 'more', expected one folder of a run"),
    ],
)
def test_what_cannot_be_written_is_an_error(
    run: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["demonstrations", *(argument.format(run=run) for argument in arguments)]) == 2
    assert message in capsys.readouterr().err
    assert not (run / "demonstrations.jsonl").exists()
