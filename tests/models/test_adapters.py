"""Adapters: where they go, and where they are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests.models.tiny import TINY
from transformers import AutoModelForCausalLM as Auto

from silva.config.sections import Lora, PretrainedModel
from silva.errors import ModelError
from silva.models.loading import load_model


def test_lora_puts_adapters_in_and_freezes_the_rest() -> None:
    plain = load_model(TINY, seed=0)
    loaded = load_model(TINY.model_copy(update={"lora": Lora(rank=2, targets=("q_proj", "up_proj"))}), seed=0)
    trained = {n: p for n, p in loaded.model.named_parameters() if p.requires_grad}
    layer = "model.layers.0"
    assert {n.split(".lora_")[0] for n in trained} == {f"{layer}.self_attn.q_proj", f"{layer}.mlp.up_proj"}
    assert loaded.lora and len(trained) == 4
    tokens = torch.arange(9)[None]
    with torch.no_grad():  # B starts at 0
        assert torch.equal(loaded.model(input_ids=tokens).logits, plain.model(input_ids=tokens).logits)


@pytest.mark.parametrize("wrong", ["nothing_like_it", "mlp", "input_layernorm", "embed_tokens"])
@pytest.mark.parametrize("others", [(), ("q_proj",)])
def test_lora_targets_that_are_no_linear_layers_are_refused(wrong: str, others: tuple[str, ...]) -> None:
    with pytest.raises(
        ModelError,
        match=rf"model\.lora\.targets: got {wrong}, expected .*: down_proj, .*q_proj, up_proj, v_proj",
    ):
        load_model(TINY.model_copy(update={"lora": Lora(targets=(*others, wrong))}), seed=0)


def test_a_head_that_is_the_embeddings_gets_no_adapter() -> None:
    """It would be lost in the export, whose head is the embeddings as well."""
    with pytest.raises(ModelError, match=r"model\.lora\.targets: got lm_head, .* embeddings .*Leave it out"):
        load_model(TINY.model_copy(update={"lora": Lora(targets=("q_proj", "lm_head"))}), seed=0)


@pytest.mark.parametrize("lora", [None, Lora(targets=("q_proj",))])
def test_an_adapter_beside_the_model_is_refused(folder: Path, lora: Lora | None) -> None:
    """transformers would load it into the model, and fresh adapters would take its place."""
    get_peft_model(Auto.from_pretrained(folder), LoraConfig(target_modules=["q_proj"])).save_pretrained(
        folder
    )
    assert (folder / "adapter_model.safetensors").is_file() and (folder / "model.safetensors").is_file()
    with pytest.raises(ModelError, match=r"model\.name = .*adapter_config\.json.* merge the two"):
        load_model(PretrainedModel(name=str(folder), lora=lora), seed=0)
