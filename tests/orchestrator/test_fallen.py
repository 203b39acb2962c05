"""When the loop warns of a fall: as soon as it shows, and once more at the last step."""

from pathlib import Path

import pytest

from silva.orchestrator.evaluations import fallen
from silva.orchestrator.state import RunState


def rows(mean):
    return [
        {
            "environment": "lake",
            "metric": "success",
            "mean": mean,
            "ci_low": mean - 0.1,
            "ci_high": mean + 0.1,
        }
    ]


@pytest.mark.parametrize(
    ("step", "last", "now", "warns"),
    [
        (40, 0.7, 0.2, True),
        (50, 0.2, 0.1, False),  # said at step 40
        (50, 0.2, 0.65, False),
        (60, 0.65, 0.2, True),  # it came back in between
        (100, 0.2, 0.1, True),  # the last step
        (100, 0.7, 0.6, False),
    ],
)
def test_once_and_at_the_end(step, last, now, warns):
    state = RunState(
        step=step, eval_before=rows(0.1), eval_last=rows(last), eval_best=rows(0.7), best_step=30
    )

    def warning(state):
        return fallen(state, rows(now), 100, lambda step: Path(f"{step}"))

    text = warning(state)
    assert ("from 70.0% [60.0%, 80.0%] at step 30" in text) is warns and bool(text) is warns
    again = RunState.decode(state.encode())  # as after a resume
    assert warning(again) == text
