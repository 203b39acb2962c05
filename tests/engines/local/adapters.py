"""Small models with adapters of LoRA, and what PEFT makes of the same numbers."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, inject_adapter_in_model
from transformers import AutoModelForCausalLM as Auto
from transformers import PreTrainedModel

from silva.engines.local.engine import LocalEngine
from silva.models.attention import NAME
from silva.models.loading import LoadedModel, _keep_float64_norms
from silva.models.lora_runs import LoraRuns
from silva.models.tiny import tiny_tokenizer
from silva.types import Completion, TokenScores

LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SIZES = {"hidden_size": 32, "intermediate_size": 88, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 50, "pad_token_id": None,
         "max_position_embeddings": 512}  # fmt: skip
RANKS = {"poet": 4, "clerk": 8, "jester": 3}
ALPHA = 16.0
MLP = "model.layers.0.mlp"


def make(config: Any, dtype: torch.dtype = torch.float32) -> LoadedModel:
    """With weights that give it preferences."""
    torch.manual_seed(0)
    model: PreTrainedModel = Auto.from_config(config, dtype=dtype, attn_implementation=NAME).eval()
    if dtype == torch.float64:
        _keep_float64_norms(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(8 if weight.ndim > 1 else 1)
    return LoadedModel(model, tiny_tokenizer(), "tiny", torch.device("cpu"), dtype, 512, False)


def drawn(
    loaded: LoadedModel, name: str, layers: Sequence[str] = LAYERS, seed: int = 0
) -> dict[str, torch.nn.Parameter]:
    """The parameters of a run, with B drawn as well, as after some steps."""
    runs = LoraRuns(copy.deepcopy(loaded.model), layers)
    parameters = runs.add(name, RANKS[name], ALPHA, seed=RANKS[name], unembed="lm_head" in layers)
    numbers = torch.Generator().manual_seed(seed + RANKS[name])
    for each, parameter in parameters.items():
        if "lora_B" in each:
            parameter.data.normal_(0, 0.5, generator=numbers)
    return parameters


def load(engine: LocalEngine, loaded: LoadedModel, name: str, **others: Any) -> Any:
    version = others.pop("version", 0)
    parameters = drawn(loaded, name, **others)
    return engine.load_adapter(name, parameters, scale=ALPHA / RANKS[name], version=version)


def with_peft(loaded: LoadedModel, parameters: Mapping[str, torch.Tensor], rank: int) -> PreTrainedModel:
    """The model with PEFT's adapter and torch's attention."""
    model: Any = Auto.from_config(loaded.model.config, dtype=loaded.dtype, attn_implementation="sdpa").eval()
    model.load_state_dict(loaded.model.state_dict())
    if loaded.dtype == torch.float64:
        _keep_float64_norms(model)
    targets = sorted({name.partition(".lora_")[0] for name in parameters})
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=ALPHA, target_modules=targets), model)  # type: ignore[arg-type]
    for name, value in parameters.items():
        model.get_parameter(name.replace(".weight", ".default.weight")).data = value.detach().clone()
    return model


def bits(found: Completion | TokenScores) -> Any:
    return replace(found, cached_tokens=0) if isinstance(found, Completion) else found


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(0, 50, length).tolist()


# --- what PEFT gives
