"""TextWorld: against an engine that tells two rooms, and against the library where it is installed."""

from __future__ import annotations

import asyncio
import json
import sys
import types
from pathlib import Path

import pytest
from tests.environments.foreign.playing import apart_and_here, wrong

from silva.environments.foreign.textworld import TextWorld
from silva.errors import ConfigError
from silva.types import Message

BANNER = " __\n|  \\  $$\n \\$$ \\$$ >\n"
WALKTHROUGH = ["inventory", "go East", "take coin"]


class Engine:
    """Two rooms and a coin: the second room scores 1, and the coin 1 more."""

    def __init__(self, path: str, infos: object) -> None:
        assert Path(path).exists() and infos == {"asked for"}
        self.got: list[str] = []

    def seed(self, seed: int) -> None:
        pass

    def close(self) -> None:
        pass

    def reset(self):
        return self._state(f"{BANNER}\nFind the coin!\n\n-= Hall =-\nA hall.\n\n>{' ' * 90}-= Hall =-0/1", 0)

    def step(self, command: str):
        self.got.append(command)
        east, won = "go east" in self.got, self.got[-2:] == ["go east", "take coin"]
        text = (
            "The End? No.\nWould you like to RESTART, RESTORE a saved game" if won else f"You did {command}."
        )
        return self._state(text, 2 if won else int(east), won=won), 0, won

    def _state(self, text: str, score: int, *, won: bool = False):
        return types.SimpleNamespace(
            feedback=text,
            score=score,
            max_score=2,
            won=won,
            lost=False,
            verbs=["go", "inventory", "take"],
            admissible_commands=["go East", "look", "take half-eaten crème brûlée"],
            policy_commands=["take coin"] if score == 1 else None,
        )


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """A library with games in a folder; gives the settings."""
    module = types.SimpleNamespace(start=Engine, EnvInfos=lambda **kinds: {"asked for"}, __version__="1.7.0")
    monkeypatch.setitem(sys.modules, "textworld", module)
    for number in range(8):
        (tmp_path / f"{number}.z8").write_bytes(b"")
        fact = {"name": "at", "arguments": [{"name": f"coin {number}"}]}
        game = {"infos": [], "world": [fact], "metadata": {"walkthrough": WALKTHROUGH}}
        (tmp_path / f"{number}.json").write_text(json.dumps(game))
    return TextWorld(path=str(tmp_path), eval_size=2, eval_share=0.5, train_size=10)


def task_of(settings: TextWorld):
    return settings.taskset().tasks("train")[0]


def test_the_text_is_the_games_own_without_title_and_menu(fake, replies_to) -> None:
    episode = fake.taskset().environment(task_of(fake))
    text = asyncio.run(episode.reset()).messages[0].content
    assert "\nFind the coin!\n-= Hall =-\nA hall.\nPossible commands: go East, look," in text
    steps = replies_to(fake, task_of(fake), ["go east", "take coin"])
    assert steps[-1].observation.messages[0].content == "The End? No.\nActions left: 23."


def test_a_win_pays_the_rest_to_1(fake, replies_to) -> None:
    steps = replies_to(fake, task_of(fake), ["look", "go east", "take coin"])
    assert [step.rewards["score"] for step in steps] == [0.0, 0.5, 0.5]
    assert steps[-1].terminated and steps[-1].metrics["success"] == 1.0
    bare = replies_to(fake.model_copy(update={"partial": False}), task_of(fake), ["go east", "take coin"])
    assert [step.rewards["score"] for step in bare] == [0.0, 1.0]


@pytest.mark.parametrize("name", ["won", "lost", "score", "max_score"])
def test_an_engine_that_says_nothing_gives_no_result(fake, replies_to, monkeypatch, name) -> None:
    step = Engine.step

    def silent(self, command: str):
        state, *rest = step(self, command)
        setattr(state, name, None)
        return state, *rest

    monkeypatch.setattr(Engine, "step", silent)
    with pytest.raises(TypeError, match=f"the engine gives {name} = None, expected"):
        replies_to(fake, task_of(fake), ["go east"])


@pytest.mark.parametrize(
    "command",
    [
        "save",
        "undo",
        "restart",
        "go east. save",
        "look; quit",
        "take coin then save",
        "tw-extra-infos score",
        "g",
    ],
)
def test_the_interpreter_gets_no_command_of_its_own(fake, replies_to, command) -> None:
    (step,) = replies_to(fake, task_of(fake), [command])
    assert step.observation.messages[0].content.startswith("The game has no command")
    assert step.metrics["action_is_valid"] == 0.0 and step.shaped["format"] == -0.1


@pytest.mark.parametrize("command", ["get coin", "x coin", "east", "take half-eaten crème brûlée"])
def test_synonyms_and_listed_commands_are_played(fake, replies_to, command) -> None:
    (step,) = replies_to(fake, task_of(fake), [command])
    assert step.observation.messages[0].content.startswith(f"You did {command}.")


def test_the_expert_follows_the_walkthrough_then_the_engine(fake) -> None:
    async def run(*replies: str) -> str:
        episode = fake.taskset().environment(task_of(fake))
        await episode.reset()
        for reply in replies:
            await episode.step(Message("assistant", reply))
        return episode.expert_reply().partition("<answer>")[2]

    assert asyncio.run(run("inventory", "look")) == "go East</answer>"
    assert asyncio.run(run("inventory", "go east")) == "take coin</answer>"
    assert asyncio.run(run("go east")) == "take coin</answer>"
    assert asyncio.run(run("take coin")) == "go East</answer>"  # no plan is known: a possible command


@pytest.mark.slow
def test_nothing_is_wrong_with_the_fake(fake) -> None:
    assert wrong(fake) == []


def test_max_actions_must_suffice(fake) -> None:
    with pytest.raises(ConfigError, match=r"0\.z8 takes 3 commands, and max_actions is 2: raise"):
        fake.model_copy(update={"max_actions": 2}).taskset()


def test_limits_are_those_of_the_game() -> None:
    games = ("coin_collector", "cooking", "treasure_hunter")
    assert [TextWorld(game=game).most_actions for game in games] == [25, 80, 40]
    assert TextWorld(max_actions=7).most_actions == 7


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"game": "treasure_hunter", "level": 31}, "got 31, expected 1 to 30"),
        ({"cooking": {"recipe": 1, "take": 2}}, "expected take <= recipe"),
    ],
)
def test_settings_that_no_game_has(keys, words) -> None:
    with pytest.raises(ValueError, match=words):
        TextWorld(**keys)


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """Settings of small games, made once."""
    pytest.importorskip("textworld", reason="pip install textworld")
    cache = tmp_path_factory.mktemp("cache")
    settings = TextWorld(
        game="treasure_hunter",
        level=4,
        games=2,
        eval_size=1,
        eval_share=0.4,
        train_size=4,
        cache_path=str(cache),
    )
    settings.taskset()
    return settings


def test_the_real_library(real) -> None:
    assert wrong(real) == []


def test_the_real_expert_wins(real, expert_rate) -> None:
    assert expert_rate(real, 1) == (1.0, 1.0)


def test_a_seed_gives_the_same_games_on_every_machine(real) -> None:
    if sys.modules["textworld"].__version__ != "1.7.0":
        pytest.skip("the digests are those of the games of TextWorld 1.7.0")
    tasks = [*real.taskset().tasks("train")[:2], *real.taskset().tasks("eval")]
    assert {task.data["file"]: task.data["content"] for task in tasks} == {
        "2109506285.z8": "8efd6510371963cf",
        "269159293.z8": "6d8096238f6f002f",
        "841484876.z8": "cd96be44049977dd",
    }


def test_a_real_game_saves_no_file(real, tmp_path, monkeypatch, replies_to) -> None:
    monkeypatch.chdir(tmp_path)
    task = real.taskset().tasks("train")[0]
    steps = replies_to(real, task, ["save", "look. save", "inventory", "drink north"])
    assert [step.metrics["action_is_valid"] for step in steps] == [
        0.0,
        0.0,
        1.0,
        steps[3].metrics["action_is_valid"],
    ]
    assert list(tmp_path.iterdir()) == []


def test_workers_give_the_same_episodes(real) -> None:
    apart, here = apart_and_here(real)
    assert apart == here
