"""Environments of gymnasium, against gymnasium itself."""

from __future__ import annotations

import asyncio
import dataclasses

import gymnasium
import pytest
from gymnasium import spaces
from tests.environments.foreign.playing import first_task, texts, wrong

from silva.environments.foreign.gymnasium import Gymnasium
from silva.errors import CapabilityError, ConfigError
from silva.types import Task

LAKE = Gymnasium(id="FrozenLake-v1", kwargs={"is_slippery": False}, eval_size=4, train_size=20)
WINS = ("Down", "Down", "Right", "Right", "Down", "Right")  # on the 4 x 4 map of gymnasium


def answer(action: str) -> str:
    return f"<think>Perhaps.</think><answer>{action}</answer>"


class Riddle(gymnasium.Env):
    """Say the word.

    Not shown.
    """

    metadata = {"render_modes": []}  # noqa: RUF012
    observation_space = spaces.Dict(
        {"hint": spaces.Text(20, charset="abcdefgh.0123456789"), "left": spaces.Discrete(5)}
    )
    action_space = spaces.Text(8, charset="abcdefgh")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.word = "".join(self.np_random.choice(list("abcdefgh"), 3))
        return {"hint": self.word[0], "left": 3}, {}

    def step(self, action):
        luck = float(self.np_random.random())
        return {"hint": f"{luck:.6f}", "left": 2}, float(action == self.word), action == self.word, False, {}


@pytest.fixture(scope="module", autouse=True)
def riddle():
    gymnasium.register("SilvaRiddle-v0", entry_point=Riddle, max_episode_steps=7)
    yield
    del gymnasium.registry["SilvaRiddle-v0"]


def test_the_way_over_the_ice(replies_to) -> None:
    steps = replies_to(LAKE, Task("t", "lake", 0, {"seed": 3}), [answer(name) for name in WINS])
    assert [step.rewards["score"] for step in steps] == [0, 0, 0, 0, 0, 1]
    assert steps[-1].terminated and steps[-1].metrics["success"] == 1.0
    assert steps[0].observation.messages[0].content == "Observation: 4\n  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG"


def test_the_first_text_has_the_rules_and_the_drawing() -> None:
    environment = LAKE.taskset().environment(first_task(LAKE))
    text = asyncio.run(environment.reset()).messages[0].content
    assert text.startswith("Frozen lake involves crossing a frozen lake")
    assert "Actions: Left, Down, Right, Up. Reply in this form: <answer>Left</answer>" in text
    assert text.endswith("Observation: 0\n[S]FFF\nFHFH\nFFFH\nHFFG")
    with pytest.raises(CapabilityError, match="gymnasium has no experts"):
        environment.expert_reply()  # type: ignore[attr-defined]


def test_a_hole_and_a_reply_that_is_no_action(replies_to) -> None:
    steps = replies_to(
        LAKE, Task("t", "lake", 0, {"seed": 3}), ["anywhere", "<answer>Right</answer>", "Down"]
    )
    assert steps[0].observation.messages[0].content.startswith("No valid action was read. Actions: Left")
    assert [step.shaped["format"] for step in steps] == [-0.1, 0.0, 0.0]
    assert [step.metrics["action_is_valid"] for step in steps] == [0.0, 1.0, 1.0]
    assert steps[-1].terminated and steps[-1].metrics["success"] == 0.0


def test_a_seed_gives_the_episode_of_gymnasium_with_the_chance_of_the_task(replies_to) -> None:
    """The problem is gymnasium's; what happens by chance differs with the seed of the episode."""
    settings = Gymnasium(id="SilvaRiddle-v0", eval_size=4, train_size=20)
    theirs = gymnasium.make("SilvaRiddle-v0")
    observation, _ = theirs.reset(seed=11)
    task = Task("t", "riddle", 1, {"seed": 11})

    def played(seed: int) -> list[str]:
        steps = replies_to(settings, dataclasses.replace(task, seed=seed), ["abc", "bad", "cab"])
        return texts(steps)

    environment = settings.taskset().environment(task)
    shown = asyncio.run(environment.reset()).messages[0].content
    assert shown.startswith("Say the word.\nReply in this form")
    assert shown.endswith(f"Observation: hint: {observation['hint']}\nleft: 3")
    assert played(1) == played(1) != played(2)
    assert replies_to(settings, task, [theirs.unwrapped.word])[-1].metrics["success"] == 1.0


@pytest.mark.parametrize(
    ("name", "worst"), [("CliffWalking-v1", -100.0), ("Taxi-v4", -10.0), ("Blackjack-v1", -1.0)]
)
def test_nonsense_costs_what_the_worst_action_costs(replies_to, name, worst) -> None:
    settings = Gymnasium(id=name, eval_size=2, max_actions=5)
    steps = replies_to(settings, Task("t", "g", 0, {"seed": 3}), ["Hello."] * 5)
    assert [step.rewards["score"] for step in steps] == [worst] * 5 and steps[-1].truncated


def test_text_that_the_space_does_not_contain_is_no_action_and_limits_hold(replies_to) -> None:
    settings = Gymnasium(id="SilvaRiddle-v0", eval_size=4, max_actions=3)
    task = Task("t", "riddle", 1, {"seed": 11})
    steps = replies_to(settings, task, ["XYZ", "abcabcabcabc", "zzz"])
    assert [step.metrics["action_is_valid"] for step in steps] == [0.0, 0.0, 0.0]
    assert steps[-1].truncated and steps[-1].metrics["success"] == 0.0
    steps = replies_to(settings.model_copy(update={"max_actions": 50}), task, ["abc"] * 20)
    assert len(steps) == 7 and steps[-1].truncated  # gymnasium's own limit


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"id": "NoSuch-v0"}, ["cannot make 'NoSuch-v0'", "NameNotFound"]),
        ({"id": "Pendulum-v1"}, ["the observation space has Box", "expected Text, Discrete"]),
        ({"id": "FrozenLake-v1", "kwargs": {"size": 3}}, ["unexpected keyword argument 'size'"]),
        ({"id": "FrozenLake-v1", "actions": ("A", "B")}, ["names 2 actions, expected 4"]),
        ({"id": "Blackjack-v1", "show": "drawing"}, ['no render_mode "ansi"']),
    ],
)
def test_what_cannot_be_played_is_said_at_the_start(keys, words) -> None:
    with pytest.raises(ConfigError) as error:
        Gymnasium(**keys).taskset()
    assert all(word in str(error.value) for word in words)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        Gymnasium(id="FrozenLake-v1", eval_size=4, train_size=20),
        Gymnasium(id="Taxi-v4", eval_size=4, train_size=20, max_actions=12, show="drawing"),
        Gymnasium(id="Blackjack-v1", eval_size=4, train_size=20, show="observation"),
    ],
    ids=lambda settings: settings.id,
)
def test_nothing_is_wrong_with_them(settings) -> None:
    assert wrong(settings) == []
