"""Whether other programs keep the processor busy: a run then takes several times as long.

torch shares each operation among its threads and waits for the last one. A thread that has to share its core
is always the last one.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

SHARE = 1.2  # warn if the demand for cores exceeds this share of them
SHORTEST = 0.5  # seconds; the kernel counts in hundredths, so a shorter time is not precise


@dataclass(frozen=True)
class BusySample:
    """At time `at`: seconds that the cores of this process have worked, for all programs and for this one."""

    at: float
    worked: float
    own: float


def cores() -> list[int]:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def sample(stat: Path = Path("/proc/stat")) -> BusySample | None:
    """None if the system does not report it (not Linux)."""
    try:
        worked = worked_seconds(stat.read_text(), cores(), os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError):
        return None
    return BusySample(time.monotonic(), worked, time.process_time())


def worked_seconds(stat: str, cores: list[int], ticks: int) -> float:
    """For the given cores, from the text of /proc/stat: user, nice, system, irq, softirq, steal."""
    names = {f"cpu{core}" for core in cores}
    total = 0
    for line in stat.splitlines():
        name, *counts = line.split()
        if name in names:
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, counts[:8])
            total += user + nice + system + irq + softirq + steal
    return total / ticks


def hint(first: BusySample | None, last: BusySample | None, cores: int, threads: int) -> str:
    """A line for the user if other programs and `threads` of this one want more cores than there are."""
    if first is None or last is None or last.at - first.at < SHORTEST:
        return ""
    others = ((last.worked - first.worked) - (last.own - first.own)) / (last.at - first.at)
    if others + threads <= SHARE * cores:
        return ""
    free = max(1, int(cores - others))
    advice = f"; placement.threads = {free} may be faster" if free < threads else ""
    return (
        f"other programs use {others:.1f} of {cores} cores: this run may take several times as long{advice}"
    )
