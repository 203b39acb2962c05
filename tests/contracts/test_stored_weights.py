"""Models whose weights are read part by part: they are those that transformers loads, to the bit."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.stored_models import MODELS, settings_of, write_model
from tests.test_families import TAKEN, saved
from transformers import PreTrainedConfig

from silva.config.sections import PretrainedModel
from silva.errors import CapabilityError, ModelError
from silva.models.adapters import plain_name
from silva.models.loading import load_model
from silva.models.pieces import Box, Pieces
from silva.models.stored import whole
from silva.trainer.settings import LocalTrainerSettings, Parallel

FAMILIES = ("gemma3_text", "granite", "phi3", "gpt2", "opt")
OTHERS = [config for config in TAKEN if config.model_type in FAMILIES]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*MODELS, *OTHERS], ids=lambda kind: getattr(kind, "model_type", kind))
def test_every_part_of_a_parameter_is_what_transformers_loads(
    tmp_path: Path, kind: str | PreTrainedConfig
) -> None:
    if isinstance(kind, str):
        write_model(MODELS[kind][0](), tmp_path / "m")
        settings = settings_of(tmp_path / "m", kind)
    else:
        settings = saved(kind, tmp_path / "m").model_copy(update={"dtype": "bfloat16"})
    expected, found = load_model(settings, seed=3), load_model(settings, seed=3, stored=True)
    assert found.stored and found.model.config.to_dict() == expected.model.config.to_dict()
    assert found.model.generation_config.to_dict() == expected.model.generation_config.to_dict()
    of_all = dict(expected.model.named_parameters())
    assert {n: p.requires_grad for n, p in found.model.named_parameters()} == {
        n: p.requires_grad for n, p in of_all.items()
    }
    for name, parameter in found.model.named_parameters():
        wanted = of_all[name]
        if "lora_" in name:
            assert torch.equal(parameter, wanted)
            continue
        assert parameter.is_meta and parameter.dtype == wanted.dtype
        boxes = [whole(wanted), *(half(wanted, dim) for dim in range(wanted.dim()))]
        for box in boxes:
            part = found.stored.read(plain_name(name), box).to(wanted.dtype)
            assert torch.equal(part, wanted[box.within(whole(wanted))]), (name, box)
    of_all = dict(expected.model.named_buffers())
    for name, buffer in found.model.named_buffers():
        assert buffer.dtype == of_all[name].dtype and torch.equal(buffer, of_all[name])


def half(tensor: torch.Tensor, dim: int) -> Box:
    """The second one."""
    offset, shape = [0] * tensor.dim(), [*tensor.shape]
    offset[dim] = shape[dim] // 2
    shape[dim] -= offset[dim]
    return Box(tuple(offset), tuple(shape))


def test_only_the_experts_of_a_part_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(MODELS["experts"][0](), tmp_path / "m")
    found = load_model(settings_of(tmp_path / "m", "experts"), seed=0, stored=True)
    read, names = Pieces.read, list[str]()

    def spied(self: Pieces, name: str, wanted: Box) -> torch.Tensor:
        names.append(name)
        return read(self, name, wanted)

    monkeypatch.setattr(Pieces, "read", spied)
    at = "model.layers.1.mlp.experts"
    parameter = found.model.get_parameter(f"{at}.gate_up_proj")
    assert found.stored and found.stored.read(f"{at}.gate_up_proj", half(parameter, 0)).shape[0] == 2
    assert sorted(names) == [f"{at}.{n}.{part}_proj.weight" for n in (2, 3) for part in ("gate", "up")]


@pytest.mark.parametrize("equal", [True, False])
def test_a_head_in_the_files_of_a_tied_model_is_tied_if_it_is_equal(tmp_path: Path, equal: bool) -> None:
    """As transformers does it."""
    path = tmp_path / "tied"
    write_model(MODELS["tied"][0](), path)
    embeddings = {**load_file(path / "model-00001-of-00002.safetensors"),
                  **load_file(path / "model-00002-of-00002.safetensors")}  # fmt: skip
    head = embeddings["model.embed_tokens.weight"] * (1 if equal else 2)
    for file in path.glob("model*"):
        file.unlink()
    save_file({**embeddings, "lm_head.weight": head.clone()}, path / "model.safetensors")
    expected, found = (load_model(PretrainedModel(name=str(path)), seed=0, stored=s) for s in (False, True))
    for loaded in (expected, found):
        tied = loaded.model.get_output_embeddings().weight is loaded.model.get_input_embeddings().weight
        assert tied is equal


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda t: t.pop("model.norm.weight"), r"the weights do not fit config\.json \(missing: model\.norm"),
        (lambda t: t.update({"model.norm.weight": torch.ones(7)}), r"norm\.weight is \[7\], expected \[32\]"),
    ],
    ids=["missing", "shape"],
)  # fmt: skip
def test_weights_that_do_not_fit_are_refused_before_one_is_read(
    tmp_path: Path, damage: Callable[[dict[str, torch.Tensor]], Any], words: str
) -> None:
    write_model(MODELS["untied"][0](), tmp_path / "m")
    file = next(f for f in (tmp_path / "m").glob("*.safetensors") if "model.norm.weight" in load_file(f))
    tensors = load_file(file)
    damage(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    texts = []
    for stored in (False, True):
        with pytest.raises(ModelError, match=words) as caught:
            load_model(PretrainedModel(name=str(tmp_path / "m")), seed=0, stored=stored)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda file: os.truncate(file, 1000), r"model-00002-of-00002\.safetensors is damaged"),
        (lambda file: file.unlink(), r"could not be loaded .*model-00002-of-00002"),
    ],
    ids=["truncated", "gone"],
)
def test_files_that_are_damaged_are_named(tmp_path: Path, damage: Callable[[Path], Any], words: str) -> None:
    write_model(MODELS["untied"][0](), tmp_path / "m")
    damage(tmp_path / "m" / "model-00002-of-00002.safetensors")
    with pytest.raises(ModelError, match=words):
        load_model(PretrainedModel(name=str(tmp_path / "m")), seed=0, stored=True)


def test_one_process_has_nothing_to_offload() -> None:
    settings = LocalTrainerSettings(parallel=Parallel(offload=True))
    with pytest.raises(
        CapabilityError, match=r"trainer\.parallel\.offload = true: got a trainer of one process"
    ):
        settings.build(cast(Any, None))
