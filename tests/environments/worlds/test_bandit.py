"""Payouts, what counts as success, and prompts that do not depend on luck."""

from __future__ import annotations

import asyncio

import pytest
from pydantic import ValidationError

from silva.environments.worlds.bandit import CAUTIOUS, DARING, Bandit
from silva.types import Task

DATA = {"safe": "Anchor", "risky": "Rocket", "shown": ["Rocket", "Anchor"]}


def outcomes(settings: Bandit, arm: str, replies_to, seeds: int = 200) -> list[tuple[float, float]]:
    results = []
    for seed in range(seeds):
        step = replies_to(settings, Task("b", "bandit", seed, DATA), [f"<answer>{arm}</answer>"])[0]
        assert step.terminated
        results.append((step.rewards["payout"], step.metrics["success"]))
    return results


def test_success_is_the_better_arm_and_the_payout_is_luck(replies_to) -> None:
    settings = Bandit(eval_size=1)
    assert set(outcomes(settings, "Anchor", replies_to, 20)) == {(0.1, 0.0)}
    risky = outcomes(settings, "Rocket", replies_to)
    assert set(risky) == {(0.0, 1.0), (1.0, 1.0)}
    assert 35 <= risky.count((1.0, 1.0)) <= 65  # 200 draws at 0.25


def test_the_better_arm_follows_the_numbers() -> None:
    assert Bandit().better == "risky"
    assert Bandit(risky_chance=0.05).better == "safe"
    with pytest.raises(ValidationError, match="both arms pay the same"):
        Bandit(risky_chance=0.1)


def test_reverse_swaps_names_and_arms_but_not_the_prompt() -> None:
    plain, reverse = (Bandit(reverse=reverse).taskset().tasks("eval") for reverse in (False, True))
    assert all(task.data["safe"] in CAUTIOUS and task.data["risky"] in DARING for task in plain)
    assert all(task.data["safe"] in DARING and task.data["risky"] in CAUTIOUS for task in reverse)
    assert {tuple(t.data["shown"]) for t in plain} == {tuple(t.data["shown"]) for t in reverse}


def test_both_orders_of_names_are_shown_and_stay_in_one_split() -> None:
    taskset = Bandit().taskset()
    pairs = {s: {frozenset(t.data["shown"]) for t in taskset.tasks(s)} for s in ("train", "eval")}
    assert len(pairs["eval"]) == 128 and not pairs["eval"] & pairs["train"]


def test_the_expert_picks_the_better_arm(expert_rate) -> None:
    success, payout = expert_rate(Bandit(), 256)
    assert success == 1.0 and 0.17 < payout < 0.33
    assert expert_rate(Bandit(reverse=True), 20)[0] == 1.0


def test_compact_prompt_and_names_as_actions(replies_to) -> None:
    settings = Bandit(style="compact", think=False, answer_tags=False, eval_size=1)
    task = Task("b", "bandit", 0, DATA)
    first = asyncio.run(settings.taskset().environment(task).reset()).messages[0].content
    assert first == "Rocket or Anchor?\n1"
    assert replies_to(settings, task, ["anchor"])[0].rewards == {"payout": 0.1}
    both = replies_to(settings, task, ["Anchor Rocket"])[0]
    assert both.truncated and both.rewards == {"payout": 0} and both.shaped == {"format": -0.1}
