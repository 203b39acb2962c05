from __future__ import annotations

import importlib
import subprocess
import sys
from typing import Any, get_args

import pytest
import torch
from pydantic import ValidationError

from silva.algorithms import ALGORITHMS, recipes
from silva.algorithms.advantages import ADVANTAGES
from silva.algorithms.aggregation import AGGREGATIONS
from silva.algorithms.kl import KL_ESTIMATORS
from silva.algorithms.losses import LOSSES, LossInputs, compute
from silva.algorithms.recipes import Algorithm, Grpo, Reinforce, Rloo
from silva.types import LossSpec


def recipe(name: str, **settings: Any) -> Algorithm:
    module, _, attribute = ALGORITHMS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)(**settings)


def test_a_type_alone_is_a_full_recipe() -> None:
    vetted = {
        name: (recipe(name).advantage, recipe(name).loss, recipe(name).aggregation) for name in ALGORITHMS
    }
    assert vetted == {
        "grpo": ("mean_std", "clipped", "sequence_mean_token_mean"),
        "rloo": ("leave_one_out", "reinforce", "sequence_mean_token_sum"),
        "reinforce": ("mean", "reinforce", "token_mean"),
    }
    assert next(iter(ALGORITHMS)) == "grpo"  # the default
    assert [type(recipe(name)) for name in ALGORITHMS] == [Grpo, Rloo, Reinforce]
    assert [recipe(name).model_dump()["type"] for name in ALGORITHMS] == list(ALGORITHMS)


def test_the_choices_are_those_of_the_registries() -> None:
    assert set(get_args(recipes.Advantage)) == set(ADVANTAGES)
    assert set(get_args(recipes.Aggregation)) == set(AGGREGATIONS)
    assert set(get_args(recipes.Loss)) == set(LOSSES) - {"cross_entropy"}  # imitation is no RL recipe
    assert set(get_args(Algorithm.model_fields["kl_estimator"].annotation)) == set(KL_ESTIMATORS)


def test_loss_specs() -> None:
    assert Grpo().loss_spec() == LossSpec(
        "clipped",
        {
            "kl_coef": 0.0,
            "kl_estimator": "k3",
            "kl_correction": True,
            "entropy_coef": 0.0,
            "clip_low": 0.2,
            "clip_high": 0.2,
            "clip_dual": None,
        },
    )
    spec = Rloo(kl_coef=0.1, kl_estimator="k2", kl_correction=False, entropy_coef=0.01).loss_spec()
    params = {"kl_coef": 0.1, "kl_estimator": "k2", "kl_correction": False, "entropy_coef": 0.01}
    assert spec == LossSpec("reinforce", params)


def test_only_a_kl_needs_the_reference() -> None:
    assert Grpo().needs == frozenset()
    assert Grpo(kl_coef=0.001).needs == {"reference_logprobs"}


@pytest.mark.parametrize("loss", get_args(recipes.Loss))
def test_every_spec_is_understood_by_the_losses(loss: Any) -> None:
    """ln 0.5 at ratio 1 and A = 2: reinforce 1.386294, clipped -2; + 0.5 * k1 = 0.5 * ln 2 - 0.1 * 1."""
    spec = Grpo(loss=loss, kl_coef=0.5, kl_estimator="k1", entropy_coef=0.1, clip_dual=3.0).loss_spec()
    half = torch.tensor([0.5]).log()
    inputs = LossInputs(half, half, torch.tensor([2.0]), torch.tensor([0]), half / 0.5, torch.ones(1))
    expected = {"reinforce": 1.386294, "clipped": -2.0}[loss] + 0.5 * 0.693147 - 0.1
    assert compute(spec, inputs)[0].item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"aggregation": "constant"}, "aggregation_constant: got None"),
        ({"aggregation_constant": 4.0}, 'expected a number with "constant" and none without'),
        ({"clip_dual": 1.2}, "clip_dual: got 1.2, expected more than 1"),
        ({"advantage": "raw"}, "drop_zero_variance: got true with advantage"),
        ({"clip_low": 1.0}, "less than 1"),
        ({"kl_coef": -0.1}, "greater than or equal to 0"),
        ({"kl_estimator": "k4"}, "'k1', 'k2' or 'k3'"),
        ({"epsilon": 0.2}, "Extra inputs are not permitted"),
    ],
)
def test_combinations_that_make_no_sense_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Grpo(**settings)


def test_combinations_that_do() -> None:
    dr_grpo = Grpo(advantage="mean", aggregation="constant", aggregation_constant=8 * 1024)
    assert dr_grpo.aggregation_constant == 8192
    assert Reinforce(advantage="raw", drop_zero_variance=False).advantage == "raw"


def test_settings_import_neither_torch_nor_numpy() -> None:
    code = "import sys, silva.algorithms.recipes; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
