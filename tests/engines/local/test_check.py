"""The engine refuses a model that its steps would compute otherwise than transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV2Config

from silva.config.sections import PretrainedModel, TinyModel
from silva.engines.local.check import check_steps
from silva.engines.local.ragged_step import RaggedStep
from silva.errors import ModelError
from silva.models import decoder
from silva.models.loading import load_model
from silva.models.tiny import tiny_tokenizer

TINY = TinyModel(layers=2, width=32, heads=4, kv_heads=2, context=64)


def test_steps_that_compute_something_else_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    norm, tiny = decoder._Norm.__call__, load_model(TINY, seed=0)
    check_steps(tiny)
    monkeypatch.setattr(decoder._Norm, "__call__", lambda self, x: norm(self, x) * 1.001)
    with pytest.raises(ModelError, match=r"gives other states in the engine's steps than with transformers"):
        check_steps(tiny)


def test_a_layer_that_attends_twice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As DiffLlama's do: the second values would take the place of the first in the cache."""
    attend = RaggedStep.attend_rows

    def twice(step: RaggedStep, layer: int, *qkv: torch.Tensor) -> torch.Tensor:
        query, key, value = qkv
        return (attend(step, layer, query, key, value), attend(step, layer, query, key, -value))[0]

    tiny = load_model(TINY, seed=0)
    monkeypatch.setattr(RaggedStep, "attend_rows", twice)
    with pytest.raises(ModelError, match=r"gives other states in the engine's steps than with transformers"):
        check_steps(tiny)


def test_a_cache_that_cannot_hold_a_family_s_values_is_refused(tmp_path: Path) -> None:
    """Keys and values of other sizes, as multi-head latent attention has them."""
    torch.manual_seed(0)
    config = DeepseekV2Config(
        vocab_size=262, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8,
        v_head_dim=4, first_k_dense_replace=1, max_position_embeddings=64,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"family deepseek_v2 does not run with Silva's attention and cache"):
        check_steps(load_model(PretrainedModel(name=str(tmp_path)), seed=0))
