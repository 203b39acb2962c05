"""Small models of the families that GGUF is written for, with tokenizers that learned a little text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from silva.conversion.gguf_tokenizer import SPLITS

TEXT = "The forest has 1234 trees; isn't it  wide?\n\nTrees grow, 56 a year. Wald: grün, 森林!\tEnd  of it."
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip


def tokenizer(split: str) -> PreTrainedTokenizerFast:
    """One that splits text as llama.cpp's program of this name does."""
    made = {
        "ByteLevel": lambda on: pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=on),
        "Digits": lambda on: pre_tokenizers.Digits(individual_digits=on),
        "Split": lambda pattern: pre_tokenizers.Split(Regex(pattern), "isolated"),
    }
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence([made[kind](how) for kind, how in SPLITS[split]])
    core.add_special_tokens([AddedToken(each, special=True) for each in ("<|im_start|>", "<|im_end|>")])
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core.train_from_iterator([TEXT] * 3, trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=alphabet, special_tokens=["<|im_start|>", "<|im_end|>"],
        show_progress=False))  # fmt: skip
    core.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    found = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|im_end|>")
    found.chat_template = TEMPLATE
    return found


def config(family: str, **more: Any) -> Any:
    sizes = SIZES | {"vocab_size": 340, "bos_token_id": None, "eos_token_id": 1} | more
    if family == "llama":
        return LlamaConfig(tie_word_embeddings=True, **sizes)
    if family == "llama3":
        slowed = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
                  "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
        return LlamaConfig(rope_parameters=slowed, **sizes)
    if family == "qwen2":
        return Qwen2Config(tie_word_embeddings=True, **sizes)
    return Qwen3Config(head_dim=128, **sizes)


FAMILIES = {"llama": "smollm", "llama3": "llama-bpe", "qwen2": "qwen2", "qwen3": "qwen2"}


def folder(path: Path, family: str, dtype: torch.dtype = torch.float32, **more: Any) -> Path:
    """A Hugging Face folder of random weights that are large enough to prefer some tokens."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config(family, **more))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(
                torch.randn_like(parameter) * (0.1 if parameter.ndim > 1 else 0.3) + ("norm" in name)
            )
    model.to(dtype).save_pretrained(path)
    tokenizer(FAMILIES[family]).save_pretrained(path)
    return path


def logprobs(model: Any, tokens: list[int]) -> torch.Tensor:
    """[T, V] in float64, of what follows each token."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokens])).logits[0]
    return logits.double().log_softmax(-1)


def gap(found: Any, expected: Any, tokens: list[int]) -> float:
    """The largest difference of a log-probability, in nats."""
    return float((logprobs(found, tokens) - logprobs(expected, tokens)).abs().max())


def quiet(done: int, total: int) -> None:
    """Takes progress and says nothing."""
