"""Files of rows and rollouts into files of other tools, by the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from silva.cli import main
from silva.data.dialogues import dialogue
from silva.data.rows import read_rows
from silva.storage.rollouts import RolloutRow, rollouts_path, write_rollouts
from silva.types import Message, ToolCall, Trajectory, Turn

CALL = {"name": "search", "arguments": {"query": "x"}}
ROWS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}], "source": "a"},
    {
        "messages": [
            {"role": "user", "content": "find"},
            {"role": "assistant", "content": "", "tool_calls": [{"function": CALL}]},
            {"role": "tool", "content": "y"},
            {"role": "assistant", "content": "y!", "reasoning_content": "seen"},
        ],
        "tools": [{"name": "search", "description": "", "parameters": {"type": "object"}}],
    },
]


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_rows_go_around_through_every_shape_and_both_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = written(tmp_path / "rows.jsonl", ROWS)
    expected = [dialogue(row) for row in read_rows(str(source))]
    for to in ("messages", "trl"):
        for suffix in ("jsonl", "parquet"):
            output = tmp_path / f"{to}.{suffix}"
            assert main(["convert", str(source), "--to", to, "--output", str(output)]) == 0
            assert capsys.readouterr().out == f"{output}: 2 rows\n"
            rows = [*read_rows(str(output))]
            found = [dialogue(row) for row in rows]
            assert [(d.messages, d.tools) for d in found] == [(d.messages, d.tools) for d in expected]
            assert rows[0].values["source"] == "a"
    assert main(["convert", str(source), "--to", "sharegpt", "--output", str(tmp_path / "s.jsonl")]) == 0
    said = f"in 1 rows thoughts stand in the text (the first: {source}:2)"
    assert said in capsys.readouterr().out


def test_rows_of_verl_are_its_parquet(tmp_path: Path) -> None:
    source = written(
        tmp_path / "sums.jsonl",
        [{"question": "1 + 1?", "answer": "2"}, {"question": "2 + 1?", "answer": "3"}],
    )
    output = tmp_path / "train.parquet"
    assert main(["convert", str(source), "--to", "verl", "--output", str(output)]) == 0
    first, _ = pq.read_table(output).to_pylist()
    assert first == {
        "data_source": "sums", "prompt": [{"role": "user", "content": "1 + 1?"}], "ability": "",
        "reward_model": {"style": "rule", "ground_truth": "2"}, "extra_info": {"index": 0},
    }  # fmt: skip


def test_rollouts_become_dialogues_with_their_rewards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = ToolCall("search", {"query": "x"})
    before = (Message("user", "hello"), Message("assistant", "hi"))  # the task begins with a dialogue
    first = (
        *before,
        Message("user", "find"),
        Message("assistant", "", "hm", (call,), raw="<think>hm</think>..."),
    )
    second = (*first, Message("tool", "y", name="search"), Message("assistant", "y!", raw="y!"))
    turns = (Turn("a/0", (), first, {"hit": 0.5}, fresh=True), Turn("a/1", (), second, fresh=True))
    broken = (Message("user", "find"), Message("assistant", "", raw="<tool_call>{", errors=("no JSON",)))
    played = [
        Trajectory("a", turns, "terminated", {"hit": 0.5}),
        Trajectory("b", (Turn("b/0", (), broken, fresh=True),), "terminated", {"hit": 0.0}),
        Trajectory("c", (), "error", failure="redo", error="down"),
    ]
    (tmp_path / "run" / "rollouts").mkdir(parents=True)
    rows = [
        RolloutRow(3, "task", "lake", "g", each, "failed" if each.failure else "trained", advantage=0.25)
        for each in played
    ]
    write_rollouts(rollouts_path(tmp_path / "run" / "rollouts", 3), rows)
    output = tmp_path / "out.jsonl"
    assert main(["convert", str(tmp_path / "run"), "--to", "messages", "--output", str(output)]) == 0
    assert "1 rows are left out: the rollout failed (the first: " in capsys.readouterr().out
    one, other = (json.loads(line) for line in output.read_text().splitlines())
    about = {
        "reward": 0.5,
        "rewards": {"hit": 0.5},
        "task": "task",
        "environment": "lake",
        "step": 3,
        "status": "trained",
        "advantage": 0.25,
    }
    assert {key: one[key] for key in about} == about
    read = [dialogue(row).messages for row in read_rows(str(output))]
    assert read[0] == (
        *before, Message("user", "find"), Message("assistant", "", "hm", (call,)),
        Message("tool", "y", name="search"), Message("assistant", "y!"),
    )  # fmt: skip
    assert other["messages"][1] == {"role": "assistant", "content": "<tool_call>{"}
    assert (
        main(["convert", str(tmp_path / "run"), "--to", "verl", "--output", str(tmp_path / "v.jsonl")]) == 2
    )
    assert "rollouts hold no answer to grade by" in capsys.readouterr().err


def played(id: str, group: str, reward: float, thought: str, **more: Any) -> RolloutRow:
    before = (Message("user", "go"), Message("assistant", "up", "first"), Message("user", "on"))
    messages = (*before, Message("assistant", "down", thought))
    turns, status = (Turn(f"{id}/0", (), messages, fresh=True),), more.pop("status", "trained")
    trajectory = Trajectory(id, turns, "terminated", {"p": reward}, **more)
    return RolloutRow(1, "task", "lake", group, trajectory, status)


EPISODES = [
    played("a", "s1g0", 0.4, "whole"),
    played("b", "s1g1", 0.2, "whole", status="dropped"),
    played("c", "s1g1", 0.1, "worse"),
    played("d", "s1g2", 5.0, "eval", status="eval"),
    played("e", "s1g3", 5.0, "failed", status="failed", failure="redo", error="no"),
]
STATES = [  # of an expert, with thoughts; beside them whole episodes would say the same again
    played("f", "s1g4/t0", 0.1, "bad"),
    played("g", "s1g4/t0", 0.9, "good"),
    played("h", "s1g4/t1", 0.3, "only"),
]


@pytest.mark.parametrize(
    ("rows", "options", "expected", "said"),
    [
        (EPISODES, ["--best"], [("whole", 0.4)], "1 rows are left out: an earlier row says the same"),
        ([*EPISODES, *STATES], ["--best"], [("good", 0.9), ("only", 0.3)], ": 2 rows\n"),
        (STATES, ["--best", "--min-reward=0.5"], [("good", 0.9)], "the raw reward is below 0.5 (the first: "),
        (EPISODES, ["--min-reward=5"], [("eval", 5.0)], "in 1 rows a held-out task was played (status"),
        (STATES[:2], ["--min-reward", "0.1"], [("bad", 0.1), ("good", 0.9)], ": 2 rows\n"),
    ],
)
def test_the_best_rollouts_are_chosen(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    rows: list[RolloutRow],
    options: list[str],
    expected: list[tuple[str, float]],
    said: str,
) -> None:
    (tmp_path / "rollouts").mkdir()
    write_rollouts(rollouts_path(tmp_path / "rollouts", 1), rows)
    output = tmp_path / "rows.jsonl"
    assert main(["convert", str(tmp_path), "--to", "messages", "--output", str(output), *options]) == 0
    assert said in capsys.readouterr().out
    found = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(row["messages"][-1]["reasoning_content"], row["reward"]) for row in found] == expected
    assert [message["content"] for message in found[0]["messages"]] == ["go", "up", "on", "down"]


def test_bad_rows_and_places_are_named_and_nothing_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = written(tmp_path / "rows.jsonl", [ROWS[0], {"messages": [{"role": "robot", "content": "x"}]}])
    for words, said in (
        (["--to", "trl", "--output", str(tmp_path / "o.jsonl")], f"{source}:2: messages.0.role: got 'robot'"),
        (
            ["--to", "trl", "--output", str(tmp_path / "o.csv")],
            "expected a name that ends with .jsonl or .parquet",
        ),
        (["--to", "trl", "--dtype", "f16"], "--dtype: rows have none; expected it only with --to hf"),
        (["--to", "trl", "--output", str(source)], f"{source}: exists already"),
        (["--to", "trl", "--best"], f"{source}: got no rollouts, expected a run's folder or its rollouts"),
        (["--to", "trl", "--min-reward", "much"], "--min-reward: got 'much', expected a number"),
        (["--to", "hf", "--best"], "--best: a model has no rollouts; expected it only with --to messages"),
    ):
        assert main(["convert", str(source), *words]) == 2
        assert said in capsys.readouterr().err
    only = written(tmp_path / "only.jsonl", [{"messages": [*ROWS[0]["messages"], ROWS[0]["messages"][0]]}])
    assert main(["convert", str(only), "--to", "trl", "--output", str(tmp_path / "o.jsonl")]) == 2
    assert "no row can be written as trl: 1 rows are left out: no reply follows" in capsys.readouterr().err
    mixed = written(tmp_path / "mixed.jsonl", [ROWS[0] | {"x": 1}, ROWS[0] | {"x": "one"}])
    assert main(["convert", str(mixed), "--to", "trl", "--output", str(tmp_path / "o.parquet")]) == 2
    assert "o.parquet: the column x has no place in parquet" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mixed.jsonl", "only.jsonl", "rows.jsonl"]
