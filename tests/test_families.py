"""Families of models: each is sampled and trained to the logits that transformers gives, or refused."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests import moe
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    Cohere2Config,
    CohereConfig,
    DiffLlamaConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    HyperCLOVAXConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from silva.config.sections import PretrainedModel
from silva.engines.local.engine import LocalEngine
from silva.engines.settings import LocalEngineSettings
from silva.errors import ModelError
from silva.models.loading import load_model
from silva.models.tiny import tiny_tokenizer
from silva.trainer.policy import pack, token_logprobs
from silva.types import Completion, Sample, SamplingParams

# Large random weights: attention and head have preferences, and what is left out of them shows.
SIZES: dict[str, Any] = {"vocab_size": 262, "hidden_size": 32, "intermediate_size": 64,
                         "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
                         "max_position_embeddings": 64, "pad_token_id": 0,
                         "initializer_range": 0.2}  # fmt: skip
TEMPERATURE = 0.7


def saved(config: PreTrainedConfig, folder: Path) -> PretrainedModel:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return PretrainedModel(name=str(folder))


def without(*names: str, **others: Any) -> dict[str, Any]:
    return {name: value for name, value in SIZES.items() if name not in names} | others


TAKEN = [
    LlamaConfig(**SIZES),
    MistralConfig(**SIZES),
    Qwen2Config(**SIZES),
    Qwen3Config(**SIZES),
    GemmaConfig(**SIZES, head_dim=16),
    Gemma2Config(**SIZES, head_dim=16, attn_logit_softcapping=None, final_logit_softcapping=2.0),
    Gemma3TextConfig(**SIZES, head_dim=16, sliding_window=40),
    GraniteConfig(**SIZES, logits_scaling=8.0, residual_multiplier=0.5, attention_multiplier=0.3),
    CohereConfig(**SIZES, logit_scale=0.25),
    Cohere2Config(**SIZES, logit_scale=0.25),
    Phi3Config(**SIZES),
    Olmo2Config(**SIZES),
    GPT2Config(vocab_size=262, n_embd=32, n_layer=2, n_head=2, n_positions=64, initializer_range=0.2),
    GPTNeoXConfig(**without("num_key_value_heads")),
    OPTConfig(**without("intermediate_size", "num_key_value_heads", "initializer_range", init_std=0.2),
              ffn_dim=64, word_embed_proj_dim=32),
    *map(moe.config, ("qwen3_moe", "qwen2_moe", "olmoe", "mixtral")),
]  # fmt: skip


def prompts() -> list[list[int]]:
    """With a common beginning of 20 tokens."""
    common = np.random.default_rng(0).integers(1, 262, 20)
    return [[*common, *np.random.default_rng(n).integers(1, 262, n)] for n in (3, 7)]


def sampled(engine: LocalEngine) -> list[Completion]:
    async def run() -> list[Completion]:
        params = [SamplingParams(max_tokens=8, temperature=TEMPERATURE, seed=seed) for seed in (1, 2)]
        return list(await asyncio.gather(*map(engine.sample, prompts(), params)))

    return asyncio.run(run())


def sample_of(prompt: list[int], completion: Completion) -> Sample:
    tokens, sampled = np.array([*prompt, *completion.tokens]), np.array(completion.logprobs)
    new = np.arange(len(tokens)) >= len(prompt)
    padded = np.full(len(tokens), np.nan)
    padded[new] = sampled
    return Sample(
        tokens=tokens,
        loss_weights=new.astype(float),
        logprobs=padded,
        temperatures=np.full(len(tokens), TEMPERATURE),
        versions=np.where(new, 0, -1),
        trajectory="t",
        group="g",
        advantages=np.zeros(len(tokens)),
    )


@pytest.mark.slow
@pytest.mark.parametrize("config", TAKEN, ids=lambda config: config.model_type)
def test_a_family_is_sampled_and_trained_as_transformers_runs_it(
    config: PreTrainedConfig, tmp_path: Path
) -> None:
    settings = saved(config, tmp_path)
    loaded = load_model(settings, seed=0)
    assert loaded.model.config._attn_implementation == "silva"  # the check has put it back
    with ThreadPoolExecutor(1) as compute:
        completions = sampled(LocalEngine(loaded, LocalEngineSettings(), compute))
    samples = [sample_of(prompt, done) for prompt, done in zip(prompts(), completions, strict=True)]
    trained = token_logprobs(loaded, pack(loaded, samples)).logprobs.detach()

    reference = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    expected = []
    for sample in samples:
        with torch.no_grad():
            logits = reference(input_ids=torch.from_numpy(sample.tokens)[None]).logits[0]
        rows = torch.log_softmax(logits[:-1].double() / TEMPERATURE, -1)
        chosen = rows.gather(-1, torch.from_numpy(sample.tokens[1:])[:, None])[:, 0]
        expected.append(chosen[torch.from_numpy(sample.loss_weights[1:] > 0)])
    wanted = torch.cat(expected)
    assert wanted.std() > 0.15  # not uniform
    found = torch.tensor([logprob for done in completions for logprob in done.logprobs])
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=2e-5)
    torch.testing.assert_close(trained.double(), wanted, rtol=0, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "words"),
    [
        (Gemma2Config(**SIZES), r"family gemma2 cannot be used: .* takes softcap = 50\.0"),
        (GptOssConfig(**SIZES, num_local_experts=2, num_experts_per_tok=1),
         r"family gpt_oss cannot be used: .* takes s_aux = a tensor of \[2\]"),
        (LlamaConfig(**SIZES, is_causal=False), "family llama cannot be used: .* takes is_causal = False"),
        (BertConfig(**without("num_key_value_heads")),  # sees what comes after
         "family bert gives other states with Silva's attention than with its own"),
        (HyperCLOVAXConfig(**SIZES, logits_scaling=8.0),  # multiplies where Granite divides
         "family hyperclovax gives other logits than its head on its last states"),
        (DiffLlamaConfig(**SIZES | {"num_attention_heads": 4, "num_key_value_heads": 2}),
         "family diffllama gives other states to a sequence with another one"),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)  # fmt: skip
def test_a_family_with_more_than_plain_attention_is_refused(
    config: PreTrainedConfig, words: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=words):
        load_model(saved(config, tmp_path), seed=0)
