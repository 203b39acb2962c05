from __future__ import annotations

from silva.environments.foreign.gymnasium import Gymnasium
from silva.environments.foreign.textworld import TextWorld
from silva.environments.foreign.trl import Trl


def test_what_names_an_environment_in_reports() -> None:
    """Its own name, the last part of what is chosen of the library, or the type."""
    assert Gymnasium(id="my_games:ALE/Pong-v5").label == "ALE/Pong-v5"
    assert Trl(factory="games.py:Guess").label == "Guess"
    assert Trl(factory="games.py:Guess", name="mine").label == "mine"
    assert TextWorld().label == "textworld"
