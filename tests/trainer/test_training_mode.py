"""What a family does in train mode only stays off; what was asked for is on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.trainer.updates import optim_step
from transformers import AutoModelForCausalLM, OPTConfig, PhiConfig

from silva.config.sections import Optimizer
from silva.models.loading import LoadedModel
from silva.trainer.learner import Learner
from silva.trainer.local import LocalTrainer
from silva.trainer.settings import LocalTrainerSettings
from silva.trainer.training_mode import enable_gradient_checkpointing, training_mode
from silva.types import LossSpec, Sample

Make = Callable[..., LoadedModel]
Rows = Callable[..., list[Sample]]
SIZES = {"vocab_size": 262, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
# Dropout in modules of its own (Phi), and in a function of the layer, with whole layers dropped (OPT).
DROPOUT: dict[str, Any] = {
    "phi": lambda p: PhiConfig(
        intermediate_size=64, resid_pdrop=p, embd_pdrop=p, attention_dropout=p, **SIZES
    ),
    "opt": lambda p: OPTConfig(
        ffn_dim=64, word_embed_proj_dim=32, dropout=p, attention_dropout=p, layerdrop=p, **SIZES
    ),
}


def with_dropout(family: str, p: float = 0.3) -> LoadedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(DROPOUT[family](p), attn_implementation="silva").eval()
    return LoadedModel(model, None, family, torch.device("cpu"), torch.float32, 128, False)  # type: ignore[arg-type]


def as_sampled(trainer: LocalTrainer, samples: list[Sample]) -> list[Sample]:
    """The samples with the log-probabilities that the policy gives them."""
    found = asyncio.run(trainer.score(samples, frozenset({"logprobs"}))).logprobs
    assert found is not None
    return [s.replace(logprobs=row.astype(np.float64)) for s, row in zip(samples, found, strict=True)]


def first_update(loaded: LoadedModel, samples: list[Sample], **changes: Any) -> dict[str, float]:
    settings = LocalTrainerSettings(optimizer=Optimizer(lr=1e-2), **changes)
    trainer = LocalTrainer(Learner(loaded, settings, seed=0))
    metrics = asyncio.run(trainer.forward_backward(as_sampled(trainer, samples), LossSpec("clipped")))
    return {**metrics, **asyncio.run(optim_step(trainer))}


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", DROPOUT)
def test_ratios_are_1_on_the_first_update(make_samples: Rows, family: str, checkpointing: bool) -> None:
    """Whatever the family drops in train mode, and with the gradient of a model that drops nothing."""
    samples = make_samples([9, 30, 4, 17])
    found = first_update(with_dropout(family), samples, gradient_checkpointing=checkpointing)
    plain = first_update(with_dropout(family, 0.0), samples)
    assert found["ratio"] == pytest.approx(1, abs=1e-6) and found["mismatch_kl"] < 1e-10
    assert found["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-5)


def test_dropout_of_adapters_is_on(tiny: Make, make_samples: Rows) -> None:
    """Once the adapters are no longer 0."""
    loaded, samples = tiny(lora=True, dropout=0.3), make_samples([9, 30])
    with torch.no_grad():
        for name, parameter in loaded.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    assert first_update(loaded, samples)["mismatch_kl"] > 1e-6


def test_which_modules_are_switched(tiny: Make) -> None:
    """14 adapters with a dropout each, and 2 layers, without their children; none after an error."""
    model = tiny(lora=True, dropout=0.3).model
    names: list[set[str]] = []
    for enable in (False, True):
        if enable:
            enable_gradient_checkpointing(model)
        with pytest.raises(MemoryError), training_mode(model):
            names.append({name for name, module in model.named_modules() if module.training})
            raise MemoryError
        assert not any(module.training for module in model.modules())
    dropouts = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Dropout)}
    holders = {name.rpartition(".")[0] for name in dropouts}
    assert len(dropouts) == 14 and names[0] == dropouts | holders
    assert names[1] == names[0] | {"model.layers.0", "model.layers.1"}
