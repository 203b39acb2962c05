"""Runs and their checkpoints become folders that compute what the policy computed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from tests.conversion.made import folder, gap, quiet
from tests.models.test_sources import save
from transformers import AutoModelForCausalLM, AutoTokenizer

from silva.cli import main
from silva.config.sections import Lora, PretrainedModel, TinyModel
from silva.conversion.models import Converted, convert_model, name_of
from silva.errors import ModelError

TOKENS = [5, 200, 31, 7, 90, 12, 301, 44]


def converted(source: Path | str, to: str, output: Path) -> Converted:
    return convert_model(str(source), to, output, None, overwrite=False, on_tensor=quiet)


@pytest.mark.slow
def test_adapters_are_merged_or_written_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = folder(tmp_path / "base", "llama")
    run = tmp_path / "runs" / "lake"
    policy = save(run, PretrainedModel(name=str(base), lora=Lora(rank=4, alpha=12)), 3)
    save(run, PretrainedModel(name=str(base), lora=Lora(rank=4, alpha=12)), 7)
    merged = converted(f"{run}@step_3", "hf", tmp_path / "merged").path
    assert gap(AutoModelForCausalLM.from_pretrained(merged), policy.model, TOKENS) <= 1e-5
    assert main(["convert", f"{run}@step_3", "--to", "peft", "--output", str(tmp_path / "adapter")]) == 0
    assert f"its base is {base}, as adapter_config.json says" in capsys.readouterr().out
    alone = AutoModelForCausalLM.from_pretrained(base)
    assert gap(alone, policy.model, TOKENS) > 0.1
    assert gap(PeftModel.from_pretrained(alone, tmp_path / "adapter"), policy.model, TOKENS) <= 1e-5
    back = converted(
        tmp_path / "adapter", "hf", tmp_path / "back"
    ).path  # an adapter's folder is a source too
    assert gap(AutoModelForCausalLM.from_pretrained(back), policy.model, TOKENS) <= 1e-5
    file = converted(f"{run}@step_3", "gguf", tmp_path / "files").path
    assert file == tmp_path / "files" / "lake-step_3.gguf"
    found = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    assert gap(found, policy.model, TOKENS) <= 1e-5
    assert not [*tmp_path.glob(".silva-convert-*")]


@pytest.mark.slow
def test_a_run_is_its_newest_weights_exported_or_not(tmp_path: Path) -> None:
    model = TinyModel(layers=1, width=32, heads=4, kv_heads=2)
    run = tmp_path / "lake"
    save(run, model, 1, export=True)
    tokens = [5, 200, 31]
    for step in (1, 2):
        policy = save(run, model, step)
        found = converted(run, "hf", tmp_path / str(step)).path
        assert gap(AutoModelForCausalLM.from_pretrained(found), policy.model, tokens) <= 1e-5
    assert AutoTokenizer.from_pretrained(found)("hi")["input_ids"] == policy.tokenizer("hi")["input_ids"]
    with pytest.raises(ModelError, match=r"trained without \[model.lora\]"):
        converted(run, "peft", tmp_path / "adapter")
    with pytest.raises(ModelError, match=r"no step_9; it has|has step_1, step_2"):
        converted(f"{run}@step_9", "hf", tmp_path / "none")
    with pytest.raises(ModelError, match=r"^lake: the tokenizer .BPE. has no merges"):
        converted(run, "gguf", tmp_path / "m.gguf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2", "lake"]


def test_a_name_says_what_was_converted(tmp_path: Path) -> None:
    run = tmp_path / "lake"
    save(run, TinyModel(layers=1, width=16, heads=2, kv_heads=1), 4)
    actor = tmp_path / "global_step_5" / "actor"
    actor.mkdir(parents=True)
    (actor / "model_world_size_1_rank_0.pt").touch()
    names = {
        str(run): "lake", f"{run}@step_4": "lake-step_4", "Qwen/Qwen3-0.6B": "Qwen3-0.6B",
        "a/b.Q4.gguf": "b.Q4", str(actor): "global_step_5", str(actor.parent): "global_step_5",
    }  # fmt: skip
    assert {source: name_of(source) for source in names} == names
