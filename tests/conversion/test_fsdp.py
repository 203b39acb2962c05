"""Shards that torch.distributed wrote become the model that was sharded."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from tests.conversion.made import TEXT, folder, gap, quiet
from tests.conversion.sharded import WORLDS
from transformers import AutoModelForCausalLM, AutoTokenizer

from silva.conversion.fsdp import _mesh, sharded_model, shards_in
from silva.conversion.models import convert_model
from silva.conversion.torch_files import Called
from silva.errors import ModelError

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """source/: the model; fsdp2/, fsdp1/, hsdp/: its shards. 97 rows do not divide by the ranks."""
    path = tmp_path_factory.mktemp("shards")
    folder(path / "source", "llama", intermediate_size=97)
    command = [sys.executable, "-m", "tests.conversion.sharded", str(path / "source"), str(path)]
    subprocess.run(
        command, check=True, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True
    )
    for kind in WORLDS:
        shutil.copytree(path / "source", path / kind / "huggingface", ignore=lambda *_: ["model.safetensors"])
    return path


@pytest.mark.slow
@pytest.mark.parametrize("kind", WORLDS)
def test_shards_are_the_model_that_was_sharded(made: Path, kind: str, tmp_path: Path) -> None:
    output = convert_model(
        str(made / kind), "hf", tmp_path / "hf", None, overwrite=False, on_tensor=quiet
    ).path
    found, expected = (AutoModelForCausalLM.from_pretrained(path) for path in (output, made / "source"))
    weights, held = found.state_dict(), expected.state_dict()
    assert weights.keys() == held.keys()
    assert all(torch.equal(weights[name], held[name]) for name in held)
    tokens = AutoTokenizer.from_pretrained(output)(TEXT)["input_ids"]
    assert gap(found, expected, tokens) == 0
    assert "lm_head.weight" not in sharded_tied(output)


def sharded_tied(output: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(output / "model.safetensors", "pt") as file:
        return list(file.keys())


@pytest.mark.slow
def test_shards_with_the_names_of_earlier_versions_of_torch(made: Path, tmp_path: Path) -> None:
    """torch 2.4 kept DTensor below torch.distributed._tensor; pickles name classes in plain text."""
    shutil.copytree(made / "fsdp2", tmp_path / "old")
    for file in (tmp_path / "old").glob("*.pt"):
        renamed(file, b"torch.distributed.tensor", b"torch.distributed._tensor")
    found = sharded_model(tmp_path / "old")
    source = AutoModelForCausalLM.from_pretrained(made / "source").state_dict()
    assert all(torch.equal(found.tensors[name].read(), source[name]) for name in source)


def renamed(path: Path, old: bytes, new: bytes) -> None:
    with zipfile.ZipFile(path) as file:
        entries = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(path, "w") as file:
        for name, content in entries.items():
            file.writestr(name, content.replace(old, new) if name.endswith("data.pkl") else content)


@pytest.mark.slow
def test_what_is_missing_or_of_another_kind_is_named(made: Path, tmp_path: Path) -> None:
    def copied(kind: str) -> Path:
        return Path(shutil.copytree(made / kind, tmp_path / f"{len(list(tmp_path.iterdir()))}"))

    gone = copied("fsdp2")
    (gone / "model_world_size_2_rank_1.pt").unlink()
    with pytest.raises(ModelError, match=r"no model_world_size_2_rank_1.pt, expected ranks 0 to 1"):
        sharded_model(gone)
    alone = copied("fsdp2")
    shutil.rmtree(alone / "huggingface")
    with pytest.raises(ModelError, match=r"no huggingface/config.json beside the shards; copy config.json"):
        sharded_model(alone)
    mixed = copied("fsdp2")
    shutil.copy(made / "hsdp" / "model_world_size_4_rank_0.pt", mixed)
    with pytest.raises(ModelError, match=r"world sizes \[2, 4\], expected those of one run"):
        sharded_model(mixed)
    twice = copied("fsdp2")
    shutil.copy(twice / "model_world_size_2_rank_0.pt", twice / "model_world_size_2_rank_1.pt")
    with pytest.raises(ModelError, match=r"rank_1.pt: .* rank 0 of its mesh, expected rank 1"):
        sharded_model(twice)
    short = copied("fsdp2")
    for file in short.glob("*_rank_1.pt"):  # 49 + 48 rows of 97
        renamed(file, b"K0K@\x86", b"K/K@\x86")
    with pytest.raises(
        ModelError, match=r"gate_proj.weight: .* \[49, 64\], \[47, 64\] .* expected together \[97, 64\]"
    ):
        sharded_model(short)
    strided = copied("hsdp")
    for file in strided.glob("*.pt"):
        renamed(file, b"placement_types\nShard\n", b"placement_types\nPartial\n")
    with pytest.raises(
        ModelError, match=r"placed as Replicate, Partial\(0\) on a mesh \(ddp, fsdp\), expected"
    ):
        sharded_model(strided)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:invalid escape sequence:DeprecationWarning")
def test_a_damaged_program_is_an_error_in_words_or_reads_on(made: Path, tmp_path: Path) -> None:
    """Each byte of the program of one rank by another one, at 400 places."""
    shutil.copytree(made / "fsdp2", tmp_path / "broken")
    file = tmp_path / "broken" / "model_world_size_2_rank_0.pt"
    with zipfile.ZipFile(file) as whole:
        entries = {name: whole.read(name) for name in whole.namelist()}
    (name,) = (name for name in entries if name.endswith("data.pkl"))
    random, refused = Random(0), 0
    for _ in range(400):
        program = bytearray(entries[name])
        program[random.randrange(len(program))] = random.choice(b"\x00(.0Rbcst}]KX\xff\x85\x93h")
        with zipfile.ZipFile(file, "w") as out:
            for each, content in (entries | {name: bytes(program)}).items():
                out.writestr(each, content)
        try:
            for lazy in sharded_model(file.parent).tensors.values():
                lazy.read()
        except ModelError:
            refused += 1
    assert refused > 200


def test_plain_tensors_are_taken_from_one_rank(tmp_path: Path) -> None:
    source = folder(tmp_path / "run" / "actor" / "huggingface", "llama")
    state = AutoModelForCausalLM.from_pretrained(source).state_dict()
    torch.save(state, source.parent / "model_world_size_1_rank_0.pt")
    assert shards_in(tmp_path / "run") == source.parent
    model = sharded_model(source.parent)
    assert model.name == "run"
    assert all(torch.equal(model.tensors[name].read(), state[name]) for name in state)
    torch.save(state | {"score.weight": torch.zeros(1, 64)}, source.parent / "model_world_size_1_rank_0.pt")
    with pytest.raises(ModelError, match=r"score.weight, which is not part of the model in config.json"):
        convert_model(str(source.parent), "hf", tmp_path / "hf", None, overwrite=False, on_tensor=quiet)
    assert not (tmp_path / "hf").exists()


def test_three_forms_of_a_mesh(tmp_path: Path) -> None:
    """torch 2.4 pickled the ranks, 2.9 a layout of sizes and strides, 2.13 axes; by hand for 2 x 2 ranks."""
    ranks = torch.tensor([[0, 1], [2, 3]])
    made = Called("torch._utils._rebuild_tensor_v2", ())

    class File:
        def tensor(self, called: Any) -> torch.Tensor:
            return ranks if called is made else ranks.reshape(-1)

    names = ("ddp", "fsdp")
    flat = Called("torch._utils._rebuild_tensor_v2", ())
    layout = Called("_MeshLayout", (), {"shape": (2, 2), "stride": (2, 1)})
    axes = tuple(Called("_FlatLayout", (), {"shape": (2,), "stride": (step,)}) for step in (2, 1))
    forms: list[dict[str, Any]] = [
        {"mesh_dim_names": names, "mesh": made},
        {"_mesh_dim_names": names, "_layout": layout, "_rank_map": flat},
        {"_mesh_dim_names": names, "_layout": Called("_MeshLayout", (), {"axes": axes}), "_rank_map": flat},
    ]
    for form in forms:
        found, mesh = _mesh(File(), form)  # type: ignore[arg-type]
        assert found == names and torch.equal(mesh, ranks)
