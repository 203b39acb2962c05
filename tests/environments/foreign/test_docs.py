"""docs/foreign_environments.md: every library has a row, and every example loads."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from silva.config.schema import import_settings
from silva.environments import ENVIRONMENTS

PAGE = (Path(__file__).parents[3] / "docs" / "foreign_environments.md").read_text()
EXAMPLES = [
    tomllib.loads(text)["environments"][0] for text in re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
]
FOREIGN = {name for name, target in ENVIRONMENTS.items() if ".foreign." in target} - {"harness"}
"""The environments of libraries. Programs that drive themselves are no library: docs/gateway.md."""


def test_every_library_has_a_row_and_an_example() -> None:
    assert set(re.findall(r"^\| \[.*?\| `(\w+)` \|", PAGE, re.MULTILINE)) == FOREIGN
    assert {example["type"] for example in EXAMPLES} == FOREIGN


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example["type"])
def test_an_example_is_valid(example) -> None:
    settings = import_settings(ENVIRONMENTS[example["type"]]).model_validate_json(json.dumps(example))
    assert settings.type == example["type"]
    blocking = {"gymnasium", "textarena", "reasoning_gym", "textworld", "alfworld", "trl", "verifiers",
                "bfcl", "scienceworld", "miniwob"}  # fmt: skip
    assert settings.workers == (settings.type in blocking)


def test_what_is_missing_is_said_for_each() -> None:
    for name in FOREIGN:
        settings = import_settings(ENVIRONMENTS[name])
        assert settings.licence and settings.needs
