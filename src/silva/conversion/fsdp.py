"""verl's checkpoints of FSDP: `model_world_size_W_rank_R.pt`, one file a rank, into whole tensors.

    actor/model_world_size_4_rank_0.pt ... rank_3.pt     a state dict each: names -> DTensors (or tensors)
    actor/huggingface/                                   config.json and the tokenizer
    mesh (fsdp)        a tensor is the shards of all ranks, one after another along its sharded dimension
    mesh (ddp, fsdp)   the rows of the mesh are copies of each other: the first is read

Facts: the model merger of verl. Tensor parallel shards and adapters are refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from silva.conversion.tensors import LazyTensor, Model
from silva.conversion.torch_files import SUBCLASS, WRAPPER, Called, TorchFile, ints
from silva.errors import ModelError, shorten

_FILE = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
_MESHES = (("fsdp",), ("dp",), ("ddp", "fsdp"), ("dp", "fsdp"))


class RankPart(NamedTuple):
    """A rank's part of a tensor. `row`: ranks that hold all of it together; `dim`: where they are joined,
    None if each has all; `shape`: of the whole tensor, None if the file does not say."""

    file: TorchFile
    local: Any
    row: tuple[int, ...]
    dim: int | None
    shape: tuple[int, ...] | None


def shards_in(source: Path) -> Path | None:
    """The folder of shards that is meant: `source`, or `actor` in it; None if there are none."""
    for folder in (source, source / "actor"):
        if folder.is_dir() and any(_FILE.fullmatch(file.name) for file in folder.iterdir()):
            return folder
    return None


def sharded_model(folder: Path) -> Model:
    """The model whose shards are in `folder`; nothing of the tensors is read yet.

    Raises:
        ModelError: a file is missing, damaged or holds anything but tensors; the mesh is of another kind;
            shards do not make the whole tensor; or there is no config.json.
    """
    files = _files(folder)
    beside = next(
        (each for each in (folder / "huggingface", folder) if (each / "config.json").is_file()), None
    )
    if beside is None:
        raise ModelError(
            f"{folder}: got no huggingface/config.json beside the shards; copy config.json and the tokenizer "
            f"of the model that was trained into {folder / 'huggingface'}"
        )
    opened = {0: TorchFile(files[0])}
    found = dict[str, LazyTensor]()
    for name, value in opened[0].content.items():
        first = _piece(opened[0], name, value, 0, len(files))
        for rank in first.row:
            if rank not in opened:
                opened[rank] = TorchFile(files[rank])
        pieces = [
            _piece(opened[rank], name, opened[rank].content.get(name), rank, len(files)) for rank in first.row
        ]
        found[name] = _joined(folder, name, pieces)
    names = {str(name): file for file in opened.values() for name in file.content}
    if more := names.keys() - found.keys():
        name = min(more)
        raise ModelError(f"{names[name].path}: holds {name}, which {files[0].name} does not")
    if adapters := [name for name in found if ".lora_" in name or ".base_layer." in name]:
        raise ModelError(
            f"{folder}: holds adapters ({adapters[0]}), expected whole weights; verl writes them as a PEFT "
            "folder beside the shards (lora_adapter), which can be converted"
        )
    name = next((part.name for part in (folder, *folder.parents) if part.name != "actor"), "model")
    return Model(name, beside, found)


def _files(folder: Path) -> list[Path]:
    found = dict[int, Path]()
    sizes = set[int]()
    for file in folder.iterdir():
        if match := _FILE.fullmatch(file.name):
            sizes.add(int(match[1]))
            found[int(match[2])] = file
    if len(sizes) != 1:
        raise ModelError(f"{folder}: got shards of world sizes {sorted(sizes)}, expected those of one run")
    (size,) = sizes
    if missing := sorted(set(range(size)) - found.keys()):
        raise ModelError(
            f"{folder}: no model_world_size_{size}_rank_{missing[0]}.pt, expected ranks 0 to {size - 1}"
        )
    return [found[rank] for rank in range(size)]


def _joined(folder: Path, name: str, pieces: Sequence[RankPart]) -> LazyTensor:
    """Checked here, joined when it is read."""
    locals = [piece.file.tensor(piece.local) for piece in pieces]  # views: no bytes are read
    dtype, shape = locals[0].dtype, list(locals[0].shape)
    dim = pieces[0].dim
    fits = dim is None or (isinstance(dim, int) and all(0 <= dim < local.dim() for local in locals))
    if dim is not None and fits:
        shape[dim] = sum(local.shape[dim] for local in locals)
    alike = fits and all(
        (piece.dim, piece.shape, piece.row, local.dtype) == (dim, pieces[0].shape, pieces[0].row, dtype)
        and local.dim() == len(shape)
        and all(i == dim or local.shape[i] == shape[i] for i in range(len(shape)))
        for piece, local in zip(pieces, locals, strict=True)
    )
    whole = pieces[0].shape
    if not alike or (whole is not None and tuple(shape) != whole):
        got = ", ".join(str(list(local.shape)) for local in locals)
        raise ModelError(
            f"{folder}: {name}: the shards of ranks {list(pieces[0].row)} are {got} along dimension {dim}, "
            f"expected together {list(whole or shape)}"
        )
    read = partial(torch.cat, locals, dim=dim) if dim is not None else partial(torch.clone, locals[0])
    return LazyTensor(tuple(shape), dtype, read)


def _piece(file: TorchFile, name: Any, value: Any, rank: int, size: int) -> RankPart:
    if not isinstance(name, str) or value is None:
        raise ModelError(f"{file.path}: no {name!r}, which another rank has")
    if not isinstance(value, Called) or value.name != SUBCLASS:
        return RankPart(file, value, (0,), None, None)
    try:
        rebuilt, _, arguments, state = value.arguments
        if rebuilt.name != WRAPPER:  # a tensor with attributes
            return RankPart(file, Called(rebuilt.name, arguments), (0,), None, None)
        local, spec = (_fields(state)[key] for key in ("_local_tensor", "_spec"))
        spec = _fields(spec.state)
        about = _fields(spec["mesh"].state)
        names, mesh = _mesh(file, about)
        own = int(mesh[tuple(about["_coordinate_on_dim"])]) if about.get("_coordinate_on_dim") else rank
        kinds = [
            (each.name.rpartition(".")[2], _fields(each.state).get("dim")) for each in spec["placements"]
        ]
        shape = ints(spec["tensor_meta"].arguments[0]) if spec.get("tensor_meta") else None
    except (KeyError, AttributeError, TypeError, ValueError, IndexError, RuntimeError) as error:
        raise ModelError(
            f"{file.path}: {name}: a DTensor of an unknown form ({type(error).__name__}: {error})"
        ) from error
    row = tuple(mesh.reshape(-1, mesh.shape[-1])[0].tolist())
    copies = all(kind == "Replicate" for kind, _ in kinds[:-1])
    if (
        names not in _MESHES
        or len(kinds) != len(names)
        or not copies
        or kinds[-1][0] not in ("Shard", "Replicate")
    ):
        placed = shorten(", ".join(f"{kind}({dim})" if dim is not None else kind for kind, dim in kinds), 100)
        raise ModelError(
            f"{file.path}: {name}: placed as {placed} on a mesh ({', '.join(names)}), expected shards on "
            "(fsdp) or (ddp, fsdp); tensor parallel checkpoints are merged by verl.model_merger"
        )
    if sorted(mesh.reshape(-1).tolist()) != list(range(size)):
        raise ModelError(
            f"{file.path}: {name}: a mesh of {mesh.tolist()}, expected the ranks 0 to {size - 1}"
        )
    if own != rank:
        raise ModelError(f"{file.path}: written by rank {own} of its mesh, expected rank {rank}")
    kind, dim = kinds[-1]
    return RankPart(file, local, row if kind == "Shard" else row[:1], dim if kind == "Shard" else None, shape)


def _mesh(file: TorchFile, state: Mapping[str, Any]) -> tuple[tuple[str, ...], torch.Tensor]:
    """Names of its dimensions, and the ranks in it; DeviceMesh has had three forms."""
    names = tuple(state.get("_mesh_dim_names") or state["mesh_dim_names"])
    if state.get("mesh") is not None:
        return names, file.tensor(state["mesh"]).clone()
    layout = _fields(state["_layout"].state)
    if "axes" in layout:
        parts = [_fields(axis.state) for axis in layout["axes"]]
        axes = [(ints(part["shape"]), ints(part["stride"])) for part in parts]  # () of a dimension of size 1
    else:
        axes = [((size,), (stride,)) for size, stride in zip(layout["shape"], layout["stride"], strict=True)]
    places = torch.zeros((), dtype=torch.int64)
    for sizes, strides in axes:
        along = torch.zeros(1, dtype=torch.int64)
        for size, stride in zip(sizes, strides, strict=True):
            along = (along[:, None] + torch.arange(size) * stride).reshape(-1)
        places = places.unsqueeze(-1) + along
    return names, file.tensor(state["_rank_map"]).to(torch.int64)[places]


def _fields(state: Any) -> dict[str, Any]:
    """The attributes in an object's state, which is a dict or, with slots, a pair of dicts."""
    parts = state if isinstance(state, tuple) else (state,)
    return {key: value for part in parts if part for key, value in part.items()}
