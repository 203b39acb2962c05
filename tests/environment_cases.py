"""Small settings of every registered environment, for tests that go through all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from silva.config.schema import import_settings
from silva.environments import ENVIRONMENTS
from silva.environments.settings import EnvironmentSettings
from silva.rewards.exact_match import ExactMatch

OWN = [name for name, target in ENVIRONMENTS.items() if ".foreign." not in target]
"""Those that need no other library and no server; tests/environments/foreign has the others."""
ROWS = tuple({"question": f"What is {a} plus {b}?", "answer": a + b} for a in range(40) for b in range(40))
NEEDED: dict[str, dict[str, Any]] = {
    "dataset": {"rows": ROWS, "reward": ExactMatch()},
    "longbench_v2": {"words": 600, "part_words": 200},
    "demonstrations": {
        "path": str(Path(__file__).parent / "environments" / "worlds" / "demonstrations.jsonl")
    },
}


def small(kind: str, **keys: Any) -> EnvironmentSettings:
    made: EnvironmentSettings = import_settings(ENVIRONMENTS[kind])(**{**NEEDED.get(kind, {}), **keys})
    return made
