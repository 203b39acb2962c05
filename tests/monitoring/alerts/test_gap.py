"""Training success far above held-out success is said."""

import pytest

from silva.monitoring.alerts.gap import gap


def held_out(mean, high, metric="success"):
    return [{"environment": "bank", "metric": metric, "mean": mean, "ci_high": high}]


def steps(*shares):
    return [{"step": 0}, *({"step": i, "success/bank": share} for i, share in enumerate(shares, 1))]


@pytest.mark.parametrize(
    ("shares", "after", "said"),
    [
        (
            [0.5] * 12,
            held_out(0.0, 0.3),
            "success is 50.0% on training tasks in the last 10 steps, but 0.0% on",
        ),
        ([0.0] * 9 + [0.9, 0.8, None], held_out(0.05, 0.06), ""),  # the mean of ten steps counts
        (
            [0.9, None, 0.8],
            held_out(0.25, 0.6),
            "success is 85.0% on training tasks in the last 2 steps, but 25.0%",
        ),
        ([0.5] * 12, held_out(0.0, 0.31), ""),
        ([1.0] * 12, held_out(0.0, 0.1, "reward"), ""),
        ([1.0] * 12, held_out(None, None), ""),
        ([], held_out(0.0, 0.1), ""),
    ],
)
def test_training_success_far_above_the_held_out_interval_is_said(shares, after, said):
    lines = gap(steps(*shares), after)
    assert len(lines) == bool(said) and all(said in line and line.startswith("bank: ") for line in lines)
