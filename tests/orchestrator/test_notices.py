"""What a run says of its steps: the first one that taught nothing, skipped updates, failures at the end."""

from __future__ import annotations

from unittest.mock import MagicMock

from tests.algorithms.by_hand import batch, failed, group, one_turn, recipe

from silva.orchestrator.buffer import Batch, Dropped, Piece
from silva.orchestrator.notices import Notices


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
