"""Weights that are damaged, not all there or not numbers are refused, with the file's name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.tiny import TINY

from silva.config.sections import PretrainedModel
from silva.errors import ModelError
from silva.models.loading import load_model

UP = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    "content", [b"", b"\x01", b"no such format" * 99, None], ids=["empty", "short", "garbage", "cut"]
)
def test_damaged_weights_are_named(folder: Path, content: bytes | None) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100] if content is None else content)
    with pytest.raises(ModelError) as caught:
        load_model(PretrainedModel(name=str(folder)), seed=0)
    assert str(caught.value).startswith(f"model.name = {str(folder)!r}: {file} is damaged (")
    assert str(caught.value).endswith(", expected a whole file; copy or export the model again")


def test_a_damaged_text_is_named(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json is damaged \(Expecting property name"):
        load_model(PretrainedModel(name=str(folder)), seed=0)


def test_weights_in_pickle_are_refused(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(
        ModelError, match=r"could not be loaded \(.*model\.safetensors.*expected .*safetensors"
    ):
        load_model(PretrainedModel(name=str(folder)), seed=0)


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> PretrainedModel:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return PretrainedModel(name=str(folder))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda t: t.pop(UP), rf"the weights do not fit config\.json \(missing: {UP}\); copy or export"),
        (lambda t: t.update(down=t.pop(UP)), rf"\(missing: {UP}; not part of the model: down\)"),
        (lambda t: t.update({UP: torch.ones(3, 3)}),
         rf"\(of another shape: {UP} is \[3, 3\], expected \[64, 16\]\)"),
        (lambda t: t[UP].view(-1)[5:6].fill_(torch.nan),
         rf"weights hold NaN or infinity: {UP} in .*/model\.safetensors; copy"),
        (lambda t: t["model.norm.weight"].fill_(torch.inf),
         r"weights hold NaN or infinity: model\.norm\.weight in .*/model\.safetensors; copy"),
    ],
    ids=["missing", "renamed", "shape", "NaN", "infinity"],
)  # fmt: skip
def test_weights_that_are_not_the_model_s_are_refused(
    folder: Path, edit: Callable[[dict[str, torch.Tensor]], object], words: str
) -> None:
    """transformers would draw missing ones at random and go on."""
    with pytest.raises(ModelError, match=words):
        load_model(change(folder, edit), seed=0)


def test_tensors_without_a_place_are_left_out_and_named(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = change(folder, lambda t: t.update({f"extra{i}": torch.ones(1) for i in range(5)}))
    capfd.readouterr()
    loaded = load_model(settings, seed=0)
    said = f"model.name = {str(folder)!r}: not part of this model: extra0, extra1, extra2 and 2 more\n"
    assert capfd.readouterr() == ("", said)
    whole = load_model(TINY, seed=7).model.state_dict()
    assert all(torch.equal(tensor, whole[name]) for name, tensor in loaded.model.state_dict().items())
