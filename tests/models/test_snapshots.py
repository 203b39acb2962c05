"""Weights that a folder brings to a model: what fits is copied, anything else changes nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.tiny import TINY
from tests.stored_models import load_weights

from silva.config.sections import Lora, TinyModel
from silva.errors import ModelError
from silva.models.loading import LoadedModel, load_model
from silva.models.snapshots import save_parameters, weight_folder

FIRST = "model.layers.0.self_attn.q_proj.weight"
Tensors = dict[str, torch.Tensor]


def model(seed: int, *, lora: bool = False) -> LoadedModel:
    adapters = Lora(rank=2, alpha=4.0, dropout=0.0) if lora else None
    return load_model(TINY.model_copy(update={"lora": adapters}), seed=seed)


def state(loaded: LoadedModel) -> Tensors:
    return {name: p.detach().clone() for name, p in loaded.model.named_parameters()}


def equal(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_tied_head_is_written_once(tmp_path: Path) -> None:
    save_parameters(model(1), tmp_path / "w")
    names = load_file(tmp_path / "w" / "model.safetensors").keys()
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names


def changed(model: TinyModel, lora: Lora | None, **seed: int) -> LoadedModel:
    return load_model(model.model_copy(update={"lora": lora}), seed=seed.get("seed", 1))


ADAPTERS = Lora(rank=2, alpha=4.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "lora", "seed", "words"),
    [
        (TINY, ADAPTERS, 1, ""),
        (TINY, ADAPTERS.model_copy(update={"dropout": 0.5}), 1, ""),  # nothing that sampling does
        (TINY, ADAPTERS, 2, "another digest of what is not trained"),
        (TINY, ADAPTERS.model_copy(update={"alpha": 8.0}), 1, r"another adapters.*scaled by 2.*scaled by 4"),
        (TINY, ADAPTERS.model_copy(update={"targets": ("q_proj",)}), 1, "another adapters"),
        (TINY.model_copy(update={"dtype": "bfloat16"}), ADAPTERS, 1, "another dtype: got float32"),
        # as many numbers of the same shapes, and another model
        (TINY.model_copy(update={"heads": 4, "kv_heads": 2}), ADAPTERS, 1, "another architecture"),
    ],
)  # fmt: skip
def test_adapters_of_another_base_are_refused(
    model: TinyModel, lora: Lora, seed: int, words: str, tmp_path: Path
) -> None:
    save_parameters(changed(TINY, ADAPTERS), tmp_path / "w")
    engine = changed(model, lora, seed=seed)
    before = state(engine)
    if not words:
        return load_weights(engine, weight_folder(tmp_path / "w"))
    with pytest.raises(ModelError, match=words):
        load_weights(engine, weight_folder(tmp_path / "w"))
    assert equal(before, state(engine))


def test_a_folder_is_never_written_over(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError):
        save_parameters(model(1), tmp_path)


def without(tensors: Tensors) -> Tensors:
    return {name: x for name, x in tensors.items() if name != FIRST}


def wider(tensors: Tensors) -> Tensors:
    return tensors | {FIRST: torch.zeros(16, 17)}


def of_nothing_known(tensors: Tensors) -> Tensors:
    return {f"other.{name}": x for name, x in tensors.items()}


@pytest.mark.parametrize("spoiled", [without, wider, of_nothing_known])
def test_weights_of_another_model_are_refused(spoiled: Callable[[Tensors], Tensors], tmp_path: Path) -> None:
    save_parameters(model(1), tmp_path / "w")
    file = tmp_path / "w" / "model.safetensors"
    save_file(spoiled(load_file(file)), file)
    other = model(2)
    before = state(other)
    with pytest.raises(ModelError, match=r"model\.\S*weight.* missing or of another shape"):
        load_weights(other, weight_folder(tmp_path / "w"))
    assert equal(before, state(other))


def test_adapters_do_without_a_base_and_nothing_does_without_adapters(tmp_path: Path) -> None:
    save_parameters(model(1), tmp_path / "whole")
    adapted = model(2, lora=True)
    before = state(adapted)
    with pytest.raises(ModelError, match="another adapters"):
        load_weights(adapted, weight_folder(tmp_path / "whole"))
    save_parameters(adapted, tmp_path / "adapters")
    with pytest.raises(ModelError, match="another adapters"):
        load_weights(plain := model(3), weight_folder(tmp_path / "adapters"))
    assert equal(before, state(adapted)) and equal(state(plain), state(model(3)))


def test_a_file_more_or_one_with_another_name_is_noticed(tmp_path: Path) -> None:
    save_parameters(model(1), tmp_path / "w")
    folder, file = weight_folder(tmp_path / "w"), tmp_path / "w" / "model.safetensors"
    save_file({"x": torch.zeros(1)}, tmp_path / "w" / "more.safetensors")
    with pytest.raises(ModelError, match="digest"):
        load_weights(model(2), folder)
    (tmp_path / "w" / "more.safetensors").unlink()
    load_weights(model(2), folder)
    file.rename(file.with_name("other.safetensors"))
    with pytest.raises(ModelError, match="digest"):
        load_weights(model(2), folder)


def test_no_folder_or_no_weights_in_it_has_no_digest(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    for path in (tmp_path, tmp_path / "no"):
        with pytest.raises(ModelError, match="no safetensors file"):
            weight_folder(path)


def test_the_digest_names_files_and_content_and_not_the_place(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        save_parameters(model(seed), tmp_path / name)
    a, b, c = (weight_folder(tmp_path / name) for name in "abc")
    assert a.digest == b.digest != c.digest and a != b
    load_weights(model(3), dataclasses.replace(a, path=str(tmp_path / "b")))
