"""Keys of the strategies: a name is short for a mode, what contradicts itself is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest

from silva.config.load import load
from silva.config.sections import FullContext, HideObservations, LastTurns, SingleTurn
from silva.errors import ConfigError
from silva.registries import REGISTRIES


def rollout(**keys: Any) -> Any:
    values = {"environments": [{"type": "bandit"}], "rollout": keys}
    return load([], REGISTRIES, values=values).config.rollout


@pytest.mark.parametrize("strategy", ["linear", "branching"])
def test_every_strategy_has_a_context(strategy: str) -> None:
    assert rollout(type=strategy).context == FullContext()
    assert rollout(type=strategy, context="single_turn").context == SingleTurn(turns=3, strip_thoughts=True)
    assert rollout(type=strategy, context={"type": "last_turns", "turns": 0}).context == LastTurns(turns=0)
    hides = {"type": "hide_observations", "first": 2, "roles": ["tool"]}
    assert rollout(type=strategy, context=hides).context == HideObservations(first=2, roles=("tool",))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("context", "expected"),
    [
        ({"type": "full", "turns": 3}, "unknown key"),
        ({"type": "last_turns", "turns": -1}, "expected an integer >= 0"),
        ({"type": "hide_observations", "last": 0}, "expected an integer > 0"),
        ({"type": "hide_observations", "roles": []}, "roles"),
        ("last", "last_turns"),
    ],
)
def test_a_key_that_a_mode_does_not_have_is_refused(context: Any, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        rollout(context=context)


def test_the_longest_answer_is_bounded_by_the_context_only_if_all_of_it_stays() -> None:
    """8 turns of 64 tokens, in a context of 200."""
    limits = {"max_turns": 8, "max_turn_tokens": 64, "max_episode_tokens": 200}
    assert rollout(limits=limits).longest_answer == 200
    assert rollout(limits=limits | {"max_turns": 3}).longest_answer == 192
    for context in ("last_turns", "single_turn", {"overflow": "drop_oldest"}, {"strip_thoughts": True}):
        assert rollout(limits=limits, context=context).longest_answer == 512


def test_dropping_turns_needs_room_for_a_reply() -> None:
    context = {"type": "last_turns", "overflow": "drop_oldest"}
    limits = {"max_turn_tokens": 64, "max_episode_tokens": 65}
    assert rollout(context=context, limits=limits).context.overflow == "drop_oldest"
    reason = r'context.overflow = "drop_oldest".*max_turn_tokens = 64: expected less than .*_tokens = 64'
    with pytest.raises(ConfigError, match=reason):
        rollout(context=context, limits=limits | {"max_episode_tokens": 64})
    assert rollout(limits=limits | {"max_episode_tokens": 64}).context.overflow == "end"


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (
            {"type": "branching", "entropy_gap_weight": 0.5, "initial_rollouts": 4},
            "initial_rollouts: got 4, which does nothing with entropy_gap_weight = 0.5",
        ),
        (
            {"type": "branching", "entropy_weight": 0, "entropy_tokens": 5},
            "entropy_tokens: got 5, which does nothing with entropy_weight = 0 and no entropy_gap_weight",
        ),
        ({"type": "branching", "entropy_weight": 0, "entropy_tokens": 5, "entropy_gap_weight": 0.5}, ""),
        ({"type": "branching", "entropy_gap_weight": 0.5, "initial_rollouts": 8}, ""),
        (
            {"type": "thoughts", "hint": "Do {action}"},
            "hint: got 'Do {action}', which does nothing with shows_action = false",
        ),
        ({"type": "thoughts", "hint": "Do {action}", "shows_action": True}, ""),
    ],
)
def test_keys_that_do_nothing_are_refused(keys: dict[str, Any], expected: str) -> None:
    if not expected:
        rollout(**keys)
        return
    with pytest.raises(ConfigError, match=re.escape(expected)):
        rollout(**keys)
