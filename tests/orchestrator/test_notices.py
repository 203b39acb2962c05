"""What is said of steps and episodes: once each, with the reason and the key to change."""

from __future__ import annotations

import time
from dataclasses import replace
from unittest.mock import MagicMock

import numpy as np
import pytest
from tests.algorithms.by_hand import batch, failed, group, one_turn, recipe, trajectory

from silva.orchestrator.buffer import Batch, Dropped, Piece
from silva.orchestrator.notices import MOST_KINDS, Activity, Notices, explain, teaches
from silva.rollouts.samples import to_samples


class Said:
    def __init__(self):
        self.shown, self.logged, self.stages = [], [], []

    def message(self, text, level):
        self.shown.append((level, text))

    def log(self, text, level):
        self.logged.append(text)

    def stage(self, *what):
        self.stages.append(what)


def test_the_first_fault_of_each_kind_is_shown_and_its_traceback_logged():
    activity = Activity(said := Said())
    for number in range(3):
        activity.fault("lake", f"step: ValueError: row {number} (lake.py:4)", f"Traceback {number}")
    activity.fault("sea", "step: ValueError: row 9 (lake.py:4)", "Traceback 9")
    activity.fault("lake", "prompt of 30 tokens", "")
    assert said.shown == [
        ("warning", "lake: an episode failed: step: ValueError: row 0 (lake.py:4) (traceback in run.log)"),
        ("warning", "sea: an episode failed: step: ValueError: row 9 (lake.py:4) (traceback in run.log)"),
        ("warning", "lake: an episode failed: prompt of 30 tokens"),
    ]
    assert said.logged == [
        "lake: the first fault of its kind:\nTraceback 0",
        "sea: the first fault of its kind:\nTraceback 9",
    ]


def test_errors_that_never_repeat_do_not_fill_the_terminal():
    activity = Activity(said := Said())
    for number in range(100):
        activity.fault("lake", f"no key k{number}", "trace")
    assert len(said.shown) == MOST_KINDS + 1 and len(said.logged) == MOST_KINDS
    assert said.shown[-1] == ("warning", "further kinds of errors are only counted")


def test_an_environment_that_blocks_is_named_once_with_what_to_do():
    activity = Activity(said := Said())
    for seconds in (0.25, 0.5, 0.25, 5.0):
        activity.blocked("lake", "step", seconds)
    activity.blocked("sea", "reset", 0.5)
    ((level, text),) = said.shown
    assert level == "warning" and text.startswith("lake: step blocks the event loop, 0.5 s at a time")
    assert "asyncio.to_thread" in text
    activity.blocked("sea", "reset", 5.0)
    assert [text.partition(",")[0] for _, text in said.shown[1:]] == ["sea: reset blocks the event loop"]


def test_whom_episodes_wait_for_is_a_heartbeat():
    activity = Activity(said := Said())
    activity.groups(1, 4)
    activity.turn("a", "engine")
    activity.turn("b", "lake")
    activity.turn("c", "engine")
    activity.turn("b", None)
    assert said.stages[-2:] == [
        ("rollout", 1, 4, "2 engine, 1 lake"), ("rollout", 1, 4, "2 engine")]  # fmt: skip


def test_a_heartbeat_costs_the_same_however_many_episodes_are_live():
    costs = []
    for live in (100, 10_000):
        activity = Activity(Said())
        for number in range(live):
            activity.turn(f"e{number}", "engine")
        began = time.process_time()
        for number in range(100):
            activity.turn(f"e{number}", "lake")
        costs.append(time.process_time() - began)
    assert costs[1] < 10 * costs[0]  # it was 60 times as much when all of them were counted


def said(monitor: MagicMock) -> list[str]:
    return [call.args[0] for call in monitor.message.call_args_list]


def test_only_the_first_step_that_taught_nothing_is_explained() -> None:
    monitor = MagicMock()
    notices = Notices(monitor, recipe("grpo"))
    for step in (1, 2):
        dropped = Batch(step, [Piece([], [Dropped(batch(1.0, 1.0), "zero_variance")])])
        assert notices.step(dropped, []) is False
    (text,) = said(monitor)
    assert text.startswith("step 1 trained nothing")


def test_every_skipped_update_is_named() -> None:
    monitor = MagicMock()
    notices = Notices(monitor, recipe("ppo"))
    notices.update(3, {"nonfinite": 0.0, "critic/nonfinite": 0.0})
    notices.update(4, {"nonfinite": 1.0, "critic/nonfinite": 1.0})
    assert said(monitor) == [
        "step 4: update skipped, its loss or gradient was not finite",
        "step 4: update of the critic skipped, its loss or gradient was not finite",
    ]


def test_failures_are_counted_over_all_steps_and_said_at_the_end() -> None:
    monitor = MagicMock()
    notices = Notices(monitor, recipe("grpo"))
    for step in (1, 2):
        notices.step(Batch(step, [Piece([group("g", one_turn("a", 1, 1.0), failed("b"))])]), [])
    before = len(said(monitor))
    notices.end()
    assert said(monitor)[before:] == ["2 of 4 training episodes failed and were left out: 2 x late"]
    assert notices.failing(0.4).startswith(
        "more than 40% of the episodes gave no result in each of the last steps (rollout.max_failed = 0.4): "
        "2 of 4 training episodes failed and were left out: 2 x late. "
    )
    quiet = MagicMock()
    Notices(quiet, recipe("grpo")).end()
    assert said(quiet) == []


def rows(*advantages):
    """Of 2 tokens that were shown and 2 that were sampled."""
    (sample,) = to_samples([group("g", one_turn("a", 2, 1.0))])
    return [sample.replace(advantages=np.array(values, np.float32)) for values in advantages]


@pytest.mark.parametrize(
    ("advantages", "taught"),
    [
        ([], False),
        ([[0, 0, 0, 0]], False),
        ([[1, 1, 0, 0]], False),  # of tokens that the environment wrote
        ([[0, 0, 0, -1e-30]], True),
        ([[0, 0, 0, 0], [0, 0, 2, 0]], True),
    ],
)
def test_an_advantage_of_a_trained_token_teaches(advantages, taught):
    assert teaches(recipe("grpo"), rows(*advantages)) is taught


def test_imitation_needs_no_advantage():
    assert teaches(recipe("cross_entropy"), rows([0, 0, 0, 0]))
    assert not teaches(recipe("cross_entropy"), [])


@pytest.mark.parametrize(
    ("reason", "rewards", "given", "words"),
    [
        ("zero_variance", (0.5, 0.5), {}, "all earned the same reward (0.5 on average)"),
        (
            "too_hard",
            (0.0, 0.0),
            {"difficulty_range": (0.25, 0.75)},
            "algorithm.difficulty_range = [0.25, 0.75]",
        ),
        ("failed", (), {}, "Every episode failed."),
    ],
)
def test_why_a_step_taught_nothing(reason, rewards, given, words):
    left_out = Batch(3, [Piece([], [Dropped(batch(*rewards, key=key), reason)]) for key in "gh"])
    text = explain(recipe("grpo", **given), left_out)
    assert text.startswith(f"step 3 trained nothing, since all 2 groups were left out (2 {reason}). ")
    assert words in text
    cut = replace(group("g", one_turn("a", 2, 0.0)).trajectories[0].turns[0], stop_reason="length")
    short = Batch(3, [Piece([], [Dropped(group("g", trajectory("a", (cut,))), "zero_variance")])])
    assert "100% of the replies were cut off" in explain(recipe("grpo"), short)
    kept = explain(recipe("grpo"), Batch(3, [Piece([batch(1.0, 1.0)])]))
    assert kept.startswith("step 3 trained on rows whose advantages are all 0. The episodes of a task all")
