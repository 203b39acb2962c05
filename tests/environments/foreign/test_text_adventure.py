"""The base of text adventures, with a story that needs no engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.environments.foreign.playing import wrong

from silva.environments.foreign.text_adventure import (
    MOST_UNWON,
    Adventure,
    AdventureSettings,
    Scene,
    earned,
    left_of,
    read_command,
)
from silva.environments.tasks import Draft, listed
from silva.types import Message

OPEN: list[House] = []


class House:
    """Rooms in a row, from 0 on. The goal is the last one, and room -1 is a pit. Each new room scores."""

    def __init__(self, rooms: int) -> None:
        self.rooms, self.place, self.best = rooms, 0, 0
        OPEN.append(self)

    def start(self) -> Scene:
        return self._scene("Welcome.\n\n\n")

    def send(self, command: str) -> Scene:
        self.place += {"go east": 1, "Go West": -1, "go west": -1}.get(command, 0)
        self.best = max(self.best, self.place)
        return self._scene("" if command.startswith("go") else "Nothing happens. ")

    def refusal(self, command: str) -> str:
        return "There is no saving here." if command == "save" else ""

    def plan(self, said: Sequence[str]) -> Sequence[str]:
        return ["go east"] * (self.rooms - self.place)

    def close(self) -> None:
        OPEN.remove(self)

    def _scene(self, text: str) -> Scene:
        won, lost = self.place == self.rooms, self.place < 0
        reward = earned(self.best, self.rooms, won=won, partial=True)
        return Scene(
            f"{text}You are in room {self.place}.", ("go east", "Go West", "look"), reward, won, lost
        )


class Houses(AdventureSettings):
    type: str = "houses"
    eval_size: int = 2
    train_size: int = 10
    max_actions: int = 12

    def taskset(self):
        drafts = [Draft({"rooms": rooms}) for rooms in range(1, 9)]
        return listed(self, drafts, lambda task: HouseEpisode(self, task))


class HouseEpisode(Adventure):
    def open(self) -> House:
        return House(self.task.data["rooms"])

    def rules(self) -> str:
        return "Go to the last room."


@pytest.fixture(autouse=True)
def all_are_closed():
    OPEN.clear()
    yield
    assert OPEN == []


def begun(rooms: int = 3, **keys):
    settings = Houses(**keys)
    task = next(
        t for split in ("train", "eval") for t in settings.taskset().tasks(split) if t.data["rooms"] == rooms
    )
    return settings.taskset().environment(task)


def said(text: str) -> Message:
    return Message("assistant", text)


def test_what_is_shown() -> None:
    async def run() -> list[str]:
        episode = begun()
        first = await episode.reset()
        steps = [await episode.step(said(each)) for each in ("<answer>go east</answer>", "...", "save")]
        await episode.close()
        return [part.messages[0].content for part in (first, *(step.observation for step in steps))]

    form = "Reply with one command in this form: <think>your thoughts</think><answer>look</answer>"
    commands = "Possible commands: go east, Go West, look."
    assert asyncio.run(run()) == [
        f"Go to the last room.\n{form}\nWelcome.\nYou are in room 0.\n{commands}\nActions left: 12.",
        f"You are in room 1.\n{commands}\nActions left: 11.",
        f"No command was read. {form}\n{commands}\nActions left: 10.",
        f"There is no saving here. {form}\n{commands}\nActions left: 9.",
    ]


def test_rewards_are_the_share_of_the_score_and_end_with_the_game(play_out) -> None:
    steps = play_out(
        begun(3), lambda turn: ["nothing", "go east", "Go West", "go east", "go east"][min(turn, 4)]
    )
    assert [round(step.rewards["score"], 6) for step in steps] == [0, 0.333333, 0, 0, 0.333333, 0.333333]
    assert [step.metrics["action_is_effective"] for step in steps] == [0, 1, 1, 1, 1, 1]
    assert steps[-1].terminated and steps[-1].metrics["success"] == 1.0


def test_a_lost_game_ends_without_success(play_out) -> None:
    steps = play_out(begun(3), lambda turn: ["go east", "go west"][turn > 0])
    assert len(steps) == 3 and steps[-1].terminated and not steps[-1].truncated
    assert steps[-1].metrics["success"] == 0.0 and sum(step.rewards["score"] for step in steps) == 1 / 3


def test_every_reply_uses_up_an_action(play_out) -> None:
    steps = play_out(begun(3, max_actions=4), lambda turn: ["", "save", "look", "?"][turn])
    assert [step.truncated for step in steps] == [False, False, False, True]
    assert [step.shaped["format"] for step in steps] == [-0.1, -0.1, 0.0, 0.0]
    assert steps[-1].metrics["success"] == 0.0


def test_a_fork_plays_the_same_commands_in_an_engine_of_its_own() -> None:
    async def run() -> None:
        episode = begun(3)
        await episode.reset()
        await episode.step(said("go east"))
        twin = await episode.fork(5)
        assert len(OPEN) == 2 and [house.place for house in OPEN] == [1, 1]
        assert (await twin.step(said("go east"))).observation == (
            await episode.step(said("go east"))
        ).observation
        await twin.step(said("go west"))
        await twin.close()
        assert OPEN[0].place == 2 and episode.said == ["go east", "go east"]
        assert (await episode.step(said("go east"))).metrics["success"] == 1.0
        await episode.close()

    asyncio.run(run())


def test_nothing_is_wrong_with_it() -> None:
    assert wrong(Houses()) == []


@pytest.mark.parametrize(
    ("reply", "command"),
    [
        ("<think>go west</think><answer> Go  East.</answer>", "go east"),
        ("<answer>go west</answer> no: <answer>go east</answer>", "go east"),
        ("> go east", "go east"),
        ("`look`", "look"),
        ("go east\ngo west", ""),
        ("<answer></answer>", ""),
        ("x" * 201, ""),
        ("go\x00 east", ""),
        ("...", ""),
    ],
)
def test_a_command_is_one_short_line(reply, command) -> None:
    assert read_command(reply) == command


@given(
    score=st.floats(-1e9, 1e9),
    most=st.floats(-10, 1e9),
    partial=st.booleans(),
)
def test_no_score_is_worth_a_game_that_is_won(score, most, partial) -> None:
    assert earned(score, most, won=True, partial=partial) == 1.0
    assert 0.0 <= earned(score, most, won=False, partial=partial) <= (MOST_UNWON if partial else 0.0)


@pytest.mark.slow
@given(st.lists(st.sampled_from(["go east", "go west", "look", "save", "", "dance"]), max_size=12))
def test_the_rewards_of_an_episode_add_up_to_1_only_if_it_is_won(replies) -> None:
    async def run() -> tuple[float, bool]:
        episode, total, won = begun(2), 0.0, False
        await episode.reset()
        for reply in replies:
            step = await episode.step(said(reply))
            total += step.rewards["score"]
            if step.terminated or step.truncated:
                won = episode.scene.won
                assert step.metrics["success"] == won
                break
        await episode.close()
        return total, won

    total, won = asyncio.run(run())
    assert (abs(total - 1) < 1e-9) == won and (won or total <= MOST_UNWON)


def test_what_is_left_of_a_walkthrough() -> None:
    way = ["look", "Take key", "go east", "go east"]
    idle = ("look", "examine")
    assert left_of(way, [], idle) == way
    assert left_of(way, ["look", "look", "take key", "examine key"], idle) == ["go east", "go east"]
    assert left_of(way, ["look", "go east"], idle) == []
    assert left_of(way, [each.casefold() for each in way], idle) == []
