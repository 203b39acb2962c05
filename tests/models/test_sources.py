"""Runs, their steps and adapters of PEFT as models: the same weights as by another way, or a clear error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from tests.models.tiny import TINY
from transformers import AutoModelForCausalLM as Auto

from silva.config.saved import saved_values, toml
from silva.config.sections import Lora, PretrainedModel, TinyModel
from silva.errors import ModelError
from silva.models import sources
from silva.models.loading import LoadedModel, load_model, load_tokenizer, resolve
from silva.storage.checkpoints import CheckpointStore
from silva.trainer.export import export_model

SEED = 5


def trained(model: TinyModel | PretrainedModel, step: int) -> LoadedModel:
    """As after some training: every weight that may change has changed."""
    loaded = load_model(model, seed=SEED)
    torch.manual_seed(step)
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            if parameter.requires_grad:
                parameter += 0.3 * torch.randn_like(parameter)
    return loaded


def save(run: Path, model: TinyModel | PretrainedModel, step: int, *, export: bool = False) -> LoadedModel:
    loaded = trained(model, step)
    masters = {
        n: p.detach().float().contiguous() for n, p in loaded.model.named_parameters() if p.requires_grad
    }

    def trainer(path: Path) -> None:
        path.mkdir()
        save_file(masters, path / "weights.safetensors")

    CheckpointStore(run / "checkpoints", keep=9).save(step, {"trainer": trainer}, {})
    (run / "config.toml").write_text(toml({"seed": SEED, "model": saved_values(model)}, {}))
    if export:
        (run / "weights").mkdir(exist_ok=True)
        export_model(loaded, run / "weights" / f"step_{step}")
    return loaded


def weights(loaded: LoadedModel) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in loaded.model.named_parameters()}


def same(one: LoadedModel, other: LoadedModel) -> bool:
    a, b = weights(one), weights(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def load(name: str, dtype: str = "float32") -> LoadedModel:
    return load_model(PretrainedModel.model_validate({"name": name, "dtype": dtype}), seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [None, Lora(rank=2, targets=("q_proj", "down_proj"))])
def test_a_checkpoint_has_the_weights_that_its_export_has(
    tmp_path: Path, dtype: str, lora: Lora | None
) -> None:
    run, model = tmp_path / "run", TINY.model_copy(update={"dtype": dtype, "lora": lora})
    save(run, model, 3)
    exported = tmp_path / "plain"
    export_model(trained(model, 3), exported)
    found = load(str(run))
    assert same(found, load(str(exported))) and not found.lora
    assert all(p.requires_grad for p in found.model.parameters())  # as of a model that training begins with
    assert load_tokenizer(PretrainedModel(name=str(run))).encode("abc") == found.tokenizer.encode("abc")


def test_newest_best_and_a_step(tmp_path: Path) -> None:
    run = tmp_path / "run"
    made = {step: save(run, TINY, step) for step in (10, 20)}
    made[30] = save(run, TINY, 30, export=True)
    CheckpointStore(run / "checkpoints", keep=9).mark_best(20)
    for name, step in (("", 30), ("@best", 20), ("@step_10", 10), ("@step_30", 30)):
        assert same(load(f"{run}{name}"), made[step])
        assert sources.pinned(f"{run}{name}") == f"{run}@step_{step}"
    assert resolve(str(run)) == str(run / "weights" / "step_30")
    assert sources.series(str(run)) == {step: f"{run}@step_{step}" for step in (10, 20, 30)}
    assert sources.series(f"{run}/checkpoints", [20]) == {20: f"{run}@step_20"}
    assert same(load(f"{run}/checkpoints/step_10"), made[10])


def test_an_error_says_what_there_is(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (10, 20):
        save(run, TINY, step)
    with pytest.raises(ModelError, match=r"run@step_5: .*/run has step_10, step_20; none is marked best"):
        load(f"{run}@step_5")
    CheckpointStore(run / "checkpoints", keep=9).mark_best(20)
    with pytest.raises(ModelError, match=r"run has step_10, step_20; best is step_20$"):
        load(f"{run}@newest")
    with pytest.raises(ModelError, match=r"no step_5, step_7; it has step_10, step_20$"):
        sources.series(str(run), [7, 5, 10])
    with pytest.raises(ModelError, match=r"is no plain model; `silva convert`"):
        resolve(str(run))
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    with pytest.raises(ModelError, match="has no weights and no checkpoint yet"):
        load(str(tmp_path / "empty"))
    with pytest.raises(ModelError, match="is no run's folder"):
        load(f"{tmp_path}@best")


def test_a_damaged_checkpoint_is_never_loaded(tmp_path: Path) -> None:
    run = tmp_path / "run"
    save(run, TINY, 1)
    file = run / "checkpoints" / "step_1" / "trainer" / "weights.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(ModelError, match=r"its weights cannot be read: .*sha256"):
        load(str(run))


def test_parameters_of_another_model_are_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    save(run, TINY, 1)
    other = TINY.model_copy(update={"width": 32})
    (run / "config.toml").write_text(toml({"seed": SEED, "model": saved_values(other)}, {}))
    with pytest.raises(ModelError, match=r"weights.safetensors: .* of another shape"):
        load(str(run))
    (run / "config.toml").unlink()
    with pytest.raises(ModelError, match=r"config.toml, which cannot be read"):
        load(str(run))


@pytest.fixture
def adapter(tmp_path: Path) -> tuple[Path, Path]:
    base, folder = tmp_path / "base", tmp_path / "adapter"
    export_model(load_model(TINY, seed=1), base)
    wrapped = get_peft_model(
        Auto.from_pretrained(base), LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj", "up_proj"])
    )
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.normal_()
    wrapped.save_pretrained(folder)
    return base, folder


def test_an_adapter_of_peft_is_merged_as_peft_does(adapter: tuple[Path, Path]) -> None:
    base, folder = adapter
    theirs = PeftModel.from_pretrained(Auto.from_pretrained(base), str(folder))
    found, tokens = load(str(folder)), torch.arange(9)[None]
    with torch.no_grad():
        expected, got = theirs(input_ids=tokens).logits, found.model(input_ids=tokens).logits
    assert torch.allclose(got, expected, atol=1e-5) and not same(found, load(str(base)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"peft_type": "IA3"}, r"got peft_type 'IA3'"),
        ({"base_model_name_or_path": None}, r"base_model_name_or_path None"),
        ({"target_modules": ["q_proj"]}, r"up_proj.* missing or too many"),
    ],
)
def test_adapters_that_do_not_fit_are_refused(adapter: tuple[Path, Path], change: dict, words: str) -> None:
    file = adapter[1] / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ModelError, match=words):
        load(str(adapter[1]))


def test_an_adapter_without_safetensors_is_refused(adapter: tuple[Path, Path]) -> None:
    (adapter[1] / "adapter_model.safetensors").rename(adapter[1] / "adapter_model.bin")
    with pytest.raises(ModelError, match=r"no adapter_model.safetensors .* pickle"):
        load(str(adapter[1]))
