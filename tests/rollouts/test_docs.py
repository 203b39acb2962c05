"""docs/contexts.md: its keys and defaults are those of the settings, its costs are counted."""

from __future__ import annotations

import asyncio
import re
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
from scripted_engine import ScriptedEngine

from silva.config.load import load
from silva.config.sections import (
    EpisodeContext,
    EpisodeLimits,
    FullContext,
    HideObservations,
    LastTurns,
    SingleTurn,
)
from silva.models.trie import build
from silva.registries import REGISTRIES
from silva.rollouts.episode import play
from silva.rollouts.samples import trajectory_samples
from silva.rollouts.settings import LinearRolloutSettings
from silva.types import Message, Observation, Step, Task

PAGE = (Path(__file__).parents[2] / "docs" / "contexts.md").read_text()
MODES = {mode.model_fields["type"].default: mode for mode in get_args(get_args(EpisodeContext)[0])}


def table(heading: str) -> list[list[str]]:
    """The rows of the table whose first heading is this, without the headings."""
    lines = PAGE[PAGE.index(f"| {heading} |") :].splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines[: lines.index("")]]
    return rows[2:]


def test_all_modes_and_all_keys_are_told() -> None:
    assert [row[0].strip("`") for row in table("`type`")] == list(MODES)
    told = {key for row in table("key") for key in re.findall(r"\w+", row[0])}
    assert told == {key for mode in MODES.values() for key in mode.model_fields} - {"type"}
    defaults = {
        "turns": 3, "strip_thoughts": False, "overflow": "end", "first": 1, "last": 1,
        "roles": ("user", "tool"),
    }  # fmt: skip
    for name, default in defaults.items():
        found = [mode.model_fields[name].default for mode in MODES.values() if name in mode.model_fields]
        assert found.count(default) == len(found) - (name == "strip_thoughts")
    assert SingleTurn().strip_thoughts


def test_its_configuration_is_valid() -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    settings = LinearRolloutSettings(**tomllib.loads(block)["rollout"])
    assert settings.context == LastTurns(turns=2)


def test_configurations_of_the_page_on_rollouts_are_valid() -> None:
    page = (Path(__file__).parents[2] / "docs" / "rollouts.md").read_text()
    blocks = [tomllib.loads(block) for block in re.findall(r"```toml\n(.*?)```", page, re.DOTALL)]
    loaded = [load([], REGISTRIES, values={"environments": [{"type": "bandit"}], **block}, env={}).config
              for block in blocks]  # fmt: skip
    assert [config.rollout.type for config in loaded] == ["branching", "thoughts"]


class Counts:
    """Eight turns: a task of 97 letters, then observations of 37 (3 tokens more with what is around)."""

    taken = 0

    async def reset(self) -> Observation:
        return Observation((Message("user", "t" * 97),))

    async def step(self, message: Message) -> Step:
        self.taken += 1
        return Step(Observation((Message("user", f"{self.taken:037d}"),)), terminated=self.taken == 8)

    async def close(self) -> None:
        pass


COSTS: list[tuple[Any, EpisodeLimits]] = [
    (FullContext(), EpisodeLimits()),
    (FullContext(strip_thoughts=True), EpisodeLimits()),
    (HideObservations(), EpisodeLimits()),
    (HideObservations(last=2), EpisodeLimits()),
    (LastTurns(), EpisodeLimits()),
    (LastTurns(turns=0), EpisodeLimits()),
    (SingleTurn(), EpisodeLimits()),
    (SingleTurn(turns=0), EpisodeLimits()),
    (FullContext(overflow="drop_oldest"), EpisodeLimits(max_turn_tokens=60, max_episode_tokens=600)),
]


@pytest.mark.parametrize("number", range(len(COSTS)))
def test_its_costs_are_counted(world, renderer, policy, number: int) -> None:
    context, limits = COSTS[number]
    name, *expected = table("context")[number]
    assert name.startswith(f"`{context.type}`")
    said = iter(range(8))

    def reply(tokens: Any, params: Any) -> list[int]:
        turn = next(said)
        return renderer.encode_reply(f"<think>{turn:024d}</think>{turn:020d}")

    task, actor = Task("t", "w", 0, {}), policy(ScriptedEngine(reply))
    played = play(
        task, world(lambda task: Counts()), actor, renderer, limits, id="e", seed=1, context=context
    )
    rows = [sample.tokens for sample in trajectory_samples(asyncio.run(played), "g")]
    found = [len(rows), sum(map(len, rows)), len(build(rows)), max(map(len, rows))]
    assert found == [int(cell) for cell in expected]
