"""Hugging Face folders hold the same numbers, in the dtype that was asked for, whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.conversion.made import TEXT, folder, gap, quiet
from transformers import AutoModelForCausalLM, AutoTokenizer

from silva.cli import main
from silva.conversion import folders
from silva.errors import ModelError


def test_a_folder_computes_the_same_in_one_file_or_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = folder(tmp_path / "model", "qwen2")
    tokens = AutoTokenizer.from_pretrained(source)(TEXT)["input_ids"]
    expected = AutoModelForCausalLM.from_pretrained(source)
    for most, files in ((folders.MOST, 1), (100_000, 4)):
        monkeypatch.setattr(folders, "MOST", most)
        output = tmp_path / f"out{files}"
        assert main(["convert", str(source), "--to", "hf", "--output", str(output)]) == 0
        assert f"{output}: 26 tensors, 0." in capsys.readouterr().out
        assert len([*output.glob("*.safetensors")]) == files
        assert gap(AutoModelForCausalLM.from_pretrained(output), expected, tokens) == 0
        assert (
            AutoTokenizer.from_pretrained(output).chat_template
            == AutoTokenizer.from_pretrained(source).chat_template
        )
    assert (
        main(["convert", str(source), "--to", "hf", "--output", str(tmp_path / "b"), "--dtype", "bf16"]) == 0
    )
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "b", dtype="auto")
    assert found.dtype == torch.bfloat16
    assert json.loads((tmp_path / "b" / "config.json").read_text())["dtype"] == "bfloat16"
    held = expected.state_dict()
    assert all(torch.equal(each, held[name].bfloat16()) for name, each in found.state_dict().items())


def test_what_is_there_stays_unless_it_may_be_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, output = folder(tmp_path / "model", "llama"), tmp_path / "out"
    output.mkdir()
    (output / "mine.txt").write_text("kept")
    command = ["convert", str(source), "--to", "hf", "--output", str(output)]
    assert main([*command, "--overwrite"]) == 2
    assert f"{output}: got a folder, expected one with *.safetensors to overwrite" in capsys.readouterr().err
    for place in (source, tmp_path):  # the model itself, and what holds it
        assert main([*command[:-1], str(place), "--overwrite"]) == 2
        assert f"{place}: holds {source}, which is converted" in capsys.readouterr().err
    (output / "model.safetensors").write_text("earlier")
    assert main(command) == 2
    assert f"{output}: exists already; choose another --output, or add --overwrite" in capsys.readouterr().err
    with monkeypatch.context() as patch:  # a failure half-way
        patch.setattr(folders, "let_read", lambda path: (_ for _ in ()).throw(ModelError("the disk is full")))
        assert main([*command, "--overwrite"]) == 2
    assert sorted(path.name for path in output.iterdir()) == ["mine.txt", "model.safetensors"]
    assert main([*command, "--overwrite"]) == 0
    assert not (output / "mine.txt").exists() and (output / "config.json").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--to", "onnx"], "--to: got onnx, expected one of hf, peft"),
        ([], "--to: got nothing, expected one of hf, peft"),
        (
            ["--to", "hf", "--dtype", "q8_0"],
            "--dtype: got 'q8_0', expected f32, f16, bf16 for --to hf",
        ),
        (["--to", "hf", "--dtpye", "f16"], "got"),
    ],
)
def test_wrong_words_are_answered(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "nowhere/model", *words]) == 2
    assert said in capsys.readouterr().err


def test_weights_that_are_not_those_of_the_config_are_refused(tmp_path: Path) -> None:
    source = folder(tmp_path / "model", "llama")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(ModelError, match=r"the weights do not fit config.json .missing: model.layers.2"):
        folders.write_folder(folders_model(source), tmp_path / "out", None, quiet)


def folders_model(source: Path) -> folders.Model:
    from silva.conversion.tensors import model_in

    return model_in(source)
