"""A plan beside what came of it: the numbers that a probe has foretold of a step, and those of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

from silva.config.sections import Foretold

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
SHARES = ("engine_idle", "trainer_idle")


def found(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """These numbers of the rows of steps; without those that no row has."""
    steps = list(filter(is_planned, rows))
    if not steps:
        return {}

    def middle(key: str) -> float | None:
        values = [row[key] for row in steps if row.get(key) is not None]
        return median(values) if values else None

    sampled = [row["rollout/sampled_tokens"] for row in steps if "rollout/sampled_tokens" in row]
    memory = [row["perf/peak_memory_bytes"] for row in steps if "perf/peak_memory_bytes" in row]
    known = {
        "seconds": median(map(seconds_of, steps)),
        "sampling": middle("perf/seconds/rollout"),
        "training": middle("perf/seconds/train"),
        "publishing": middle("perf/seconds/publish"),
        "engine_idle": middle("perf/idle/engine"),
        "trainer_idle": middle("perf/idle/trainer"),
        "age": fmean(map(_age, steps)),
        "tokens": fmean(sampled) if sampled else None,
        "memory": max(memory) / 2**30 if memory else None,
    }
    return {name: value for name, value in known.items() if value is not None}


def is_planned(row: Mapping[str, Any]) -> bool:
    """Whether it is of a step of RL: supervised steps and evaluations have no rollout."""
    return row.get("perf/seconds/rollout") is not None


def seconds_of(row: Mapping[str, Any]) -> float:
    """Of a step, without evaluation and checkpoint."""
    return sum(row.get(f"perf/seconds/{phase}") or 0.0 for phase in PHASES)


def _age(row: Mapping[str, Any]) -> float:
    key = "train/share/age"
    return sum(int(name[len(key) :].rstrip("+")) * (share or 0.0)
               for name, share in row.items() if name.startswith(key))  # fmt: skip


def in_words_of(numbers: Mapping[str, float]) -> str:
    return ", ".join(f"{words} {_shown(numbers[name], unit)}" for name, (words, unit) in NAMES.items()
                     if name in numbers)  # fmt: skip


def off(name: str, planned: float, came: float) -> float:
    """By how much a number was planned too high: a share of what came; of shares and ages, and where nothing
    came, the difference."""
    return planned - came if name in (*SHARES, "age") or not came else planned / came - 1


def lines(plan: Foretold, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """How wrong the plan was, a line a number."""
    came, said = found(rows), list[str]()
    for name, (words, unit) in NAMES.items():
        planned = getattr(plan, name)
        if planned is None or name not in came:
            continue
        wrong = off(name, planned, came[name])
        if name == "age":
            error = f"{wrong:+.2f}"
        elif unit == "%" or came[name]:
            error = f"{wrong:+.0%}{' points' if unit == '%' else ''}"
        else:
            error = f"{wrong:+.3g}{unit}"
        both = f"{_shown(planned, unit)} foretold, {_shown(came[name], unit)} found"
        said.append(f"plan: {words}: {both} ({error})")
    return said


def _shown(value: float, unit: str) -> str:
    return f"{value:.0%}" if unit == "%" else f"{value:,.0f}" if not unit else f"{value:.3g}{unit}"
