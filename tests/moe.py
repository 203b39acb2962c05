"""Small mixtures of experts in folders, of random weights that are large enough to prefer some tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from silva.models.tiny import tiny_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": 262, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128, "pad_token_id": 0,
    "bos_token_id": None, "eos_token_id": 257, "initializer_range": 0.2, "num_experts_per_tok": 2,
}  # fmt: skip


def config(family: str, experts: int = 4, **more: Any) -> PreTrainedConfig:
    sizes = SIZES | more
    if family == "mixtral":
        return MixtralConfig(num_local_experts=experts, **sizes)
    if family == "olmoe":
        return OlmoeConfig(num_experts=experts, **sizes)
    sizes |= {"num_experts": experts, "moe_intermediate_size": 16}
    if family == "qwen2_moe":
        return Qwen2MoeConfig(shared_expert_intermediate_size=16, **sizes)
    return Qwen3MoeConfig(**{"head_dim": 16, "norm_topk_prob": True} | sizes)


def folder(path: Path, family: str = "qwen3_moe", **more: Any) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config(family, **more)).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path
