"""LoRA of experts, whose weights are parameters of three dimensions: against plain models and PEFT."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from tests.models.test_sources import save
from tests.moe import folder
from tests.stored_models import load_weights
from transformers import AutoModelForCausalLM as Auto

from silva.config.sections import Lora, PretrainedModel
from silva.conversion.models import convert_model
from silva.engines.local.engine import LocalEngine
from silva.engines.settings import LocalEngineSettings
from silva.errors import ModelError
from silva.models.adapters import adapted, fold, merged, merged_bytes
from silva.models.loading import LoadedModel, load_model
from silva.models.snapshots import base_of, save_parameters, weight_folder
from silva.trainer.export import export_model
from silva.types import SamplingParams, Snapshot

TOKENS = torch.tensor([[5, 200, 31, 7, 90, 12, 201, 44]])
ATTENTION = {f"self_attn.{each}_proj.weight" for each in "qkvo"}
EXPERTS = {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
SHARED = {f"mlp.shared_expert.{each}_proj.weight" for each in ("gate", "up", "down")}


def load(path: Path, seed: int = 0, **lora: object) -> LoadedModel:
    adapters = Lora.model_validate({"rank": 2, "alpha": 6.0} | lora)
    return load_model(PretrainedModel(name=str(path), lora=adapters), seed=seed)


def grown(path: Path, **lora: object) -> LoadedModel:
    """As if it had learned: the B of fresh adapters is 0."""
    loaded, generator = load(path, **lora), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in loaded.model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 5)
    return loaded


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=TOKENS, use_cache=False).logits
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("qwen3_moe", ATTENTION | EXPERTS),
        ("olmoe", ATTENTION | EXPERTS),
        ("mixtral", ATTENTION | EXPERTS),
        ("qwen2_moe", ATTENTION | EXPERTS | SHARED),
    ],
)
def test_the_default_targets_are_all_layers_of_attention_and_experts(
    tmp_path: Path, family: str, names: set[str]
) -> None:
    loaded = load(folder(tmp_path / "m", family))
    found = {each.name for each in adapted(loaded.model)}
    assert found == {f"model.layers.{layer}.{name}" for layer in (0, 1) for name in names}
    assert all(("lora_" in n) == p.requires_grad for n, p in loaded.model.named_parameters())
    stacks = [p for n, p in loaded.model.named_parameters() if ".experts." in n and "lora_" not in n]
    assert merged_bytes(loaded.model) == sum(p.nbytes for p in stacks) > 0
    assert "gate_up_proj: rank 2, scaled by 3" in base_of(loaded)["adapters (model.lora)"]


@pytest.mark.parametrize(
    ("targets", "found"),
    [
        (("gate_up_proj",), {"mlp.experts.gate_up_proj"}),
        (("experts.down_proj", "q_proj"), {"mlp.experts.down_proj", "self_attn.q_proj.weight"}),
        (("gate_proj", "up_proj"), {"mlp.experts.gate_up_proj"}),
    ],
)
def test_parameters_of_experts_are_targets_by_name(
    tmp_path: Path, targets: tuple[str, ...], found: set[str]
) -> None:
    loaded = load(folder(tmp_path / "m", num_hidden_layers=1), targets=targets)
    assert {each.name.removeprefix("model.layers.0.") for each in adapted(loaded.model)} == found


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        (
            {"targets": ("gate_proj", "q_proj")},
            r"targets: got gate_proj, expected .*: down_proj, gate_up_proj",
        ),
        ({"targets": ("gate",)}, r"targets: got gate, expected names of linear layers .* of its experts"),
        ({"targets": ("experts",)}, r"targets: got experts, expected"),
        (
            {"dropout": 0.1},
            r"model\.lora\.dropout: got 0\.1 .* \(experts\.down_proj, experts\.gate_up_proj\)",
        ),
    ],
)
def test_what_experts_cannot_have_is_refused(tmp_path: Path, lora: dict[str, object], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        load(folder(tmp_path / "m", num_hidden_layers=1), **lora)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_merged_and_folded_experts_give_the_logits_of_their_adapters(tmp_path: Path, family: str) -> None:
    path = folder(tmp_path / "m", family)
    loaded = grown(path)
    expected = logits(loaded.model)
    assert (expected - logits(Auto.from_pretrained(path))).abs().max() > 0.1
    export_model(loaded, tmp_path / "plain")
    torch.testing.assert_close(logits(Auto.from_pretrained(tmp_path / "plain")), expected, atol=2e-5, rtol=0)
    fold(loaded.model)
    torch.testing.assert_close(logits(loaded.model), expected, atol=2e-5, rtol=0)
    plain = Auto.from_pretrained(path).state_dict().keys()
    assert loaded.model.state_dict().keys() == plain and not adapted(loaded.model)


def test_gradients_of_adapters_are_those_of_the_product_in_each_expert(tmp_path: Path) -> None:
    """W = W0 + s B A, so that dL/dA = s B^T dL/dW and dL/dB = s dL/dW A^T for each expert's own part of
    PEFT's tensors, A [experts * rank, in] and B [out, rank * experts]; dL/dW is that of the plain model."""
    path = folder(tmp_path / "m")
    loaded = grown(path)
    loaded.model.double()
    plain = Auto.from_pretrained(path).double()
    plain.load_state_dict(merged(loaded.model))
    for model in (loaded.model, plain):
        model.set_experts_implementation("eager")  # the others have no float64
        model(input_ids=TOKENS, use_cache=False).logits.log_softmax(-1)[..., 7].sum().backward()
    checked = 0
    for name, _, layer in adapted(loaded.model):
        if ".experts." not in name:
            continue
        whole = plain.get_parameter(name).grad
        a, b = (getattr(layer, part)["default"].weight for part in ("lora_A", "lora_B"))
        for expert in range(4):
            mine_a = a.view(4, 2, -1)[expert]  # [rank, in]
            mine_b = b.view(b.shape[0], 2, 4)[:, :, expert]  # [out, rank]
            of_a, of_b = 3 * mine_b.T @ whole[expert], 3 * whole[expert] @ mine_a.T
            torch.testing.assert_close(a.grad.view(4, 2, -1)[expert], of_a, rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(b.grad.view(-1, 2, 4)[:, :, expert], of_b, rtol=1e-9, atol=1e-12)
            checked += int(of_a.abs().max() > 0)
    assert checked >= 12  # of 2 layers, 2 parameters and 4 experts, some of which no token took


@pytest.mark.slow
def test_adapters_of_experts_are_read_by_peft_and_read_back(tmp_path: Path) -> None:
    base, run = folder(tmp_path / "base"), tmp_path / "runs" / "lake"
    policy = save(run, PretrainedModel(name=str(base), lora=Lora(rank=2, alpha=6)), 3)
    expected = logits(policy.model)
    assert (logits(Auto.from_pretrained(base)) - expected).abs().max() > 0.1
    adapter = tmp_path / "adapter"
    convert_model(f"{run}@step_3", "peft", adapter, None, overwrite=False, on_tensor=lambda *_: None)
    theirs = PeftModel.from_pretrained(Auto.from_pretrained(base), adapter)
    torch.testing.assert_close(logits(theirs), expected, atol=2e-5, rtol=0)
    for name in (str(adapter), f"{run}@step_3"):
        found = load_model(PretrainedModel(name=name), seed=0)
        torch.testing.assert_close(logits(found.model), expected, atol=2e-5, rtol=0)


def test_adapters_of_experts_go_to_another_process_as_a_folder(tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    policy, engine = grown(path), load(path)
    save_parameters(policy, tmp_path / "w")
    load_weights(engine, weight_folder(tmp_path / "w"))
    assert torch.equal(logits(engine.model), logits(policy.model))
    with pytest.raises(ModelError, match=r"another adapters .*gate_up_proj: rank 2, scaled by 3"):
        load_weights(load(path, alpha=2.0), weight_folder(tmp_path / "w"))


@pytest.mark.slow
def test_the_engine_samples_from_adapted_experts_also_after_an_update(tmp_path: Path) -> None:
    """Its linear layers are large enough to be packed, with layers of attention adapted too."""
    loaded = grown(folder(tmp_path / "m", hidden_size=320, head_dim=160))
    prompt = TOKENS[0].tolist()
    with ThreadPoolExecutor(1) as compute:
        engine = LocalEngine(loaded, LocalEngineSettings(), compute)
        for version in (0, 1):
            if version:
                with torch.no_grad():
                    for name, parameter in loaded.model.named_parameters():
                        if "lora_B" in name:
                            parameter.mul_(-2)
                asyncio.run(engine.load(Snapshot(version)))
            found = asyncio.run(engine.sample(prompt, SamplingParams(12, seed=1)))
            export_model(loaded, tmp_path / f"plain{version}")
            plain, tokens = Auto.from_pretrained(tmp_path / f"plain{version}"), [*prompt, *found.tokens]
            with torch.no_grad():
                expected = plain(input_ids=torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
            wanted = expected.gather(-1, torch.tensor(tokens[1:])[:, None])[len(prompt) - 1 :, 0]
            torch.testing.assert_close(torch.tensor(found.logprobs).float(), wanted, atol=5e-5, rtol=0)
            assert found.versions == (version,) * 12
