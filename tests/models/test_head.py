"""Logits as the model's own forward pass gives them, for families that put something behind the head."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    PhiConfig,
    PreTrainedConfig,
)

from silva.models.head import logits_of

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
         "num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "factor", "cap"),
    [
        (LlamaConfig(**SIZES), 1.0, None),
        (PhiConfig(**SIZES), 1.0, None),  # its head has a bias
        (GraniteConfig(**SIZES, logits_scaling=8.0), 1 / 8, None),
        (CohereConfig(**SIZES, logit_scale=0.25), 0.25, None),
        (Gemma2Config(**SIZES, final_logit_softcapping=0.05), 1.0, 0.05),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_logits_are_the_model_s_own(config: PreTrainedConfig, factor: float, cap: float | None) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    tokens = torch.arange(1, 6)[None]
    with torch.no_grad():
        head = model.get_output_embeddings()
        if head.bias is not None:
            head.bias.normal_()
        hidden = model.get_decoder()(input_ids=tokens).last_hidden_state
        found, plain = logits_of(model, hidden), head(hidden)
        torch.testing.assert_close(found, model(input_ids=tokens).logits, rtol=0, atol=1e-6)
    expected = plain * factor if cap is None else cap * torch.tanh(plain / cap)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert (factor == 1 and cap is None) or (found - plain).abs().max() > 0.01


def test_logits_are_float32_or_wider() -> None:
    config = LlamaConfig(**SIZES)
    for narrow, wide in [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)]:
        model = AutoModelForCausalLM.from_config(config).to(narrow)
        assert logits_of(model, torch.zeros(2, 32, dtype=narrow)).dtype == wide
