"""Experts that cannot be divided are refused, with the key and the reason."""

from __future__ import annotations

import pytest
from tests import moe
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

from silva.errors import CapabilityError
from silva.trainer.settings import Parallel
from silva.trainer.sharding.expert_parallel import check_experts

QWEN3 = moe.config("qwen3_moe", experts=6)


@pytest.mark.parametrize(
    ("config", "ep", "ranks", "words"),
    [
        (LlamaConfig(**moe.SIZES), 2, 1, "ep = 2: a model of the family llama has no experts; expected 1"),
        (QWEN3, 4, 1, "ep = 4: the model has 6 experts; expected a divisor"),
        (QWEN3, 2, 5, r"5 ranks share the same experts.*\[6, 32, 32\] evenly; expected 5 to divide 3 or 32"),
    ],
)
def test_experts_that_cannot_be_divided(config: PreTrainedConfig, ep: int, ranks: int, words: str) -> None:
    with pytest.raises(CapabilityError, match=words):
        check_experts(AutoModelForCausalLM.from_config(config), ep, ranks)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "olmoe", "mixtral"])
def test_families_whose_experts_are_divided(family: str) -> None:
    check_experts(AutoModelForCausalLM.from_config(moe.config(family)), 2, 2)


def test_experts_in_layers_of_their_own() -> None:
    model = AutoModelForCausalLM.from_config(QWEN3)
    model.model.layers[1].mlp.experts = nn.ModuleList([nn.Linear(2, 2)] * 6)
    with pytest.raises(CapabilityError, match=r"qwen3_moe are not in parameters \[experts, ...\]"):
        check_experts(model, 2, 1)


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        (
            Parallel(ep=3),
            r"ep = 3: experts are divided among the 8 ranks of a copy .* expected a divisor of 8",
        ),
        (Parallel(ep=4, dp_replicate=4), "the 2 ranks of a copy"),
    ],
)
def test_ranks_that_cannot_divide_experts(parallel: Parallel, words: str) -> None:
    with pytest.raises(CapabilityError, match=words):
        parallel.shape(8)


@pytest.mark.parametrize("parallel", [Parallel(ep=8), Parallel(ep=4, cp=2), Parallel(ep=4, dp_replicate=2)])
def test_ranks_that_can(parallel: Parallel) -> None:
    assert parallel.shape(8)["parts"] % parallel.ep == 0
