"""Models in folders of several files, whose weights tests read and write part by part."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tests import moe
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3Config

from silva.config.sections import Lora, PretrainedModel
from silva.models.loading import LoadedModel
from silva.models.snapshots import read_weights, take_weights
from silva.models.tiny import tiny_tokenizer
from silva.models.weight_files import INDEX
from silva.trainer import streamed
from silva.types import WeightFolder

SIZES: dict[str, Any] = {
    "vocab_size": 263, "hidden_size": 32, "intermediate_size": 72, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 257, "initializer_range": 0.2,
}  # fmt: skip
LORA = Lora(rank=2, alpha=6.0)
EXPERTS = Lora(rank=2, alpha=6.0, targets=("q_proj", "gate_proj", "up_proj"))
MODELS: dict[str, tuple[Callable[[], PreTrainedConfig], dict[str, Any]]] = {
    "untied": (lambda: Qwen3Config(**SIZES), {}),
    "tied": (lambda: LlamaConfig(**SIZES, tie_word_embeddings=True), {"dtype": "bfloat16"}),
    "lora": (lambda: LlamaConfig(**SIZES, tie_word_embeddings=True), {"lora": LORA}),
    "narrow_lora": (lambda: Qwen3Config(**SIZES), {"dtype": "bfloat16", "lora": LORA}),
    "experts": (lambda: moe.config("qwen3_moe"), {"dtype": "bfloat16"}),
    "experts_lora": (lambda: moe.config("mixtral"), {"lora": EXPERTS}),
}


def write_model(config: PreTrainedConfig, path: Path) -> None:
    """Into two files; not by `save_pretrained`, which writes on the first rank alone."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    head = set() if config.tie_word_embeddings is False else {"lm_head.weight"}
    tensors = {n: x.contiguous() for n, x in original(model).items() if n not in head}
    path.mkdir()
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    model.config.architectures = [type(model).__name__]
    (path / "config.json").write_text(model.config.to_json_string())
    model.generation_config.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)


def original(model: Any) -> dict[str, torch.Tensor]:
    """In the names of files, which of experts are others."""
    return streamed.revert_weight_conversion(model, model.state_dict())  # type: ignore[attr-defined, no-any-return]


def settings_of(path: Path, kind: str) -> PretrainedModel:
    return PretrainedModel(name=str(path), **MODELS[kind][1])


def load_weights(loaded: LoadedModel, folder: WeightFolder) -> None:
    """As an engine does."""
    take_weights(loaded, read_weights(loaded, folder))
