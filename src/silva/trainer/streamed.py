"""The files of a divided model, of which each rank writes some: none of them ever has all of the weights.

    a layer, or what is beside them ──Mesh.bring──> the rank that writes it, in the order of the model
                                    ──merged────> plain weights, in the names of the family's files
    a file of some of these         ──────────> the disk, by all ranks at once; then the index, by the first

A rank holds its parts of the model, one file, and one layer beside it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from accelerate import init_empty_weights
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from silva.errors import CheckpointError
from silva.models.adapters import merged
from silva.models.division import WHOLE
from silva.models.loading import LoadedModel
from silva.models.snapshots import BASE, base_with
from silva.models.stored import place
from silva.models.weight_files import MOST, file_names, grouped, let_read, write_index
from silva.trainer.sharding.parallel import Mesh

LEAST = 1 << 26
"""Bytes of a file, however many ranks could write at once."""


class Share(NamedTuple):
    """What is written together.

    `size`: bytes, about. `bring`: gives it to one rank, and nothing to the others; every rank calls it.
    """

    size: int
    bring: Callable[[int], Mapping[str, torch.Tensor]]


def changing(loaded: LoadedModel, mesh: Mesh) -> LoadedModel | None:
    """The undivided model with the parameters that training changes, on the first rank alone."""
    hollow = mesh.outline(loaded)
    for name, parameter in [*hollow.named_parameters()]:
        found = mesh.bring(loaded, name, 0) if parameter.requires_grad else None
        if found is not None:
            place(hollow, name, nn.Parameter(found))
    return replace(loaded, model=hollow, division=WHOLE) if mesh.rank == 0 else None


def base(loaded: LoadedModel, mesh: Mesh) -> dict[str, str]:
    """Metadata for the files of these parameters, on the first rank: of several files one needs it."""
    found = base_of_divided(loaded, mesh)
    return {BASE: json.dumps(found)} if found else {}


def base_of_divided(loaded: LoadedModel, mesh: Mesh) -> Mapping[str, str]:
    """As `snapshots.base_of` of the undivided model, on the first rank alone; every rank calls it."""
    if loaded.model not in _BASES:
        hollow = mesh.outline(loaded)
        names = sorted(name for name, p in hollow.named_parameters() if not p.requires_grad)
        brought = ((name, mesh.bring(loaded, name, 0)) for name in names)
        found = base_with(replace(loaded, model=hollow), ((n, x) for n, x in brought if x is not None))
        _BASES[loaded.model] = found if mesh.rank == 0 else {}
    return _BASES[loaded.model]


_BASES: WeakKeyDictionary[nn.Module, Mapping[str, str]] = WeakKeyDictionary()


def parameters(loaded: LoadedModel, mesh: Mesh) -> list[Share]:
    """The parameters that require a gradient, under their own names."""

    def share(name: str, like: nn.Parameter) -> Share:
        def bring(to: int) -> Mapping[str, torch.Tensor]:
            found = mesh.bring(loaded, name, to)
            return {} if found is None else {name: found}

        return Share(like.nbytes, bring)

    named = mesh.outline(loaded).named_parameters()
    return [share(name, like) for name, like in named if like.requires_grad]


def plain_weights(loaded: LoadedModel, mesh: Mesh) -> list[Share]:
    """What a plain Hugging Face folder holds, adapters merged."""
    hollow = mesh.outline(loaded)
    plain, names = plain_outline(loaded, type(hollow)), {name for name, _ in hollow.named_parameters()}

    def share(at: str, module: nn.Module) -> Share:
        mine = {
            name: p for name, p in module.named_parameters(prefix=at) if name in names
        }  # of tied ones the first

        @torch.no_grad()
        def bring(to: int) -> Mapping[str, torch.Tensor]:
            for name in mine:
                if (found := mesh.bring(loaded, name, to)) is not None:
                    place(hollow, name, nn.Parameter(found, requires_grad=False))
            if mesh.rank != to:
                return {}
            weights = {name: tensor for name, tensor in merged(module, at).items() if not tensor.is_meta}
            for name, parameter in mine.items():
                place(hollow, name, parameter)
            return revert_weight_conversion(plain, weights)  # type: ignore[no-any-return]

        return Share(sum(p.nbytes for name, p in mine.items() if ".lora_" not in name), bring)

    return [share(at, module) for at, module in _modules(hollow)]


def plain_outline(loaded: LoadedModel, kind: type[PreTrainedModel]) -> PreTrainedModel:
    """What transformers makes of the model's configuration, without numbers. `kind`: as it was undivided."""
    config = copy.deepcopy(loaded.model.config)
    config.dtype = loaded.dtype
    with init_empty_weights():
        plain: PreTrainedModel = kind(config)
    for parameter in plain.parameters():
        parameter.data = parameter.data.to(loaded.dtype)
    plain.generation_config = copy.deepcopy(loaded.model.generation_config)
    return plain


def _modules(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """Parts of a model that hold all of it: a layer whole, and beside them what has parameters or buffers."""
    layers = {*model.get_decoder().layers}

    def within(at: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        own = any(True for _ in (*module.parameters(recurse=False), *module.buffers(recurse=False)))
        if own or module in layers or isinstance(module, LoraLayer):
            yield at, module
            return
        for name, child in module.named_children():
            yield from within(f"{at}.{name}" if at else name, child)

    return within("", model)


def write(path: Path, shares: Sequence[Share], mesh: Mesh, metadata: Mapping[str, str]) -> None:
    """Write safetensors into the folder `path`, made if missing, with an index if there are several.

    Raises:
        CheckpointError: a file cannot be written (a full disk, for one); on every rank.
    """
    with mesh.agreed():
        if mesh.rank == 0:
            path.mkdir(parents=True, exist_ok=True)
    most = min(MOST, max(LEAST, -(-sum(each.size for each in shares) // mesh.size)))
    runs = grouped([each.size for each in shares], most)
    files, written = file_names(len(runs)), list[tuple[str, tuple[str, ...], int]]()
    for start in range(0, len(runs), mesh.size):
        mine = dict[str, torch.Tensor]()
        for to, run in enumerate(runs[start : start + mesh.size]):
            for place_ in run:
                mine |= shares[place_].bring(to)
        with mesh.agreed():
            if mine:
                file = files[start + mesh.rank]
                written.append((file, tuple(mine), sum(each.nbytes for each in mine.values())))
                _save(path / file, mine, metadata)
    every = [each for of_rank in mesh.gather(tuple(written), tuple[tuple[str, tuple[str, ...], int], ...])
             for each in of_rank]  # fmt: skip
    with mesh.agreed():
        if mesh.rank == 0:
            write_index(
                path, {file: names for file, names, _ in sorted(every)}, sum(size for *_, size in every)
            )
            let_read(path)


def _save(file: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    try:
        save_file({name: each.contiguous() for name, each in tensors.items()}, file, metadata=dict(metadata))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file}: cannot be written: {error}") from error
