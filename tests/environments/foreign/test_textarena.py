"""Games of TextArena: against a recording, and against the library where it is installed."""

from __future__ import annotations

import enum
import json
import random
import sys
import types
from pathlib import Path

import pytest
from tests.environments.foreign.playing import texts, wrong

from silva.environments.foreign.textarena import TextArena
from silva.errors import ConfigError
from silva.protocols import Scripted
from silva.types import Task

RECORDED = json.loads((Path(__file__).parent / "recordings" / "textarena.json").read_text())
MASTERMIND = TextArena(id="Mastermind-v0", eval_size=4, train_size=20)
TASK = Task("t", "mastermind", 0, {"seed": RECORDED["seed"]})


class ObservationType(enum.Enum):
    PROMPT = 1
    PLAYER_ACTION = 2
    GAME_ACTION_DESCRIPTION = 5
    GAME_ADMIN = 6


class Game:
    """The recorded game; moves that were not recorded are refused, the second time for good."""

    def reset(self, num_players: int, seed: int) -> None:
        assert num_players == 1
        random.seed(seed)
        known = RECORDED["games"][str(seed % len(RECORDED["games"]))]
        self.state = types.SimpleNamespace(game_state={**known["state"], "seed": seed})
        self.said, self.wrong, self.end = known["begin"], 0, None

    def get_observation(self):
        said, self.said = self.said, []
        return 0, [(sender, text, ObservationType[kind]) for sender, text, kind in said]

    def step(self, action: str):
        turn = next((turn for turn in RECORDED["turns"] if turn["action"] == action), None)
        if turn is None:
            self.wrong += 1
            self.said = [[0, action, "PLAYER_ACTION"], [-1, "That was no move.", "GAME_ADMIN"]]
            self.end = [{"0": 0.25}, {"0": {"invalid_move": True, "reason": "no move"}}]
            return self.wrong > 1, {}
        self.said, self.end = turn["observation"], turn["close"]
        return turn["done"], {}

    def close(self):
        return tuple({int(player): value for player, value in part.items()} for part in self.end)


@pytest.fixture
def recorded(monkeypatch):
    made: list[str] = []

    def make(env_id: str, **kwargs) -> Game:
        made.append(env_id)
        print("Generated puzzle in 1 attempts")  # as some games do
        return Game()

    module = types.SimpleNamespace(make=make, ObservationType=ObservationType)
    monkeypatch.setitem(sys.modules, "textarena", module)
    return made


def test_the_recorded_game(recorded, replies_to, capsys) -> None:
    steps = replies_to(MASTERMIND, TASK, ["[1 2 3 4]", "no idea", "<think>[9 9]</think>[2 5 6 4]"])
    said = texts(steps)
    assert said[0] == "Submitted [1 2 3 4]. Feedback: 1 black peg(s), 1 white peg(s)."
    assert said[1].startswith("You attempted an invalid move.")
    assert said[2] == "You have cracked the code, solving 4 out of 4 pegs correctly"
    assert [step.rewards["score"] for step in steps] == [0.0, 0.0, 1.0]
    assert [step.shaped["format"] for step in steps] == [0.0, -0.1, 0.0]
    assert steps[-1].terminated and steps[-1].metrics["success"] == 1.0
    assert set(recorded) == {"Mastermind-v0-raw"}  # other variants show all earlier texts in every turn
    assert capsys.readouterr().out == ""


def test_a_part_of_the_reward_is_no_success(recorded, replies_to) -> None:
    steps = replies_to(MASTERMIND, TASK, ["nothing", "nothing"])
    assert steps[-1].rewards == {"score": 0.25}
    assert steps[-1].metrics == {"action_is_valid": 0.0, "success": 0.0}


def test_hidden_codes_decide_what_is_held_out(recorded) -> None:
    """All games begin with the same text; the state of the game has the code."""
    taskset = MASTERMIND.taskset()
    assert taskset.notes == ()
    assert not isinstance(taskset.environment(TASK), Scripted)  # nor does it list the moves that are allowed


def test_nothing_is_wrong_with_the_recorded_game(recorded) -> None:
    assert wrong(MASTERMIND) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Mastermind-v0", "GuessTheNumber-v0", "LightsOut-v0"])
def test_the_real_library(name) -> None:
    pytest.importorskip("textarena", reason="pip install textarena")
    settings = TextArena(id=name, eval_size=4, train_size=20)
    assert wrong(settings) == []


def test_the_recording_is_what_the_library_does(replies_to) -> None:
    pytest.importorskip("textarena", reason="pip install textarena")
    steps = replies_to(MASTERMIND, TASK, [turn["action"] for turn in RECORDED["turns"]])
    expected = [
        "\n".join(t for sender, t, _ in turn["observation"] if sender == -1) for turn in RECORDED["turns"]
    ]
    said = texts(steps)
    assert said[:2] == expected[:2] and steps[-1].metrics["success"] == 1.0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("NoSuchGame-v0", "cannot start 'NoSuchGame-v0'"),
        ("TicTacToe-v0", "expected a game for one player, got 'TicTacToe-v0'"),
    ],
)
def test_what_cannot_be_played_is_said_at_the_start(name, words) -> None:
    pytest.importorskip("textarena", reason="pip install textarena")
    with pytest.raises(ConfigError, match=words):
        TextArena(id=name).taskset()


@pytest.mark.slow
def test_a_game_that_counts_needs_to_know_what_a_success_is() -> None:
    with pytest.raises(ConfigError, match="Set-v0 pays the sets found in 20 turns: set solved_at"):
        TextArena(id="Set-v0").taskset()
    assert TextArena(id="Set-v0", solved_at=3.0, eval_size=4).taskset().tasks("eval")
