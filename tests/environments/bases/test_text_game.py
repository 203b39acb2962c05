"""Formats, limits, penalties and forks of the base of all games, shown on a small one."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from tests.environments.conftest import said

from silva.environments.bases.text_game import Outcome, TextGame, TextGameSettings
from silva.protocols import Forkable, Scripted
from silva.types import Message, Task


class Walk(TextGame):
    """From 0 to 3 on a line; 'Jump' does nothing."""

    def __init__(self, settings: TextGameSettings, task: Task) -> None:
        super().__init__(settings, task)
        self.place, self.noise = 0, 0.0

    def instructions(self) -> str:
        return "Walk to 3."

    def actions(self) -> dict[str, str]:
        return {"Left": "L", "Right": "R", "Jump": "J"}

    def render(self) -> str:
        return f"at {self.place}"

    def apply(self, action: str) -> Outcome:
        before = self.place
        self.place += {"Left": -1, "Right": 1, "Jump": 0}[action]
        self.noise = self.rng.random()
        self.solved = self.place == 3
        return Outcome(float(self.solved), self.solved, self.place != before)

    def expert_actions(self) -> list[str]:
        return ["Right"] * (3 - self.place)


TASK = Task("walk/0", "walk", 5, {})


def walk(**keys) -> Walk:
    return Walk(TextGameSettings(type="walk", **keys), TASK)


def say(text: str) -> Message:
    return Message("assistant", text)


def first(game: Walk) -> str:
    return said(asyncio.run(game.reset()))


def test_the_first_observation_in_full_and_in_compact_style() -> None:
    assert first(walk()) == (
        "Walk to 3.\nActions: Left, Right, Jump. At most 5 actions a turn. Reply in this form: "
        "<think>your thoughts</think><answer>Left || Right</answer>\nat 0\nActions left: 10."
    )
    assert first(walk(style="compact")) == "at 0\n10"
    single = first(walk(think=False, answer_tags=False, max_actions_per_turn=1))
    assert "Actions: Left, Right, Jump. Reply in this form: Left\n" in single


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>I go</think><answer>Right</answer>", (["Right"], True)),
        ("<think>I go</think> <answer> right || L. </answer>", (["Right", "Left"], True)),
        ("<answer>Right || Fly</answer>", (["Right"], False)),
        ("<answer>Right</answer><answer>Left</answer>", (["Right"], True)),
        ("<think><answer>Left</answer></think><answer>Right</answer>", (["Right"], True)),
        ("<answer>Right", (["Right"], True)),  # a stop string cut the end
        ("Right", (["Right"], True)),
        ("I would go Right", ([], False)),
        ("<answer></answer>", ([], False)),
        ("", ([], False)),
    ],
)
def test_lenient_replies(text: str, expected: tuple[list[str], bool]) -> None:
    assert walk().read(say(text)) == expected


@pytest.mark.parametrize(
    ("style", "think", "answer_tags", "prefill"),
    itertools.product(("full", "compact"), *[(True, False)] * 3),
)
def test_scripted_replies_are_in_the_strict_format(style, think, answer_tags, prefill, play_out) -> None:
    keys = {"style": style, "think": think, "answer_tags": answer_tags, "prefill": prefill}
    tag = "<think>" if think else "<answer>" if answer_tags else ""
    assert asyncio.run(walk(**keys).reset()).prefill == (tag if prefill else "")
    steps = play_out(walk(format="strict", **keys))
    assert [step.metrics["action_is_valid"] for step in steps] == [1.0]
    assert steps[0].rewards == {"score": 1.0}
    other = walk(format="strict", max_actions=4, **keys)
    assert all(s.metrics["action_is_valid"] == 1 for s in play_out(other, lambda i: other.random_reply(i)))


def test_rewards_shaped_rewards_and_metrics_of_a_turn(play_out) -> None:
    replies = ["Jump || Right", "no idea", "Left || Fly", "Right || Right || Right"]
    steps = play_out(walk(), lambda turn: replies[turn])
    assert [step.rewards["score"] for step in steps] == [0, 0, 0, 1]
    assert [step.shaped["format"] for step in steps] == [0, -0.1, 0, 0]
    assert [step.metrics["action_is_valid"] for step in steps] == [1, 0, 0, 1]
    assert [step.metrics["action_is_effective"] for step in steps] == [0.5, 0, 1, 1]
    assert [step.metrics["actions"] for step in steps] == [2, 0, 1, 3]
    assert ["success" in step.metrics for step in steps] == [False, False, False, True]
    assert "No valid action was read. Actions:" in said(steps[1])
    assert said(steps[1]).endswith("at 1\nActions left: 7.")
    assert steps[3].terminated and not steps[3].truncated


def test_limits_on_the_actions_of_a_turn_and_of_an_episode(play_out) -> None:
    game = walk(max_actions=5, max_actions_per_turn=2, style="compact")
    steps = play_out(game, lambda _: "L||R||R||R")
    assert [step.metrics["actions"] for step in steps] == [2, 2, 1]
    assert list(map(said, steps)) == ["at 0\n3", "at 0\n1", "at -1\n0"]
    assert steps[-1].truncated and not steps[-1].terminated
    assert steps[-1].metrics["success"] == 0
    # Turns without an action end the episode too.
    steps = play_out(walk(max_actions=3), lambda _: "?")
    assert len(steps) == 3 and steps[-1].truncated
    assert sum(step.shaped["format"] for step in steps) == pytest.approx(-0.3)


def test_forks_share_the_past_and_have_their_own_noise() -> None:
    async def run():
        game = walk()
        await game.reset()
        await game.step(say("Right"))
        one, same, other = await game.fork(1), await game.fork(1), await game.fork(2)
        for fork in (one, same, other):
            await fork.step(say("Right"))
        return game, one, same, other

    game, one, same, other = asyncio.run(run())
    assert (game.place, one.place, game.actions_left, one.actions_left) == (1, 2, 9, 8)
    assert one.noise == same.noise != other.noise
    assert one.settings is game.settings and one.task is game.task
    assert isinstance(game, Forkable) and isinstance(game, Scripted)


def test_an_environment_is_used_once() -> None:
    async def run() -> None:
        game = walk(max_actions=1)
        with pytest.raises(RuntimeError, match="walk/0: step\\(\\) of an episode that is new"):
            await game.step(say("Right"))
        await game.reset()
        with pytest.raises(RuntimeError, match="reset\\(\\) of an episode that is running"):
            await game.reset()
        await game.step(say("Right"))
        with pytest.raises(RuntimeError, match="that is over"):
            await game.step(say("Right"))
        await game.close()
        await game.close()
        with pytest.raises(RuntimeError, match="that is closed"):
            await game.step(say("Right"))

    asyncio.run(run())


def test_a_random_player_is_not_stuck_with_one_action() -> None:
    game = walk(style="compact", think=False, answer_tags=False)
    replies = set()
    for game.actions_left in range(10, 0, -1):
        replies.add(game.random_reply(3))
    assert replies == {"L", "R", "J"}
    assert game.random_reply(3) == game.random_reply(3)


def test_what_a_person_types_is_put_into_the_format() -> None:
    assert walk().wrap("right") == "<think>Next: Right.</think><answer>Right</answer>"
    assert walk(style="compact", think=False).wrap("l||R") == "<answer>L||R</answer>"
    assert walk().wrap("go right") == "go right"


class Push(Walk):
    """One action."""

    def actions(self) -> dict[str, str]:
        return {"Push": "P"}

    def apply(self, action: str) -> Outcome:
        self.place += 1
        self.solved = self.place == 3
        return Outcome(float(self.solved), self.solved)

    def expert_actions(self) -> list[str]:
        return ["Push"] * (3 - self.place)


def test_a_game_with_a_single_action(play_out) -> None:
    rules = first(Push(TextGameSettings(type="push"), TASK))
    assert "Actions: Push. At most 5 actions a turn. Reply in this form: " in rules
    assert "<answer>Push || Push</answer>" in rules
    steps = play_out(Push(TextGameSettings(type="push", max_actions_per_turn=2), TASK))
    assert [step.rewards["score"] for step in steps] == [0.0, 1.0]


def played(attribute: str, value) -> None:
    """Plays a walk, of which a method returns this value."""
    game = type("Maze", (Walk,), {attribute: lambda *_: value})(TextGameSettings(type="maze"), TASK)

    async def run() -> None:
        await game.reset()
        await game.step(say(game.expert_reply()))

    asyncio.run(run())


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("apply", None, r"Maze\.apply\('Right'\) returned None: expected an Outcome"),
        ("apply", (1.0, True), r"Maze\.apply\('Right'\) returned \(1\.0, True\): expected an Outcome"),
        ("render", None, r"Maze\.render\(\) returned None: expected a str"),
        ("instructions", 3, r"Maze\.instructions\(\) returned 3: expected a str"),
        ("actions", ["Left"], r"Maze\.actions\(\) returned \['Left'\]: expected a Mapping"),
        ("actions", {}, r"Maze\.actions\(\) returned no action: expected at least one"),
        ("expert_actions", None, r"Maze\.expert_actions\(\) returned None: expected a list of one or more"),
        ("expert_actions", "Right", r"returned 'Right': expected a list of one or more of Left, Right, Jump"),
        ("expert_actions", ["R"], r"returned \['R'\]: expected a list of one or more of Left, Right, Jump"),
        ("expert_actions", [], r"returned \[\]: expected a list of one or more of Left, Right, Jump"),
    ],
)
def test_what_a_game_returns_wrongly_is_named(attribute: str, value, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        played(attribute, value)


def test_an_expert_may_give_its_actions_one_by_one() -> None:
    game = type("Lazy", (Walk,), {"expert_actions": lambda self: iter(["Right", "Jump"])})(
        TextGameSettings(type="lazy", style="compact", think=False), TASK
    )
    assert game.expert_reply() == "<answer>R||J</answer>"
