"""Spaces of gymnasium as text: every action can be written and read back."""

from __future__ import annotations

import numpy
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from silva.environments.foreign.spaces import Actions, as_text, drawn, refused
from silva.errors import ConfigError

READABLE = [
    spaces.Discrete(4),
    spaces.Discrete(3, start=-1),
    spaces.Text(6, charset="abc"),
    spaces.MultiDiscrete([2, 5]),
    spaces.MultiBinary(3),
    spaces.Tuple([spaces.Discrete(2), spaces.Text(4, charset="xyz")]),
    spaces.Dict(
        {"verb": spaces.Text(5, charset="go"), "count": spaces.Discrete(9), "flags": spaces.MultiBinary(2)}
    ),
]


@pytest.mark.parametrize("space", READABLE, ids=str)
def test_every_action_is_read_as_it_was_written(space) -> None:
    actions = Actions(space)
    for seed in range(20):
        action = actions.sample(seed)
        again = actions.read(f"<answer>{actions.write(action)}</answer>")
        assert space.contains(again)
        assert actions.write(again) == actions.write(action)


@pytest.mark.slow
@pytest.mark.parametrize("space", READABLE, ids=str)
@given(
    reply=st.text(max_size=30)
    | st.sampled_from(["{", "[1", "[]", "{}", "[9, 9]", "[1e400, 0]", "null", "NaN"])
)
def test_any_reply_is_an_action_of_the_space_or_none(space, reply: str) -> None:
    try:
        action = Actions(space).read(reply)
    except ValueError:
        return
    assert space.contains(action)


def test_names_numbers_case_and_full_stops() -> None:
    actions = Actions(spaces.Discrete(2, start=5), ["Stick", "Hit"])
    assert [actions.read(reply) for reply in ("<answer>hit</answer>", "Stick.", "6", "**5**")] == [6, 5, 6, 5]
    with pytest.raises(ValueError, match="no action"):
        actions.read("Stick or hit")
    assert actions.rules() == "Actions: Stick, Hit. Reply in this form: <answer>Stick</answer>"


def test_a_deeply_nested_reply_is_no_action() -> None:
    with pytest.raises(ValueError):
        Actions(spaces.MultiBinary(3)).read("[" * 100_000)


def test_what_is_no_text_is_named() -> None:
    image = spaces.Box(0, 255, (2, 2), numpy.uint8)
    assert refused(image).startswith("Box(0, 255, (2, 2)")
    assert refused(spaces.Dict({"mission": spaces.Text(9), "image": image})).startswith("image: Box(")
    assert refused(spaces.Tuple([spaces.Discrete(2), spaces.Dict({"x": image})])).startswith("1.x: Box(")
    assert [refused(space) for space in READABLE] == [""] * len(READABLE)
    with pytest.raises(ConfigError, match=r"the action space has Box.*expected Text, Discrete"):
        Actions(image)


def test_names_must_fit_the_actions() -> None:
    with pytest.raises(ConfigError, match="names 1 actions, expected 2"):
        Actions(spaces.Discrete(2), ["Left"])
    with pytest.raises(ConfigError, match="are for a Discrete action space"):
        Actions(spaces.Text(3), ["Left"])


def test_observations_are_lines_of_text() -> None:
    observation = {
        "position": numpy.int64(4),
        "text": "a door",
        "flags": numpy.array([1, 0]),
        "pair": (1, "b"),
    }
    assert as_text(observation) == "position: 4\ntext: a door\nflags: [1, 0]\npair: 1, b"


def test_colours_of_a_drawing_become_marks() -> None:
    """The drawings are those of gymnasium 1.4: FrozenLake marks where you are, Taxi also the passenger."""
    assert drawn("\n\x1b[41mS\x1b[0mFFF\nFHFH\n") == "[S]FFF\nFHFH"
    assert drawn("|\x1b[34;1mR\x1b[0m: |\x1b[43m \x1b[0m: :G|\n|\x1b[35mY\x1b[0m|") == (
        "|blue:R: |[ ]: :G|\n|magenta:Y|"
    )
    assert drawn("\x1b[2Jplain\x1b[0m") == "plain"
