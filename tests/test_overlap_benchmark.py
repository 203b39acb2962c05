"""What overlap.py measures with: the dialogue that waits for its tool, and the ages of trained tokens."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from pathlib import Path

import pytest
from tests import virtual_clock

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "environments")]

from overlap import ages  # noqa: E402
from slow_tool import SlowTool  # noqa: E402

from silva.types import Message, Step, Task  # noqa: E402


def test_each_reply_waits_for_the_tool_and_dialogues_wait_side_by_side() -> None:
    taskset = SlowTool(seconds=2.0, train_size=50, eval_size=4).taskset()
    tasks = taskset.tasks("train")

    async def play(task: Task) -> tuple[float, Step]:
        dialogue = taskset.environment(task)
        await dialogue.reset()
        for turn in range(task.data["turns"]):
            step = await dialogue.step(Message("assistant", "ab1?", id=f"reply-{turn}"))
            assert step.terminated == (turn == task.data["turns"] - 1)
        return virtual_clock.now(), step

    async def all_of_them() -> list[tuple[float, Step]]:
        return await asyncio.gather(*map(play, tasks))

    ended = virtual_clock.run(all_of_them())
    assert [at for at, _ in ended] == [2.0 * task.data["turns"] for task in tasks]
    assert all(step.rewards == {"letters": 0.5} for _, step in ended)
    assert set(Counter(task.data["turns"] for task in tasks)) == {2, 3, 4, 5, 6}


def test_ages_are_means_over_steps_and_a_step_that_tells_of_none_is_fresh() -> None:
    steps = [
        {"train/loss": 1.0},
        {"train/share/age1": 1.0},
        {"train/share/age0": 0.25, "train/share/age1": 0.5, "train/share/age3+": 0.25},
        {"train/share/age2": 1.0},
    ]
    assert ages(steps) == pytest.approx([1.25 / 4, 1.5 / 4, 1 / 4, 0.25 / 4])
