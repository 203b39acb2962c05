"""Faults of the environment and of the engine: what becomes of the episode, and in what words."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from silva.errors import ContextOverflow, EngineError
from silva.types import Message, Observation

HERE = "tests/rollouts/test_episode_faults.py"


def faulty(talk, where: str, what: Any):
    """A world whose `where` raises or returns `what`, in the second turn where it is a step."""

    def act(usual: Any) -> Any:
        if isinstance(what, Exception):
            raise what
        return what(usual) if callable(what) else what

    class Faulty(talk):
        async def reset(self):
            usual = await super().reset()
            return act(usual) if where == "reset" else usual

        async def step(self, message):
            usual = await super().step(message)
            return act(usual) if where == "step" and self.taken == 2 else usual

        async def close(self):
            await super().close()
            if where == "close":
                act(None)

    return Faulty


def rewarded(**changes: Any):
    return lambda step: replace(step, **changes)


@pytest.mark.parametrize(
    ("where", "what", "failure", "words"),
    [
        ("reset", ValueError("no map"), "redo", "reset: ValueError: no map"),
        ("step", KeyError("x"), "redo", "step: KeyError: 'x'"),
        ("step", TimeoutError("of a tool"), "redo", "step: TimeoutError: of a tool"),
        ("reset", "hello", "redo", "reset: TypeError: got str, expected Observation"),
        ("step", None, "redo", "step: TypeError: got NoneType, expected Step"),
        ("step", rewarded(observation="hi"), "redo", "step: TypeError: got str, expected Observation"),
        (
            "step",
            rewarded(rewards=1.0),
            "redo",
            "step: TypeError: rewards of the Step is 1.0, expected named numbers, such as "
            'rewards={"score": 1.0}',
        ),
        (
            "step",
            rewarded(metrics=None),
            "redo",
            'step: TypeError: metrics of the Step is None, expected named numbers, such as metrics={"success',
        ),
        (
            "step",
            rewarded(observation=Observation((Message("user", None),))),
            "redo",
            "observation: TypeError",
        ),
        ("step", rewarded(rewards={"won": math.nan}), "mask", "step: reward 'won' is nan, expected a finite"),
        ("step", rewarded(shaped={"bonus": -math.inf}), "mask", "step: reward 'bonus' is -inf"),
        (
            "step",
            rewarded(rewards={"won": "1"}),
            "mask",
            "step: reward 'won' is '1', expected a finite number",
        ),
        ("step", rewarded(rewards={"won": None}), "mask", "step: reward 'won' is None"),
        ("step", rewarded(metrics={"success": math.nan}), "mask", "step: metric 'success' is nan"),
        ("step", rewarded(metrics={"success": "yes"}), "mask", "step: metric 'success' is 'yes'"),
    ],
)
def test_a_fault_of_the_environment_is_part_of_the_result(
    run, world, talk, where: str, what: Any, failure: str, words: str
) -> None:
    places = world(faulty(talk, where, what))
    trajectory = run(places)
    assert (trajectory.stop_reason, trajectory.failure) == ("error", failure)
    assert trajectory.error.startswith(words), trajectory.error
    assert places.made[0].closed == 1
    # Turns before the fault are there to be read, but no group counts them.
    usual = 0 if where == "reset" else 2 if words.startswith("observation") else 1
    assert len(trajectory.turns) == usual


def test_numbers_of_other_libraries_are_numbers(run, world, talk) -> None:
    values = {"a": np.float32(0.5), "b": np.int64(2), "c": True}
    trajectory = run(world(faulty(talk, "step", rewarded(rewards=values))))
    assert trajectory.failure is None
    assert trajectory.rewards == {"talk": 2.0, "a": 0.5, "b": 2.0, "c": 1.0}
    assert {type(value) for value in trajectory.rewards.values()} == {float}


def test_an_environment_that_cannot_be_made_gives_no_result(run, world) -> None:
    def refuse(task):
        raise FileNotFoundError("words.txt")

    trajectory = run(world(refuse))
    line = refuse.__code__.co_firstlineno + 1
    assert trajectory.failure == "redo" and trajectory.error == (
        f"construction: FileNotFoundError: words.txt ({HERE}:{line})"
    )


def test_an_error_in_close_leaves_the_result(run, world, talk) -> None:
    trajectory = run(world(faulty(talk, "close", RuntimeError("busy"))))
    assert (trajectory.stop_reason, trajectory.failure) == ("terminated", None)
    assert trajectory.error.startswith(f"close: RuntimeError: busy ({HERE}:") and trajectory.raw_reward == 3.0


def test_a_fault_of_the_engine_is_not_the_environment_s(run, world, talk) -> None:
    class Broken:
        def __init__(self, error: Exception) -> None:
            self.error = error

        async def sample(self, *_: Any, **__: Any):
            raise self.error

    places = world(talk)
    for error in (EngineError("gone"), TimeoutError("of its own")):
        with pytest.raises(type(error), match=str(error)):
            run(places, Broken(error))
    masked = run(places, Broken(ContextOverflow("too long")))
    assert (masked.stop_reason, masked.failure, masked.error) == ("context_overflow", "mask", "too long")
    assert [one.closed for one in places.made] == [1] * 3
