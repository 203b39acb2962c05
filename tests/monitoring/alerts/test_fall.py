"""A warning if held-out results are clearly below their best, with the step and checkpoint of the best."""

import pytest

from silva.monitoring.alerts.fall import fall


def row(mean, low, high, metric="success", environment="lake"):
    return {"environment": environment, "metric": metric, "mean": mean, "ci_low": low, "ci_high": high}


BEFORE = (0, [row(0.02, 0.0, 0.07)])
BEST = (90, [row(0.69, 0.61, 0.76), row(0.5, 0.4, 0.6, "reward")])


@pytest.fixture
def checkpoint(tmp_path):
    (tmp_path / "step_90").mkdir()
    return lambda step: tmp_path / f"step_{step}"


@pytest.mark.parametrize(
    ("now", "peaks", "text"),
    [
        ([row(0.16, 0.10, 0.25), row(0.1, 0.0, 0.2, "reward")], [BEFORE, BEST],
         "held-out success of lake fell to 16.0% [10.0%, 25.0%] from 69.0% [61.0%, 76.0%] at step 90; "
         "its checkpoint is {step_90}"),
        # What was there before training counts too.
        ([row(0.02, 0.0, 0.07)], [(0, [row(0.4, 0.3, 0.5)]), (10, [row(0.3, 0.2, 0.4)])],
         "held-out success of lake fell to 2.0% [0.0%, 7.0%] from 40.0% [30.0%, 50.0%] at step 0; "
         "no checkpoint of that step is kept"),
        # Reward counts without success.
        ([row(0.1, 0.0, 0.2, "reward")], [(90, [row(0.5, 0.4, 0.6, "reward")])],
         "held-out reward of lake fell to 0.100 [0.000, 0.200] from 0.500 [0.400, 0.600] at step 90; "
         "its checkpoint is {step_90}"),
    ],
)  # fmt: skip
def test_a_clear_fall_names_the_best_step_and_its_checkpoint(checkpoint, tmp_path, now, peaks, text):
    assert fall(now, peaks, checkpoint) == text.format(step_90=tmp_path / "step_90")


@pytest.mark.parametrize(
    "now",
    [
        [row(0.60, 0.51, 0.68)],  # the intervals overlap
        [row(0.9, 0.8, 0.95)],
        [row(None, None, None)],  # every episode failed: that is said elsewhere
        [row(0.0, 0.0, 0.1, environment="new")],
        [row(0.69, 0.61, 0.76), row(0.0, 0.0, 0.1, "reward")],  # success is what counts
        [],
    ],
)
def test_anything_else_is_no_fall(now, checkpoint):
    assert fall(now, [BEFORE, BEST], checkpoint) == ""
    assert fall(now, [], checkpoint) == ""


def test_each_environment_has_its_own_best(checkpoint):
    peaks = [(0, [row(0.9, 0.8, 0.95, environment="a"), row(0.1, 0.0, 0.2, environment="b")]),
             (90, [row(0.2, 0.1, 0.3, environment="a"), row(0.9, 0.8, 0.95, environment="b")])]  # fmt: skip
    now = [row(0.2, 0.1, 0.3, environment="a"), row(0.2, 0.1, 0.3, environment="b")]
    lines = fall(now, peaks, checkpoint).splitlines()
    assert [line.partition(";")[0].rpartition(" ")[2] for line in lines] == ["0", "90"]
