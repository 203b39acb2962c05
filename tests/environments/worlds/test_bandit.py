"""Payouts, what counts as success, and prompts that do not depend on luck."""

from __future__ import annotations

from silva.environments.bases.text_game import Outcome
from silva.environments.worlds.bandit import CAUTIOUS, DARING, Bandit, BanditGame
from silva.types import Task

DATA = {"safe": "Anchor", "risky": "Rocket", "shown": ["Rocket", "Anchor"]}


def test_success_is_the_better_arm_and_the_payout_is_luck() -> None:
    def outcomes(arm: str) -> list[tuple[Outcome, bool]]:
        games = [BanditGame(Bandit(), Task("b", "bandit", seed, DATA)) for seed in range(200)]
        return [(game.apply(arm), game.solved) for game in games]

    assert {*outcomes("Anchor")} == {(Outcome(0.1, done=True), False)}
    risky, paid = outcomes("Rocket"), (Outcome(1.0, done=True), True)
    assert {*risky} == {paid, (Outcome(0.0, done=True), True)}
    assert 35 <= risky.count(paid) <= 65  # 200 draws at 0.25
    assert Bandit(risky_chance=0.05).better == "safe"


def test_reverse_swaps_names_and_arms_but_not_the_prompt() -> None:
    plain, reverse = (Bandit(reverse=reverse).taskset().tasks("eval") for reverse in (False, True))
    assert all(task.data["safe"] in CAUTIOUS and task.data["risky"] in DARING for task in plain)
    assert all(task.data["safe"] in DARING and task.data["risky"] in CAUTIOUS for task in reverse)
    assert {tuple(t.data["shown"]) for t in plain} == {tuple(t.data["shown"]) for t in reverse}


def test_compact_prompt_and_names_as_actions(first, replies_to) -> None:
    settings = Bandit(style="compact", think=False, answer_tags=False, eval_size=1)
    task = Task("b", "bandit", 0, DATA)
    assert first(settings, task) == "Rocket or Anchor?\n1"
    assert replies_to(settings, task, ["anchor"])[0].rewards == {"payout": 0.1}
    both = replies_to(settings, task, ["Anchor Rocket"])[0]
    assert both.truncated and both.rewards == {"payout": 0} and both.shaped == {"format": -0.1}
