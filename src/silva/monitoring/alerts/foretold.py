"""A plan beside what came of it: the numbers that a probe has foretold of a step, and those of the run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from silva.config.sections import Foretold

Row = Mapping[str, Any]
PHASES = ("rollout", "train", "publish")
NAMES: Mapping[str, tuple[str, str]] = {
    "seconds": ("a step", " s"),
    "sampling": ("of it sampling", " s"),
    "training": ("training", " s"),
    "publishing": ("publishing", " s"),
    "engine_idle": ("engine idle", "%"),
    "trainer_idle": ("trainer idle", "%"),
    "age": ("age of tokens", " versions"),
    "tokens": ("tokens sampled a step", ""),
    "memory": ("peak memory of the loop's process", " GiB"),
}
"""What is foretold, in words, and its unit."""


def found(rows: Iterable[Row]) -> dict[str, float]:
    """These numbers of the rows of steps; without those that no row has."""
    return together([_of_step(row) for row in rows if is_planned(row)])


def together(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each number, which says how long a run takes where steps differ; of memory, the peak."""
    values = {name: [step[name] for step in steps if name in step] for name in NAMES}
    return {name: (max if name == "memory" else fmean)(each) for name, each in values.items() if each}


def _of_step(row: Row) -> dict[str, float]:
    age, peak = "train/share/age", row.get("perf/peak_memory_bytes")
    shares = {int(key.removeprefix(age).rstrip("+")): row[key] or 0.0 for key in row if key.startswith(age)}
    numbers = {
        "seconds": seconds_of(row),
        "sampling": row.get("perf/seconds/rollout"),
        "training": row.get("perf/seconds/train"),
        "publishing": row.get("perf/seconds/publish"),
        "engine_idle": row.get("perf/idle/engine"),
        "trainer_idle": row.get("perf/idle/trainer"),
        "age": sum(versions * share for versions, share in shares.items()),
        "tokens": row.get("rollout/sampled_tokens"),
        "memory": None if peak is None else peak / 2**30,
    }
    return {name: value for name, value in numbers.items() if value is not None}


def is_planned(row: Row) -> bool:
    """Whether it is of a step of RL: supervised steps and evaluations have no rollout."""
    return row.get("perf/seconds/rollout") is not None


def seconds_of(row: Row) -> float:
    """Of a step, without evaluation and checkpoint."""
    return sum(row.get(f"perf/seconds/{phase}") or 0.0 for phase in PHASES)


def in_words_of(numbers: Mapping[str, float]) -> str:
    return ", ".join(f"{NAMES[name][0]} {_shown(name, value)}" for name, value in numbers.items())


def lines(plan: Foretold, rows: Iterable[Row]) -> list[str]:
    """How wrong the plan was, a line a number."""
    said = list[str]()
    for name, came in found(rows).items():
        if (planned := getattr(plan, name)) is not None:
            share = came and name not in ("engine_idle", "trainer_idle", "age")
            error = f" ({planned / came - 1:+.0%})" if share else ""
            both = f"{_shown(name, planned)} foretold, {_shown(name, came)} found"
            said.append(f"plan: {NAMES[name][0]}: {both}{error}")
    return said


def _shown(name: str, value: float) -> str:
    unit = NAMES[name][1]
    return f"{value:.0%}" if unit == "%" else f"{value:,.0f}" if not unit else f"{value:.3g}{unit}"
