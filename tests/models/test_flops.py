"""The count of operations against that of torch, which watches every product."""

from __future__ import annotations

import pytest
import torch
from tests import moe
from tests.models.tiny import TINY
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, PreTrainedModel

from silva.config.sections import Lora
from silva.models.flops import flop_of
from silva.models.loading import load_model

LENGTH = 24


def plain() -> PreTrainedModel:
    return load_model(TINY, seed=0).model


def adapted() -> PreTrainedModel:
    model = load_model(TINY.model_copy(update={"lora": Lora(rank=2)}), seed=0).model
    model.enable_input_require_grads()  # otherwise nothing flows through the first products
    return model


def experts() -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(moe.config("qwen2_moe"))


def counted(model: PreTrainedModel) -> tuple[int, int]:
    """Forward, and both ways. Eager attention computes what a mask hides, too."""
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")  # torch does not count grouped products
    tokens = torch.arange(LENGTH)[None]
    with FlopCounterMode(display=False) as forward, torch.no_grad():
        model(input_ids=tokens)
    with FlopCounterMode(display=False) as both:
        model(input_ids=tokens).logits.sum().backward()
    return forward.get_total_flops(), both.get_total_flops()


@pytest.mark.parametrize("make", [plain, adapted, experts])
def test_counts_are_those_of_torch(make) -> None:
    model = make()
    found = flop_of(model)
    everything = (LENGTH, LENGTH**2, LENGTH)
    assert (found.forward(*everything), found.training(*everything)) == counted(model)
