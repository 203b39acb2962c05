"""What became of a seed, and how it differs from the undisturbed run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tests.simulation.ledger_check import Facts


@dataclass
class Verdict:
    """What became of a seed.

    Attributes:
        end: "through", or the name of the error that the run ends with.
        problems: what must never be; empty if all is well.
        lives: how each life ended.
        fired: how often each kind of fault has happened.
    """

    seed: int
    end: str = ""
    problems: list[str] = field(default_factory=list)
    lives: list[str] = field(default_factory=list)
    fired: Counter[str] = field(default_factory=Counter)
    turns: int = 0
    seconds: float = 0.0
    compared: bool = False
    facts: Facts | None = None


def differences(verdict: Verdict, expected: Verdict) -> list[str]:
    if verdict.end != expected.end or verdict.facts is None or expected.facts is None:
        return [f"ended {verdict.end}, the undisturbed run {expected.end}"]
    mine, theirs = vars(verdict.facts), vars(expected.facts)
    return [
        f"{name}: got {mine[name]}, the undisturbed run has {theirs[name]}"
        for name in mine
        if mine[name] != theirs[name]
    ]
