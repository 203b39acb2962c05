"""What a docstring says of its arguments, against the parser of transformers, which TRL uses."""

from __future__ import annotations

import pytest

from silva.environments.foreign.docstrings import described, parsed
from silva.tools.function import tool

utils = pytest.importorskip("transformers.utils.chat_template_utils")


def move(direction: str, steps: int = 1) -> str:
    """
    Moves on the board.

    It may not move you.

    Args:
        direction: Where to:
            left or right.
        steps: How far.

    Returns:
        What is seen there.
    """
    return ""


def plain_one(name: str) -> str:
    """Opens a door.

    Args:
        name: The door's.
    """
    return ""


@pytest.mark.parametrize("function", [move, plain_one])
def test_the_schema_says_what_that_of_transformers_says(function) -> None:
    theirs = utils.get_json_schema(function)["function"]
    ours = described(tool(function)).spec
    assert ours.name == theirs["name"]
    assert ours.description == theirs["description"]
    properties = theirs["parameters"]["properties"]
    assert {name: each["description"] for name, each in ours.parameters["properties"].items()} == {
        name: " ".join(each["description"].split()) for name, each in properties.items()
    }
    assert list(ours.parameters["required"]) == theirs["parameters"]["required"]


def test_a_docstring_without_sections_stays_as_it_is() -> None:
    assert parsed("Opens: a door.\nOr not.") == ("Opens: a door.\nOr not.", {})
