"""The exported folder is plain transformers and computes what the trained model computes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft.tuners.lora import Linear as LoraLinear
from tests.trainer.updates import optim_step
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from silva.config.sections import Lora, Optimizer, PretrainedModel
from silva.errors import ModelError
from silva.models.loading import LoadedModel, load_model
from silva.models.tiny import tiny_tokenizer
from silva.trainer.learner import Learner
from silva.trainer.local import LocalTrainer
from silva.trainer.settings import LocalTrainerSettings
from silva.types import LossSpec, Sample


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
def test_export_loads_plainly_with_the_same_logits(
    tiny: Callable[..., LoadedModel], make_samples: Callable[..., list[Sample]], tmp_path: Path, lora: bool
) -> None:
    loaded, samples = tiny(lora=lora), make_samples([9, 30])
    untrained = tiny(lora=lora)
    trainer = train(loaded, samples)
    before = {n: t.clone() for n, t in loaded.model.state_dict().items()}
    asyncio.run(trainer.export(tmp_path))

    after = loaded.model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert plain.config._attn_implementation == "sdpa"
    assert not any("lora" in name for name, _ in plain.named_parameters())
    assert plain.get_output_embeddings().weight is plain.get_input_embeddings().weight  # still tied
    tokens = torch.from_numpy(samples[1].tokens)[None]
    with torch.no_grad():
        got, expected, first = (m(input_ids=tokens).logits for m in (plain, loaded.model, untrained.model))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    assert float((got - first).abs().max()) > 0.01  # training did change them
    for file in ("config.json", "generation_config.json"):
        assert "silva" not in (tmp_path / file).read_text()
    assert AutoTokenizer.from_pretrained(tmp_path)("hi").input_ids == loaded.tokenizer("hi").input_ids


def train(loaded: LoadedModel, samples: list[Sample]) -> LocalTrainer:
    trainer = LocalTrainer(Learner(loaded, LocalTrainerSettings(optimizer=Optimizer(lr=1e-2)), seed=0))
    for _ in range(3):
        asyncio.run(trainer.forward_backward(samples, LossSpec("reinforce")))
        asyncio.run(optim_step(trainer))
    return trainer


def logits(model: torch.nn.Module, sample: Sample) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.from_numpy(sample.tokens)[None]).logits  # type: ignore[no-any-return]


def test_an_adapter_of_a_head_of_its_own_is_exported(
    make_samples: Callable[..., list[Sample]], tmp_path: Path
) -> None:
    config = LlamaConfig(vocab_size=262, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
                         num_attention_heads=2, tie_word_embeddings=False)  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    lora = Lora(rank=4, alpha=8.0, targets=("lm_head", "v_proj"))
    loaded = load_model(PretrainedModel(name=str(tmp_path / "base"), lora=lora), seed=0)
    samples = make_samples([9, 30])
    first = logits(loaded.model, samples[1])
    asyncio.run(train(loaded, samples).export(tmp_path / "out"))
    found = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), samples[1])
    torch.testing.assert_close(found, logits(loaded.model, samples[1]), rtol=0, atol=1e-5)
    assert float((found - first).abs().max()) > 0.01


def test_an_export_that_is_not_the_policy_is_not_written(
    tiny: Callable[..., LoadedModel],
    make_samples: Callable[..., list[Sample]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = train(tiny(lora=True), make_samples([9, 30]))
    monkeypatch.setattr(LoraLinear, "get_delta_weight", lambda layer, adapter: torch.zeros(()))
    with pytest.raises(
        ModelError, match=r"weights: not written, because tiny as a plain model gives other logits"
    ):
        asyncio.run(trainer.export(tmp_path / "weights"))
    assert not (tmp_path / "weights").exists()


def test_export_keeps_the_type_of_the_weights(tiny: Callable[..., LoadedModel], tmp_path: Path) -> None:
    trainer = LocalTrainer(Learner(tiny("bfloat16", lora=True), LocalTrainerSettings(), seed=0))
    asyncio.run(trainer.export(tmp_path))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert {p.dtype for p in plain.parameters()} == {torch.bfloat16}
