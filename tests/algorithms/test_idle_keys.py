"""Every recipe times every key: what may be set changes something, or is refused."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from tests.algorithms.by_hand import group, recipe, trajectory, turn
from torch import Tensor

from silva.algorithms import ALGORITHMS, compose
from silva.algorithms.advantages import ADVANTAGES
from silva.algorithms.aggregation import AGGREGATIONS, normalise
from silva.algorithms.correction import RolloutCorrection
from silva.algorithms.losses import LOSSES
from silva.algorithms.settings import Algorithm
from silva.config.sections import EpisodeLimits
from silva.rollouts.samples import to_samples
from silva.trainer.loss_inputs import weighted_loss
from silva.trainer.policy import TokenLogprobs
from silva.types import Group, Signals

pytestmark = pytest.mark.slow

# What is read outside of the algorithm, by which tasks are played, how often, and from which reference.
ELSEWHERE = {
    "type", "reference", "reference_refresh", "difficulty_pools", "oversample", "replay", "early_stop",
    "max_refills",
}  # fmt: skip
LOSS_KEYS: dict[str, list[dict[str, Any]]] = {
    "reinforce": [{}],
    "clipped": [
        {},
        {"clip_low": 0.5},
        {"clip_high": 0.9},
        {"clip_dual": 2.5},
        {"balanced_clip_min_entropy": 0.1},
    ],
    "gspo": [{}, {"clip_low": 0.5}, {"clip_high": 0.9}],
    "cispo": [{}, {"clip_low": 0.5}, {"clip_high": 0.9}],
    "aipo": [{}, {"max_ratio": 1.5}, {"kl_tau": 0.3}],
    "dro": [{}, {"kl_beta": 0.5}],
    "cross_entropy": [{}, {"weighting": "dft"}],
}
CORRECTIONS: list[dict[str, Any]] = [
    {}, {"weight": "mask"}, {"weight": None}, {"level": "geometric"}, {"level": "sequence"}, {"low": 0.9},
    {"high": 1.2}, {"reject": {"token": (0.9, 1.1)}},
]  # fmt: skip
VALUES: dict[str, list[Any]] = {
    "advantage": list(ADVANTAGES),
    "advantage_over": ["group", "environment", "batch"],
    "credit": ["trajectory", "turn", "gae", "bi_level_gae"],
    **{key: [1.0, 0.5] for key in ("gamma", "lam", "turn_lam")},
    "turn_gamma": [0.95, 0.5],
    "bootstrap": [True, False],
    "tree_credit": ["soft", "hard"],
    "entropy_advantage": [0.0, 0.3],
    "whiten": [None, "tokens", "trajectories"],
    "advantage_clip": [None, (-0.1, 0.1)],
    "use_rewards": [True, False],
    "kl_reward_coef": [0.0, 0.5],
    "kl_reward_gamma": [0.0, 0.5],
    "overlong_buffer": [0.0, 0.5],
    "length_penalty": [0.0, 0.5],
    "loss": [{"type": name, **keys} for name, several in LOSS_KEYS.items() for keys in several],
    "aggregation": list(AGGREGATIONS),
    "aggregation_constant": [None, 7.0],
    "kl_coef": [0.0, 0.3],
    "kl_estimator": ["k1", "k2", "k3"],
    "kl_bias_correction": [True, False],
    "entropy_coef": [0.0, 0.3],
    "rollout_correction": [None, *CORRECTIONS],
    "adaptive_kl": [None, {}],
    "adaptive_entropy": [None, {}],
    "adaptive_temperature": [None, {}],
    "drop_zero_variance": [True, False],
    "difficulty_range": [None, (0.0, 0.5)],
    "variance_filter": [None, {"keep": "top_k", "value": 2.0}],
}
BESIDE = {"kl_reward_gamma": {"kl_reward_coef": 0.3}, "kl_estimator": {"kl_coef": 0.3},
          "kl_bias_correction": {"kl_coef": 0.3}, "adaptive_kl": {"kl_coef": 0.3},
          "aggregation_constant": {"aggregation": "constant"}, "use_rewards": {"kl_reward_coef": 0.3},
          "gamma": {"credit": "turn"}}  # fmt: skip


def _batch() -> list[Group]:
    """Three groups in two worlds: shared turns, several lengths, penalties, an episode that was cut off."""
    shared = turn("a/0", 2, 3, 0.25)
    first = group(
        "g", trajectory("a", [shared, turn("a/1", 2, 5, 1.0)]),
        trajectory("b", [shared, turn("b/1", 1, 2, 0.0, shaped=-0.5), turn("b/2", 1, 1, 0.5)]),
        trajectory("c", [turn("c/0", 2, 4, 0.5), turn("c/1", 1, 1, 0.25)], stop="max_turns"),
    )  # fmt: skip
    second = group(
        "h", trajectory("d", [turn("d/0", 1, 7, 2.0), turn("d/1", 1, 2, 0.0)]),
        trajectory("e", [turn("e/0", 1, 2, 0.5)]), trajectory("f", [turn("f/0", 1, 1, 0.25)]),
        environment="lake",
    )  # fmt: skip
    third = group("i", trajectory("k", [turn("k/0", 1, 3, 0.5)]), trajectory("l", [turn("l/0", 1, 6, 0.5)]))
    return [first, second, third]


def _noise(name: str, count: int, kind: int) -> np.ndarray:
    return np.random.default_rng([kind, *name.encode()]).normal(size=count)


GROUPS = _batch()
SAMPLES = [
    s.replace(entropies=_noise(s.trajectory, len(s), 1), loss_weights=s.loss_weights.astype(np.float64))
    for s in to_samples(GROUPS)
]
SIGNALS = Signals(
    logprobs=tuple(s.logprobs + 0.5 * _noise(s.trajectory, len(s), 2) for s in SAMPLES),
    reference_logprobs=tuple(-1 + _noise(s.trajectory, len(s), 3) for s in SAMPLES),
    values=tuple(_noise(s.trajectory, len(s), 4) for s in SAMPLES),
)


def fingerprint(made: Algorithm) -> list[float]:
    """The numbers that a recipe makes of the batch: who is trained, advantages, gradient, controllers."""
    groups = [compose.with_penalties(made, each, EpisodeLimits(max_turn_tokens=8)) for each in GROUPS]
    reasons = [*(compose.drop_reason(made, each) for each in groups), *compose.compare(made, groups)]
    found = [float(len(reason or "")) for reason in reasons]
    ahead = {"c": 2.0} if made.bootstraps else {}
    rows = compose.with_advantages(made, SAMPLES, groups, SIGNALS, {"baseline/maze": 0.3}, bootstrap=ahead)
    for row in rows:
        assert row.advantages is not None
        found += [] if made.imitates else row.advantages.tolist()
    constant = made.aggregation_constant or 128.0
    rows = normalise(rows, made.aggregation, constant=constant if made.aggregation == "constant" else None)
    state = compose.next_state(made, {}, groups, {"kl": 0.5, "entropy": 0.1}, 1.0)
    spec = made.loss_spec(state)

    def joined(arrays: Sequence[np.ndarray]) -> Tensor:
        masks = [row.loss_weights > 0 for row in rows]
        return torch.from_numpy(np.concatenate([a[m] for a, m in zip(arrays, masks, strict=True)]))

    logprobs = joined([-1 + 1.5 * _noise(row.trajectory, len(row), 5) for row in rows]).requires_grad_()
    entropies = joined([_noise(row.trajectory, len(row), 6).clip(0) for row in rows])
    numbers = joined([np.full(len(row), i) for i, row in enumerate(rows)])
    references = SIGNALS.reference_logprobs if made.refers else None
    packed = TokenLogprobs(logprobs, entropies, numbers)
    loss, _ = weighted_loss(packed, rows, references, spec, 0, False)
    found += [*torch.autograd.grad(loss, logprobs)[0].tolist(), loss.item()]
    return found + [state[name] for name in sorted(state)]


def test_every_key_is_looked_at() -> None:
    assert set(VALUES) | ELSEWHERE == {"type", *Algorithm.model_fields}
    assert set(LOSS_KEYS) == set(LOSSES)
    for name, several in LOSS_KEYS.items():
        keys = {key for keys in several for key in keys}
        assert keys == set(LOSSES[name].settings.model_fields) - {"type"}
    assert {key for keys in CORRECTIONS for key in keys} == set(RolloutCorrection.model_fields)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_may_be_set_changes_something(name: str) -> None:
    """The usual value of a key may always be written. `advantage` and `credit` also say what filters compare,
    and whether `drop_zero_variance` may be set, so they do something if the loss reads no advantages."""
    silent = []
    for key, values in VALUES.items():
        for beside in ({}, BESIDE.get(key, {})):
            usual = _made(name, beside)
            for value in values:
                made = _made(name, beside | {key: value})
                if not usual or not made or getattr(made, key) == getattr(usual, key):
                    continue
                written = getattr(made, key) == getattr(Algorithm.model_fields[key], "default", None)
                if (written and key in made._idle) or (key in ("advantage", "credit") and made.imitates):
                    continue
                if fingerprint(made) == _fingerprint(name, tuple(beside.items())):
                    silent.append(f"{key} = {value!r} beside {beside}")
    assert not silent


def _made(name: str, given: dict[str, Any]) -> Algorithm | None:
    try:
        made: Algorithm = recipe(name, **given)
    except ValidationError:
        return None
    return made


@cache
def _fingerprint(name: str, given: tuple[tuple[str, Any], ...]) -> list[float]:
    return fingerprint(recipe(name, **dict(given)))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"gamma": 0.9}, 'gamma: got 0.9, which does nothing with credit = "trajectory"; leave it out'),
        ({"lam": 0.9, "credit": "turn"}, 'lam: got 0.9, which does nothing with credit = "turn"'),
        ({"turn_gamma": 0.5}, "turn_gamma: got 0.5, which does nothing"),
        (
            {"advantage_clip": (3.0, -1.0)},
            r"advantage_clip: got \[3.0, -1.0\], expected a lower and a higher",
        ),
        (
            {"reference": {"name": "x"}},
            "reference: got .* does nothing with kl_coef = 0 and kl_reward_coef = 0",
        ),
        ({"kl_estimator": "k1"}, "kl_estimator: got 'k1', which does nothing with kl_coef = 0"),
        (
            {"loss": {"type": "reinforce"}, "rollout_correction": {"weight": None}},
            "rollout_correction: .* does nothing with neither weight nor reject, and loss.type = .reinforce",
        ),
        (
            {"rollout_correction": {"weight": None, "low": 0.5}},
            "low: got 0.5 with weight = null, expected null",
        ),
        ({"rollout_correction": {"weight": None, "level": "sequence"}}, 'level: got "sequence" with weight'),
        (
            {
                "credit": "gae", "advantage": "reward", "drop_zero_variance": False,
                "loss": {"type": "cross_entropy"},
            },
            'credit: got "gae" with loss.type = "cross_entropy", expected "trajectory"',
        ),
    ],
)  # fmt: skip
def test_what_does_nothing_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        recipe("grpo", **given)


def test_a_recipe_s_own_keys_stay_where_another_key_leaves_them_nothing_to_do() -> None:
    assert recipe("bi_level_gae", credit="gae").bootstrap is False
    assert recipe("starpo", kl_coef=0.0).kl_estimator == "k1"
