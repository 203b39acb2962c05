"""What the adapters' settings share, and what is said of a library that is not installed."""

from __future__ import annotations

import sys

import pytest

from silva.environments.foreign.alfworld import AlfWorld
from silva.environments.foreign.gymnasium import Gymnasium
from silva.environments.foreign.nemo_gym import NemoGym
from silva.environments.foreign.openenv import OpenEnv
from silva.environments.foreign.reasoning_gym import ReasoningGym
from silva.environments.foreign.textarena import TextArena
from silva.environments.foreign.textworld import TextWorld
from silva.environments.foreign.trl import Trl
from silva.environments.foreign.verifiers import Verifiers
from silva.errors import ConfigError


def test_what_names_an_environment_in_reports() -> None:
    """Its own name, the last part of what is chosen of the library, or the type."""
    assert Gymnasium(id="my_games:ALE/Pong-v5").label == "ALE/Pong-v5"
    assert Trl(factory="games.py:Guess").label == "Guess"
    assert Trl(factory="games.py:Guess", name="mine").label == "mine"
    assert TextWorld().label == "textworld"


@pytest.mark.parametrize(
    ("settings", "package"),
    [
        (AlfWorld(), "alfworld>=0.4.2"),
        (Gymnasium(id="FrozenLake-v1"), "gymnasium>=1.0"),
        (NemoGym(url="http://127.0.0.1:1", path="x"), "silva[search]"),
        (OpenEnv(url="http://127.0.0.1:1"), "websockets>=14"),
        (ReasoningGym(task="leg_counting"), "reasoning-gym>=0.1.20"),
        (TextArena(id="Mastermind-v0"), "textarena>=0.7.4"),
        (TextWorld(), "textworld>=1.7"),
        (Verifiers(taskset_id="gsm8k"), "verifiers>=0.4,<0.5"),
    ],
    ids=lambda each: getattr(each, "type", ""),
)
def test_a_missing_library_is_named_with_the_line_that_installs_it(settings, package, monkeypatch) -> None:
    (module,) = {name.partition(".")[0] for name in settings.packages} - {"textworld"} or {"textworld"}
    for name in [each for each in sys.modules if each.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError) as error:
        settings.taskset()
    assert str(error.value).startswith(f"environment {settings.type}: cannot import {module}")
    assert str(error.value).endswith(f"pip install '{package}'")
