"""ALFWorld: its task sets without the package, and the package where it is installed."""

from __future__ import annotations

import json
import random
import types
from pathlib import Path

import pytest
from tests.environments.foreign.playing import apart_and_here, wrong

from silva.environments.foreign import alfworld
from silva.environments.foreign.alfworld import AlfWorld, AlfWorldStory, made_up
from silva.environments.foreign.alfworld_houses import KINDS, draw, layout
from silva.environments.foreign.alfworld_plans import plan_for
from silva.errors import ConfigError

GAME = {
    "pddl_domain": "",
    "grammar": "",
    "pddl_problem": "",
    "solvable": True,
    "walkthrough": ["go east", "take mug"],
}


class Engine:
    """Says what it was told; wins with "take mug" after "go east". With policy_commands it searches."""

    def __init__(self) -> None:
        self.request_infos = types.SimpleNamespace(policy_commands=False)
        self.said: list[str] = []
        self.searches = 0

    def load(self, game: dict) -> None:
        self.game = game

    def reset(self):
        self.said = []
        return self._state(
            "-= Welcome to TextWorld, ALFRED! =-\n\nYou are in a room.\n\nYour task is to: take a mug."
        )

    def step(self, command: str):
        self.said.append(command)
        return self._state(f"You {command}."), 0, False

    def _state(self, text: str):
        self.searches += self.request_infos.policy_commands
        return types.SimpleNamespace(
            feedback=text,
            won="go east" in self.said and self.said[-1] == "take mug",
            admissible_commands=["go east", "look", "take mug"],
            policy_commands=["go east"] if self.request_infos.policy_commands else None,
        )


@pytest.fixture
def engines(monkeypatch):
    """Instead of the package's."""
    made = [Engine(), Engine()]
    monkeypatch.setattr(alfworld, "_FREE", [*made])
    monkeypatch.setattr(alfworld, "imported", lambda *names: None)
    return made


def write(folder: Path, name: str, **changes) -> None:
    file = folder / name / "game.tw-pddl"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({**GAME, "pddl_problem": name.rpartition("/")[2], **changes}))


@pytest.fixture
def data(tmp_path, engines) -> Path:
    for part, count in (("train", 6), ("valid_seen", 3), ("valid_unseen", 4)):
        for i in range(count):
            kind = KINDS[i % 6]
            write(tmp_path, f"{part}/{kind}-Mug-None-Desk-308/trial_{part}_{i}")
    write(tmp_path, "train/pick_and_place_with_movable_recep-Mug-Cup-Desk-3/t")
    write(tmp_path, "train/pick_and_place_simple-AppleSliced-None-Desk-3/t2")
    write(tmp_path, "train/pick_and_place_simple-Mug-None-Desk-3/t3", solvable=False)
    write(tmp_path, "train/pick_and_place_simple-Mug-None-Desk-3/trial_valid_unseen_1")  # a held-out problem
    return tmp_path


def files(taskset, split) -> set[str]:
    return {task.data["file"] for task in taskset.tasks(split)}


@pytest.mark.parametrize(("held_out", "count"), [("seen", 3), ("unseen", 4)])
def test_the_folders_of_alfworld_are_the_splits(data, held_out, count) -> None:
    taskset = AlfWorld(path=str(data), held_out=held_out, eval_size=count, train_size=20).taskset()
    assert len(files(taskset, "eval")) == count
    assert all(file.startswith(f"valid_{held_out}/") for file in files(taskset, "eval"))
    train = files(taskset, "train")
    assert all(file.startswith("train/") for file in train)
    assert len(train) == (6 if held_out == "unseen" else 7)  # without the copy of a held-out problem
    assert taskset.tasks("train")[0].answer == GAME["walkthrough"]


def test_kinds_of_tasks(data) -> None:
    settings = AlfWorld(path=str(data), tasks=("look_at_obj_in_light",), eval_size=1, train_size=5)
    assert {file.split("/")[1] for file in files(settings.taskset(), "train")} == {
        "look_at_obj_in_light-Mug-None-Desk-308"
    }


def test_a_folder_without_parts_is_divided_by_content(data) -> None:
    settings = AlfWorld(path=str(data / "valid_unseen"), eval_size=1, eval_share=0.5, train_size=9)
    taskset = settings.taskset()
    assert not files(taskset, "train") & files(taskset, "eval")


def test_a_folder_without_games(tmp_path, engines) -> None:
    (tmp_path / "train").mkdir()
    with pytest.raises(ConfigError, match=r"train: expected solvable games of ALFWorld .* got none"):
        AlfWorld(path=str(tmp_path)).taskset()


@pytest.mark.parametrize("held_out", ["seen", "unseen"])
def test_made_up_houses_share_no_room_with_held_out_ones(engines, held_out) -> None:
    taskset = AlfWorld(held_out=held_out, eval_size=60, train_size=300).taskset()
    rooms = [{json.dumps(layout(task.data)) for task in taskset.tasks(split)} for split in ("train", "eval")]
    assert bool(rooms[0] & rooms[1]) == (held_out == "seen")
    assert {task.data["task"] for task in taskset.tasks("eval")} == {*KINDS}


def test_only_a_task_that_is_done_pays(data, engines, replies_to) -> None:
    settings = AlfWorld(path=str(data), eval_size=4, train_size=10)
    task = settings.taskset().tasks("train")[0]
    steps = replies_to(settings, task, ["take mug", "dance", "go east", "take mug"])
    assert [step.rewards["score"] for step in steps] == [0.0, 0.0, 0.0, 1.0]
    assert [step.metrics["action_is_effective"] for step in steps] == [1.0, 0.0, 1.0, 1.0]
    assert steps[-1].terminated and steps[-1].metrics["success"] == 1.0
    assert (
        steps[0]
        .observation.messages[0]
        .content.startswith("You take mug.\nPossible commands: go east, look,")
    )


def test_the_expert_follows_the_walkthrough_then_searches_in_a_second_engine(engines) -> None:
    story = AlfWorldStory(GAME, walkthrough=GAME["walkthrough"])
    first = engines[1]  # the last one is taken first
    assert "ALFRED" not in story.start().text
    assert story.plan([]) == ["go east", "take mug"] and story.plan(["look", "go east"]) == ["take mug"]
    assert engines[0].said == []
    assert story.plan(["dance"]) == ["go east"]
    assert engines[0].said == ["dance", "look"] and engines[0].searches == 1 and first.searches == 0
    assert not engines[0].request_infos.policy_commands  # the engine is used again
    story.close()
    engine, other = alfworld._FREE
    assert (engine, other) == (engines[0], first)


def test_made_up_houses_need_enough_actions() -> None:
    with pytest.raises(ValueError, match="max_actions: got 5, but a task may take 12"):
        AlfWorld(max_actions=5)
    assert AlfWorld().max_actions == 50


@pytest.fixture
def real() -> AlfWorld:
    pytest.importorskip("alfworld", reason="pip install alfworld")
    return AlfWorld(eval_size=6, train_size=6)


@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_agrees_with_plans_for_made_up_houses(real, kind) -> None:
    """From the start, and after commands at random."""
    rng = random.Random(kind)
    house = draw(rng, [kind])
    for noise in (0, 8):
        story, said = AlfWorldStory(made_up(house)), list[str]()
        scene = story.start()
        for _ in range(noise):
            said.append(rng.choice(scene.commands))
            scene = story.send(said[-1])
        if not scene.won:
            for command in plan_for(house, said):
                assert not scene.won and command in scene.commands
                scene = story.send(command)
        assert scene.won and scene.earned == 1.0
        story.close()


@pytest.mark.slow
def test_nothing_is_wrong_with_the_real_package(real) -> None:
    settings = real.model_copy(update={"max_actions": 12})
    assert wrong(settings) == []


def test_games_of_a_folder_are_played_and_the_planner_of_the_package_helps(
    real, tmp_path, expert_rate
) -> None:
    for i in range(4):
        house = draw(random.Random(i), ["pick_and_place_simple"])
        write(tmp_path, f"pick_and_place_simple-{i}/t", **made_up(house), walkthrough=None)
    settings = AlfWorld(path=str(tmp_path), eval_size=1, eval_share=0.5, train_size=4)
    assert expert_rate(settings, 1) == (1.0, 1.0)


def test_workers_give_the_same_episodes(real) -> None:
    apart, here = apart_and_here(real)
    assert apart == here
