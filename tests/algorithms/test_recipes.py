from __future__ import annotations

import json
from typing import get_args

import pytest
import torch
from pydantic import ValidationError
from tests.algorithms.by_hand import recipe

from silva.algorithms import ALGORITHMS, settings
from silva.algorithms.advantages import ADVANTAGES, OVER
from silva.algorithms.aggregation import AGGREGATIONS
from silva.algorithms.correction import RolloutCorrection
from silva.algorithms.credit import TREE_CREDIT
from silva.algorithms.filters import SELECTIONS, VarianceFilter
from silva.algorithms.kl import KL_ESTIMATORS
from silva.algorithms.losses import LOSSES, ClippedLoss, GspoLoss, LossInputs
from silva.algorithms.objective import compute
from silva.algorithms.recipes import Grpo, Rloo
from silva.algorithms.settings import Algorithm
from silva.types import LossSpec

VETTED = {
    "grpo": ("mean_std", "clipped", "sequence_mean_token_mean"),
    "rloo": ("leave_one_out", "reinforce", "sequence_mean_token_sum"),
    "reinforce": ("mean", "reinforce", "token_mean"),
    "reinforce_pp": ("reward", "clipped", "token_mean"),
    "reinforce_pp_baseline": ("mean", "clipped", "token_mean"),
    "dr_grpo": ("mean", "clipped", "constant"),
    "dapo": ("mean_std", "clipped", "token_mean"),
    "gspo": ("mean_std", "gspo", "sequence_mean_token_mean"),
    "cispo": ("mean_std", "cispo", "token_mean"),
    "opo": ("length_weighted", "reinforce", "token_mean"),
    "aipo": ("mean", "aipo", "token_mean"),
    "gpg": ("mean", "reinforce", "token_mean"),
    "max_rl": ("max_rl", "clipped", "token_mean"),
    "ppo": ("reward", "clipped", "token_mean"),
    "starpo": ("reward", "clipped", "token_mean"),
    "starpo_s": ("reward", "clipped", "token_mean"),
    "bi_level_gae": ("reward", "clipped", "token_mean"),
    "arpo": ("mean_std", "clipped", "token_mean"),
    "aepo": ("mean_std", "clipped", "token_mean"),
    "act_prm": ("share", "reinforce", "token_mean"),
    "act_prm_probs": ("reward", "reinforce", "token_mean"),
    "dro": ("mean", "dro", "token_mean"),
    "distillation": ("reward", "reinforce", "token_mean"),
    "cross_entropy": ("reward", "cross_entropy", "token_mean"),
}


def test_a_type_alone_is_a_full_recipe() -> None:
    made = {name: recipe(name) for name in ALGORITHMS}
    assert {n: (r.advantage, r.loss.type, r.aggregation) for n, r in made.items()} == VETTED
    assert next(iter(ALGORITHMS)) == "grpo"  # the default
    assert [r.model_dump()["type"] for r in made.values()] == list(ALGORITHMS)
    assert all(type(r).__doc__ for r in made.values())
    critics = {"ppo", "starpo", "starpo_s", "bi_level_gae"}
    assert {name for name, r in made.items() if "values" in r.needs} == critics


def test_recipes_that_differ_in_more_than_their_parts() -> None:
    dapo, starpo, starpo_s, aepo = map(recipe, ("dapo", "starpo", "starpo_s", "aepo"))
    assert (dapo.loss, dapo.overlong_buffer) == (ClippedLoss(clip_high=0.28), 0.2)
    assert (starpo.kl_coef, starpo.loss, starpo.variance_filter) == (0.001, ClippedLoss(clip_dual=3.0), None)
    assert (starpo_s.kl_coef, starpo_s.loss) == (0.0, ClippedLoss(clip_high=0.28, clip_dual=3.0))
    assert starpo_s.variance_filter == VarianceFilter(keep="top_fraction", value=0.25)
    assert aepo.loss == ClippedLoss(clip_dual=3.0, balanced_clip_min_entropy=0.0)
    assert aepo.entropy_advantage == 0.2
    assert recipe("bi_level_gae").credit == "bi_level_gae" and recipe("gpg").advantage_over == "batch"


def test_the_choices_are_those_of_the_registries() -> None:
    assert set(get_args(settings.AdvantageName)) == set(ADVANTAGES)
    assert set(get_args(settings.Aggregation)) == set(AGGREGATIONS)
    assert {name: loss.settings().type for name, loss in LOSSES.items()} == {name: name for name in LOSSES}
    assert set(get_args(settings.OverName)) == set(OVER)
    assert set(get_args(VarianceFilter.model_fields["keep"].annotation)) == set(SELECTIONS)
    assert set(get_args(Algorithm.model_fields["tree_credit"].annotation)) == set(TREE_CREDIT)
    assert set(get_args(Algorithm.model_fields["kl_estimator"].annotation)) == set(KL_ESTIMATORS)


def test_loss_specs() -> None:
    assert Grpo().loss_spec() == LossSpec(
        "clipped",
        {
            "clip_low": 0.2,
            "clip_high": 0.2,
            "clip_dual": None,
            "balanced_clip_min_entropy": None,
            "kl_coef": 0.0,
            "kl_estimator": "k3",
            "kl_bias_correction": True,
            "entropy_coef": 0.0,
            "rollout_correction": None,
        },
    )
    spec = Rloo(kl_coef=0.1, kl_estimator="k2", kl_bias_correction=False, entropy_coef=0.01).loss_spec()
    params = {"kl_coef": 0.1, "kl_estimator": "k2", "kl_bias_correction": False, "entropy_coef": 0.01}
    assert spec == LossSpec("reinforce", {**params, "rollout_correction": None})


def test_the_correction_and_what_controllers_say_reach_the_loss() -> None:
    correction = {"weight": "mask", "level": "geometric", "high": 3.0, "reject": {"any": (None, 100.0)}}
    loss = GspoLoss(clip_high=5e-4)
    made = recipe("gspo", rollout_correction=RolloutCorrection(**correction), kl_coef=0.1, loss=loss)
    spec = made.loss_spec({"kl_coef": 0.2, "entropy_coef": 0.01, "temperature": 0.7})
    assert (spec.params["clip_low"], spec.params["clip_high"]) == (3e-4, 5e-4)
    assert (spec.params["kl_coef"], spec.params["entropy_coef"]) == (0.2, 0.01)
    assert spec.params["rollout_correction"] == {**correction, "low": None, "reject": {"any": [None, 100.0]}}
    assert json.loads(json.dumps(dict(spec.params))) == spec.params  # plain data


def test_what_a_recipe_needs() -> None:
    assert Grpo().needs == frozenset() and not Grpo().refers
    assert Grpo(kl_coef=0.001).needs == frozenset() and Grpo(kl_coef=0.001).refers  # the loss scores it
    assert Grpo(kl_reward_coef=0.001, drop_zero_variance=False).needs == {"reference_logprobs"}
    assert Grpo(rollout_correction=RolloutCorrection()).needs == {"logprobs"}


@pytest.mark.parametrize("loss", LOSSES)
def test_every_spec_is_understood_by_the_losses(loss: str) -> None:
    """p = 0.5 at ratio 1, p_ref = p / 2, H = 1: every loss has 0.5 * k1 = 0.5 * ln 2 and -0.1 * 1 added."""
    half = torch.tensor([0.5]).log()
    inputs = LossInputs(half, half, torch.tensor([2.0]), torch.tensor([0]), half / 0.5, torch.ones(1))
    terms = {"kl_coef": 0.5, "kl_estimator": "k1", "entropy_coef": 0.1}
    with_terms, alone = (
        compute(Grpo(loss={"type": loss}, **given).loss_spec(), inputs)[0] for given in (terms, {})
    )
    assert (with_terms - alone).item() == pytest.approx(0.5 * 0.693147 - 0.1, rel=1e-5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"aggregation_constant": 4.0}, 'aggregation_constant: got 4.0 .* expected one only with "constant"'),
        ({"loss": {"type": "clipped", "clip_dual": 1.2}}, "clip_dual: got 1.2, expected more than 1"),
        ({"advantage": "reward"}, "drop_zero_variance: got true with advantage"),
        ({"advantage_over": "batch"}, 'drop_zero_variance: got true .* advantage_over = "batch"'),
        (
            {"credit": "turn", "advantage": "running", "drop_zero_variance": False},
            'got "running" with credit',
        ),
        (
            {"credit": "gae", "drop_zero_variance": False},
            'got "mean_std" with credit = "gae", expected "reward"',
        ),
        ({"use_rewards": False}, "use_rewards: got false with kl_reward_coef = 0"),
        ({"loss": {"type": "clipped", "max_ratio": 4.0}}, "loss.clipped.max_ratio\n.*not permitted"),
        ({"loss": {"type": "ppo"}}, "'reinforce', 'clipped', 'gspo'"),
        (
            {"loss": {"type": "cross_entropy"}, "rollout_correction": {}},
            'rollout_correction: got one with loss.type = "cross_entropy", expected none',
        ),
        (
            {"difficulty_range": (0.8, 0.2)},
            "difficulty_range: got .0.8, 0.2., expected the lower bound first",
        ),
        (
            {"difficulty_pools": {"easy_threshold": 0.0}},
            "easy_threshold: got 0.0 with hard_threshold = 0.0, expected more",
        ),
        ({"adaptive_kl": {}}, "adaptive_kl: got it with kl_coef = 0"),
        ({"reference_refresh": 5, "reference": {"name": "x"}}, "got 5 with a `reference`, expected one of"),
        ({"reference_refresh": 5}, "reference_refresh: got 5 with kl_coef = 0 and kl_reward_coef = 0"),
        (
            {"variance_filter": {"keep": "top_fraction", "value": 2.0}},
            "value: got 2.0 with top_fraction, expected at most 1",
        ),
        ({"loss": {"type": "clipped", "clip_low": 1.1}}, "less than or equal to 1"),
        ({"kl_coef": -0.1}, "greater than or equal to 0"),
        ({"kl_estimator": "k4"}, "'k1', 'k2' or 'k3'"),
        ({"epsilon": 0.2}, "Extra inputs are not permitted"),
    ],
)
def test_combinations_that_make_no_sense_are_refused(given: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Grpo(**given)


@pytest.mark.parametrize(
    ("name", "loss", "lost"),
    [
        ("dapo", "reinforce", "clip_high = 0.28"),
        ("dapo", "gspo", "clip_high = 0.28"),
        ("aepo", "cispo", "clip_dual = 3.0, balanced_clip_min_entropy = 0.0"),
        ("starpo_s", "cispo", "clip_high = 0.28, clip_dual = 3.0"),
    ],
)
def test_another_loss_says_what_becomes_of_the_recipe_s_bounds(name: str, loss: str, lost: str) -> None:
    assert recipe(name, loss={"type": loss}).notes == [
        f'algorithm.loss = "{loss}" in place of "clipped": {lost} of the recipe does not apply'
    ]


def test_there_is_nothing_to_say_of_bounds_that_are_the_loss_s_own_or_the_user_s() -> None:
    made = [recipe(name) for name in ALGORITHMS]
    made += [recipe("grpo", loss={"type": "cispo"}), recipe("aipo", loss={"type": "clipped"})]
    made += [recipe("dapo", loss={"type": "clipped", "clip_high": 0.5})]
    made += [recipe("dapo", loss={"type": "gspo", "clip_high": 5e-4})]
    assert [m.notes for m in made] == [[]] * len(made)
