"""Importing other libraries, their random numbers, when an episode counts as solved."""

from __future__ import annotations

import copy
import random

import numpy
import pytest

from silva.environments.foreign.library import OwnRandomness, as_json, finite, imported, plain, solved
from silva.errors import ConfigError


def test_a_missing_library_is_named_with_the_line_that_installs_it() -> None:
    with pytest.raises(ConfigError, match=r"gone: cannot import no_such_library: pip install 'no-such>=2'"):
        imported("no_such_library", "gone", "no-such>=2")
    assert imported("json", "any", "json").dumps([]) == "[]"


def test_what_a_library_itself_lacks_is_said(tmp_path, monkeypatch) -> None:
    (tmp_path / "half_there.py").write_text("import something_else_entirely\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="No module named 'something_else_entirely'"):
        imported("half_there", "gone", "half-there")


def test_random_numbers_go_on_where_the_episode_left_them_and_outside_nothing_changes() -> None:
    alone = random.Random(7)
    expected = [alone.random() for _ in range(4)]
    random.seed(1)
    numpy.random.seed(1)
    outside = random.Random(1).random(), numpy.random.RandomState(1).rand()
    a, b = OwnRandomness(7), OwnRandomness(7)
    drawn: list[float] = []
    for own in (a, b, a, b):
        with own:
            drawn.append(random.random())
            numpy.random.rand()
    assert drawn == [expected[0], expected[0], expected[1], expected[1]]
    assert (random.random(), numpy.random.rand()) == outside
    twin = copy.deepcopy(a)
    with a:
        assert random.random() == expected[2]
    with twin:
        assert random.random() == expected[2]
    a.seed(7)
    with a:
        assert random.random() == expected[0]


def test_an_error_inside_does_not_leave_its_random_numbers_behind() -> None:
    random.seed(2)
    own = OwnRandomness(7)
    with pytest.raises(KeyError), own:
        random.random()
        raise KeyError
    assert random.random() == random.Random(2).random()
    copy.deepcopy(own)


def test_sums_of_rewards_are_compared_with_their_rounding() -> None:
    assert sum([0.1] * 10) < 1.0 and solved(sum([0.1] * 10), 1.0)
    assert not solved(0.999, 1.0)


@pytest.mark.parametrize("wrong", [None, float("nan"), float("inf"), "much", [1]])
def test_a_reward_that_is_no_number_is_no_result(wrong) -> None:
    with pytest.raises(ValueError, match="mine: got the reward"):
        finite(wrong, "mine")


def test_numbers_of_other_types_are_rewards() -> None:
    assert finite(numpy.float32(0.5), "mine") == 0.5
    assert finite(True, "mine") == 1.0


def test_plain_data_has_one_order_and_no_addresses() -> None:
    data = {1: {"b", "a"}, "n": numpy.arange(2), "o": object(), "t": (1, None)}
    assert plain(data) == {"1": ['"a"', '"b"'], "n": [0, 1], "o": None, "t": [1, None]}


def test_what_a_server_gets_is_always_text() -> None:
    assert as_json({"a": "\ud800 é"}) == '{"a": "? é"}'.encode()
