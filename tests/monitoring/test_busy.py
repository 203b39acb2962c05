"""Other programs on the processor: fixed counts in, one line or none out."""

from pathlib import Path

import pytest

from silva.monitoring.busy import BusySample, cores, hint, sample, worked_seconds

STAT = """\
cpu  900 90 90 9000 900 9 9 9 0 0
cpu0 100 20 30 4000 500 6 7 8 99 99
cpu1 200 0 0 4000 400 1 1 1 0 0
cpu10 500 0 0 0 0 0 0 0 0 0
intr 12 3
"""


def test_work_of_the_cores_of_this_process():
    """Neither idle nor iowait, nor guests, which user has already."""
    assert worked_seconds(STAT, [0], 100) == 1.71
    assert worked_seconds(STAT, [0, 1], 100) == 3.74
    assert worked_seconds(STAT, [1], 1000) == 0.203


def between(worked, own, seconds=10.0):
    return BusySample(100.0, 50.0, 5.0), BusySample(100.0 + seconds, 50.0 + worked, 5.0 + own)


@pytest.mark.parametrize(
    ("worked", "own", "cores", "threads", "line"),
    [
        (19.0, 6.0, 2, 2, "other programs use 1.3 of 2 cores: this run may take several times as long; "
         "placement.threads = 1 may be faster"),
        (50.0, 10.0, 8, 8, "other programs use 4.0 of 8 cores: this run may take several times as long; "
         "placement.threads = 4 may be faster"),
        (25.0, 6.0, 2, 1, "other programs use 1.9 of 2 cores: this run may take several times as long"),
        (19.0, 6.0, 2, 1, ""),  # one core is left for its one thread, almost
        (10.0, 6.0, 2, 2, ""),  # a fifth over the cores is nothing
        (20.0, 10.0, 64, 64, ""),
        (10.0, 10.0, 2, 2, ""),
    ],
)  # fmt: skip
def test_a_line_if_there_are_not_enough_cores(worked, own, cores, threads, line):
    assert hint(*between(worked, own), cores, threads) == line


def test_what_is_not_known_or_too_short_says_nothing():
    first, last = between(100.0, 0.0, seconds=0.4)
    assert hint(first, last, 2, 2) == hint(None, last, 2, 2) == hint(first, None, 2, 2) == ""
    assert sample(Path("/nowhere/stat")) is None


def test_this_machine():
    assert cores() and all(isinstance(core, int) for core in cores())
    if Path("/proc/stat").exists():
        found = sample()
        assert found is not None and found.worked > 0 and found.own > 0
