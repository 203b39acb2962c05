from __future__ import annotations

import subprocess
import sys
from typing import Any, get_args

import pytest
import torch
from pydantic import ValidationError
from tests.algorithms.by_hand import recipe

from silva.algorithms import ALGORITHMS, settings
from silva.algorithms.advantages import ADVANTAGES, OVER
from silva.algorithms.aggregation import AGGREGATIONS
from silva.algorithms.credit import TREE_CREDIT
from silva.algorithms.filters import SELECTIONS
from silva.algorithms.kl import KL_ESTIMATORS
from silva.algorithms.losses import LOSSES, LossInputs, compute
from silva.algorithms.recipes import Grpo, Reinforce, Rloo
from silva.algorithms.settings import Algorithm
from silva.types import LossSpec

VETTED = {
    "grpo": ("mean_std", "clipped", "sequence_mean_token_mean"),
    "rloo": ("leave_one_out", "reinforce", "sequence_mean_token_sum"),
    "reinforce": ("mean", "reinforce", "token_mean"),
    "reinforce_pp": ("raw", "clipped", "token_mean"),
    "reinforce_pp_baseline": ("mean", "clipped", "token_mean"),
    "dr_grpo": ("mean", "clipped", "constant"),
    "dapo": ("mean_std", "clipped", "token_mean"),
    "gspo": ("mean_std", "gspo", "sequence_mean_token_mean"),
    "cispo": ("mean_std", "cispo", "token_mean"),
    "opo": ("length_weighted", "reinforce", "token_mean"),
    "aipo": ("mean", "aipo", "token_mean"),
    "gpg": ("mean", "reinforce", "token_mean"),
    "max_rl": ("max_rl", "clipped", "token_mean"),
    "ppo": ("raw", "clipped", "token_mean"),
    "starpo": ("raw", "clipped", "token_mean"),
    "starpo_s": ("raw", "clipped", "token_mean"),
    "bi_level_gae": ("raw", "clipped", "token_mean"),
    "arpo": ("mean_std", "clipped", "token_mean"),
    "aepo": ("mean_std", "clipped", "token_mean"),
    "act_prm": ("share", "reinforce", "token_mean"),
    "act_prm_probs": ("raw", "reinforce", "token_mean"),
    "dro": ("mean", "dro", "token_mean"),
    "distillation": ("raw", "reinforce", "token_mean"),
    "cross_entropy": ("raw", "cross_entropy", "token_mean"),
}


def test_a_type_alone_is_a_full_recipe() -> None:
    made = {name: recipe(name) for name in ALGORITHMS}
    assert {n: (r.advantage, r.loss, r.aggregation) for n, r in made.items()} == VETTED
    assert next(iter(ALGORITHMS)) == "grpo"  # the default
    assert [r.model_dump()["type"] for r in made.values()] == list(ALGORITHMS)
    assert all(type(r).__doc__ for r in made.values())
    critics = {"ppo", "starpo", "starpo_s", "bi_level_gae"}
    assert {name for name, r in made.items() if "values" in r.needs} == critics


def test_recipes_that_differ_in_more_than_their_parts() -> None:
    dapo, starpo, starpo_s, aepo = map(recipe, ("dapo", "starpo", "starpo_s", "aepo"))
    assert (dapo.clip_low, dapo.clip_high, dapo.overlong) == (None, 0.28, 0.2)
    assert (starpo.kl_coef, starpo.clip_high, starpo.filter) == (0.001, None, None)
    assert (starpo_s.kl_coef, starpo_s.clip_high, starpo_s.filter.value) == (0.0, 0.28, 0.25)
    assert (aepo.clip_dual, aepo.clip_balanced_above, aepo.entropy_advantage) == (3.0, 0.0, 0.2)
    assert recipe("bi_level_gae").credit == "bi_level_gae" and recipe("gpg").advantage_over == "batch"


def test_the_choices_are_those_of_the_registries() -> None:
    assert set(get_args(settings.Advantage)) == set(ADVANTAGES)
    assert set(get_args(settings.Aggregation)) == set(AGGREGATIONS)
    assert set(get_args(settings.Loss)) == set(LOSSES) == set(settings.LOSS_FIELDS)
    assert set(get_args(settings.Over)) == set(OVER)
    assert set(get_args(settings.Filter.model_fields["keep"].annotation)) == set(SELECTIONS)
    assert set(get_args(Algorithm.model_fields["tree_credit"].annotation)) == set(TREE_CREDIT)
    assert set(get_args(Algorithm.model_fields["kl_estimator"].annotation)) == set(KL_ESTIMATORS)


def test_loss_specs() -> None:
    assert Grpo().loss_spec() == LossSpec(
        "clipped",
        {
            "kl_coef": 0.0,
            "kl_estimator": "k3",
            "kl_correction": True,
            "entropy_coef": 0.0,
        },
    )
    spec = Rloo(kl_coef=0.1, kl_estimator="k2", kl_correction=False, entropy_coef=0.01).loss_spec()
    params = {"kl_coef": 0.1, "kl_estimator": "k2", "kl_correction": False, "entropy_coef": 0.01}
    assert spec == LossSpec("reinforce", params)


def test_the_correction_and_what_controllers_say_reach_the_loss() -> None:
    correction = {"weight": "mask", "level": "geometric", "high": 3.0, "reject": {"any": (None, 100.0)}}
    made = recipe("gspo", correction=settings.Correction(**correction), kl_coef=0.1, clip_high=5e-4)
    spec = made.loss_spec({"kl_coef": 0.2, "entropy_coef": 0.01})
    assert spec.params["clip_high"] == 5e-4 and "clip_low" not in spec.params  # the loss has its own
    assert (spec.params["kl_coef"], spec.params["entropy_coef"]) == (0.2, 0.01)
    assert spec.params["correction"] == "mask" and spec.params["correction_level"] == "geometric"
    assert (spec.params["correction_low"], spec.params["correction_high"]) == (None, 3.0)
    assert spec.params["reject"] == {"any": [None, 100.0]}


def test_what_a_recipe_needs() -> None:
    assert Grpo().needs == frozenset() and not Grpo().refers
    assert Grpo(kl_coef=0.001).needs == frozenset() and Grpo(kl_coef=0.001).refers  # the loss scores it
    assert Grpo(kl_reward_coef=0.001, drop_zero_variance=False).needs == {"reference_logprobs"}
    assert Grpo(correction=settings.Correction()).needs == {"logprobs"}


@pytest.mark.parametrize("loss", get_args(settings.Loss))
def test_every_spec_is_understood_by_the_losses(loss: Any) -> None:
    """p = 0.5 at ratio 1, p_ref = p / 2, H = 1: every loss has 0.5 * k1 = 0.5 * ln 2 and -0.1 * 1 added."""
    half = torch.tensor([0.5]).log()
    inputs = LossInputs(half, half, torch.tensor([2.0]), torch.tensor([0]), half / 0.5, torch.ones(1))
    terms = {"kl_coef": 0.5, "kl_estimator": "k1", "entropy_coef": 0.1}
    with_terms, alone = (compute(Grpo(loss=loss, **given).loss_spec(), inputs)[0] for given in (terms, {}))
    assert (with_terms - alone).item() == pytest.approx(0.5 * 0.693147 - 0.1, rel=1e-5)


def test_a_spec_by_hand() -> None:
    """The same token with A = 2: -A r = -2, and the same terms."""
    half = torch.tensor([0.5]).log()
    inputs = LossInputs(half, half, torch.tensor([2.0]), torch.tensor([0]), half / 0.5, torch.ones(1))
    spec = Grpo(kl_coef=0.5, kl_estimator="k1", entropy_coef=0.1).loss_spec()
    assert compute(spec, inputs)[0].item() == pytest.approx(-2 + 0.5 * 0.693147 - 0.1, rel=1e-5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"aggregation_constant": 4.0}, 'aggregation_constant: got 4.0 .* expected one only with "constant"'),
        ({"clip_dual": 1.2}, "clip_dual: got 1.2, expected more than 1"),
        ({"advantage": "raw"}, "drop_zero_variance: got true with advantage"),
        ({"advantage_over": "batch"}, 'drop_zero_variance: got true .* advantage_over = "batch"'),
        (
            {"credit": "turn", "advantage": "running", "drop_zero_variance": False},
            'got "running" with credit',
        ),
        (
            {"credit": "gae", "drop_zero_variance": False},
            'got "mean_std" with credit = "gae", expected "raw"',
        ),
        ({"use_rewards": False}, "use_rewards: got false with kl_reward_coef = 0"),
        ({"delta": 4.0}, 'delta: got 4.0 with loss = "clipped", which does not read it'),
        ({"pools": {"easy": 0.0}}, "easy: got 0.0 with hard = 0.0, expected more"),
        ({"adaptive_kl": {}}, "adaptive_kl: got it with kl_coef = 0"),
        ({"reference_refresh": 5, "reference": {"name": "x"}}, "got 5 with a `reference`, expected one of"),
        ({"reference_refresh": 5}, "reference_refresh: got 5 with kl_coef = 0 and kl_reward_coef = 0"),
        ({"filter": {"keep": "top_p", "value": 2.0}}, "filter.value: got 2.0 with top_p, expected at most 1"),
        ({"clip_low": 1.1}, "less than or equal to 1"),
        ({"kl_coef": -0.1}, "greater than or equal to 0"),
        ({"kl_estimator": "k4"}, "'k1', 'k2' or 'k3'"),
        ({"epsilon": 0.2}, "Extra inputs are not permitted"),
    ],
)
def test_combinations_that_make_no_sense_are_refused(given: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Grpo(**given)


@pytest.mark.parametrize(
    ("name", "loss", "says"),
    [
        ("dapo", "reinforce", "clip_high = 0.28 of the recipe does not apply: this loss does not read it"),
        ("dapo", "gspo", "clip_high = 0.28 of the recipe stays in force"),
        (
            "aepo",
            "cispo",
            "clip_dual = 3.0, clip_balanced_above = 0.0 of the recipe does not apply: "
            "this loss does not read it",
        ),
        (
            "starpo_s",
            "cispo",
            "clip_high = 0.28 of the recipe stays in force; "
            "clip_dual = 3.0 of the recipe does not apply: this loss does not read it",
        ),
    ],
)
def test_another_loss_says_what_becomes_of_the_recipe_s_bounds(name: str, loss: str, says: str) -> None:
    assert recipe(name, loss=loss).notes == [f'algorithm.loss = "{loss}" instead of "clipped": {says}']


def test_there_is_nothing_to_say_of_bounds_that_are_the_loss_s_own_or_the_user_s() -> None:
    made = [recipe(name) for name in ALGORITHMS]
    made += [recipe("grpo", loss="cispo"), recipe("aipo", loss="clipped"), recipe("dapo", clip_high=0.5)]
    made += [recipe("dapo", loss="gspo", clip_high=5e-4)]
    assert [m.notes for m in made] == [[]] * len(made)
    with pytest.raises(ValidationError, match=r'clip_high: got 0\.5 with loss = "reinforce", which does not'):
        recipe("dapo", loss="reinforce", clip_high=0.5)


def test_combinations_that_do() -> None:
    dr_grpo = Grpo(advantage="mean", aggregation="constant", aggregation_constant=8 * 1024)
    assert dr_grpo.aggregation_constant == 8192
    assert Reinforce(advantage="raw", drop_zero_variance=False).advantage == "raw"


def test_settings_import_neither_torch_nor_numpy() -> None:
    code = "import sys, silva.algorithms.recipes; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
