"""docs/rewards.md: every reward and every key with its default, the configurations, the code, the numbers."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from pydantic import TypeAdapter
from pydantic_core import PydanticUndefined
from tests.rewards.attempts import grade

from silva.config.schema import import_settings
from silva.rewards import REWARDS
from silva.rewards.answers import FINDERS
from silva.rewards.cheats import CHEATS
from silva.rewards.choice import AnyReward
from silva.rewards.function import Function, FunctionReward

PAGE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
SETTINGS = {name: import_settings(target) for name, target in REWARDS.items()}
SHORT = {"OpenAI's": "https://api.openai.com/v1", "API's": None, "true": True, "-": PydanticUndefined}


def rows(header: str) -> list[list[str]]:
    lines = PAGE.split(f"| {header} |", 1)[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]


def keys() -> dict[tuple[str, str], str]:
    """(reward, key) -> default as shown."""
    found, reward = {}, ""
    for name, names, defaults, _ in rows("reward | key | default | means"):
        reward = name.strip("`") or reward
        shown = re.findall(r'\[.*?\]|"[^"]*"|[^,`]+', defaults.replace("`", ""))
        values = [value.strip() for value in shown if value.strip()]
        for index, key in enumerate(re.findall(r"`(\w+)`", names)):
            found[reward, key] = values[index] if len(values) > 1 else values[0]
    return found


def test_every_reward_is_listed() -> None:
    assert {row[0].strip("`") for row in rows("`type` | reward | solved")} == set(REWARDS)
    assert {row[0].strip("`") for row in rows("`extract` | the answer is")} == set(FINDERS)


@pytest.mark.parametrize("name", sorted(REWARDS))
def test_every_key_is_listed_with_its_default(name: str) -> None:
    listed = {key: default for (reward, key), default in keys().items() if reward == name}
    fields = SETTINGS[name].model_fields
    assert set(listed) == set(fields) - {"type", "extract"}
    for key, shown in listed.items():
        default = fields[key].default
        if shown.startswith("see "):
            continue
        if shown in SHORT:
            assert default is SHORT[shown] or default == SHORT[shown], key
        elif key == "correctness":
            assert default.type == shown.strip('"')
        else:
            assert (list(default) if isinstance(default, tuple) else default) == json.loads(shown), key


def test_the_shown_tables_are_settings() -> None:
    first, sum_ = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    rewards = TypeAdapter(AnyReward)
    short = re.findall(r"^# (reward = \{.*)$", first, re.MULTILINE)
    made = rewards.validate_python(tomllib.loads(short[0])["reward"])
    assert (made.extract, made.solved_at) == ("answer_tag", 0.8)
    parts = tomllib.loads(sum_)["environments"]["reward"]["parts"]
    assert [(part["weight"], part.get("decides", False)) for part in parts] == [(0.8, True), (0.2, False)]


def test_the_shown_function_is_a_reward() -> None:
    code = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0]
    space: dict = {}
    exec(code, space)
    reward = FunctionReward(Function(function="rewards.py:my_reward"), space["my_reward"])
    assert grade(reward, "<think>no</think> yes ", "yes").solved
    assert not grade(reward, "no", "yes").solved


def test_the_cheats_are_counted() -> None:
    assert len(CHEATS) == 20 and "Twenty cheats" in PAGE
