"""Weights that a folder brings to a model in use: named with a digest, verified, then copied in place.

A folder holds a whole model, or only the parameters that training changes (with LoRA, the adapters).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import xxhash
from peft import PeftConfig
from peft.tuners.lora.layer import ParamWrapper
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from silva import __version__
from silva.errors import CheckpointError, ModelError, shorten
from silva.models.adapters import adapted
from silva.models.loading import LoadedModel
from silva.models.stored import StoredWeights
from silva.models.weight_files import let_read, some
from silva.types import WeightFolder

BASE = "silva_base"
"""Key of the metadata of a file. One key, because several come in any order, and the file has a digest."""
UNTRAINED = "digest of what is not trained"
BLOCK = 1 << 20  # bytes
MOST_THREADS = 8


def weight_folder(path: Path) -> WeightFolder:
    """The folder as the source of a snapshot.

    Raises:
        ModelError: there is no safetensors file.
    """
    return WeightFolder(str(path), _digest(path))


def save_parameters(loaded: LoadedModel, path: Path) -> None:
    """Write the parameters that require a gradient into the new folder `path`, under their own names."""
    named = loaded.model.named_parameters()
    tensors = {name: x.detach().contiguous() for name, x in named if x.requires_grad}
    path.mkdir(parents=True)
    save_file(tensors, path / "model.safetensors", metadata={BASE: json.dumps(base_of(loaded))})
    let_read(path)


def save_adapter(loaded: LoadedModel, path: Path) -> None:
    """Write the adapters into the new folder `path`, as PEFT stores them.

    Raises:
        ModelError: some are of experts, for which others than PEFT have no name.
    """
    if any(isinstance(layer, ParamWrapper) for _, _, layer in adapted(loaded.model)):
        raise ModelError(
            f"{path}: adapters of experts cannot be loaded as such; expected engine.adapters = false, which "
            "merges them, or other model.lora.targets"
        )
    named = {
        f"base_model.model.{name.replace('.default.', '.')}": x.detach().contiguous()
        for name, x in loaded.model.named_parameters()
        if ".lora_" in name
    }
    path.mkdir(parents=True)
    save_file(named, path / "adapter_model.safetensors", metadata={"format": "pt"})
    config: PeftConfig = loaded.model.peft_config["default"]  # type: ignore[operator, index, assignment]
    config.save_pretrained(str(path))
    let_read(path)


def base_of(loaded: LoadedModel) -> Mapping[str, str]:
    """What must be equal wherever the parameters that training changes are used, by names for people."""
    if loaded.model not in _BASES:
        named = sorted(loaded.model.named_parameters())
        frozen = ((name, each.detach()) for name, each in named if not each.requires_grad)
        _BASES[loaded.model] = base_with(loaded, frozen)
    return _BASES[loaded.model]


def base_with(loaded: LoadedModel, frozen: Iterable[tuple[str, torch.Tensor]]) -> Mapping[str, str]:
    """The same of a model without numbers, with what training does not change, in the order of names."""
    architecture = {
        name: value
        for name, value in loaded.model.config.to_dict().items()
        if not name.startswith("_") and name not in ("transformers_version", "torch_dtype", "dtype")
    }
    adapters = {
        f"{name.removesuffix('.weight').rpartition('.')[2]}: rank {layer.r['default']}, scaled by "
        f"{layer.scaling['default']:g}"
        for name, _, layer in adapted(loaded.model)
    }
    digest = hashlib.sha256()
    for name, tensor in frozen:
        digest.update(name.encode())
        numbers: Any = tensor.cpu().contiguous().view(torch.uint8).numpy()
        digest.update(numbers)
    return {
        "version of Silva": __version__,
        "architecture": json.dumps(architecture, sort_keys=True, default=str),
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "adapters (model.lora)": "; ".join(sorted(adapters)) or "none",
        UNTRAINED: digest.hexdigest(),
    }


_BASES: WeakKeyDictionary[torch.nn.Module, Mapping[str, str]] = WeakKeyDictionary()


def read_weights(loaded: LoadedModel, folder: WeightFolder) -> dict[str, torch.Tensor]:
    """The folder's weights by the names of the model's parameters, mapped and verified; the model stays.

    Raises:
        ModelError: the folder has changed since its digest was made, or its weights are not this model's:
            a parameter that training changes is missing, or one has another shape.
    """
    path = Path(folder.path)
    _check_base(loaded, path)
    if (found := _digest(path)) != folder.digest:
        raise ModelError(f"{path}: the weights have the digest {found}, expected {folder.digest}")
    parameters = dict(loaded.model.named_parameters())  # each once: a tied head is the embeddings
    try:
        tensors = {name: x for file in _files(path) for name, x in load_file(file).items()}
        if not loaded.lora and parameters.keys() - tensors:  # files of transformers hold experts one by one
            tensors |= StoredWeights(str(path), {}).tensors(loaded.model)
    except (SafetensorError, CheckpointError, OSError) as error:
        raise ModelError(f"{path}: the weights cannot be read: {error}") from error
    changing = [name for name, parameter in parameters.items() if parameter.requires_grad] or [*parameters]
    wrong = [name for name in changing if name not in tensors]
    wrong += [name for name in parameters.keys() & tensors if tensors[name].shape != parameters[name].shape]
    if wrong:
        raise ModelError(
            f"{path}: {some(sorted(wrong))} missing or of another shape, expected the weights of "
            f"{loaded.name}{' with its adapters' if loaded.lora else ''}"
        )
    return {name: tensors[name] for name in parameters.keys() & tensors}


@torch.no_grad()
def take_weights(loaded: LoadedModel, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy what `read_weights` has found into the model's own storage."""
    parameters = dict(loaded.model.named_parameters())
    for name, tensor in weights.items():
        parameters[name].copy_(tensor)
    if any(not parameters[name].requires_grad for name in weights):
        _BASES.pop(loaded.model, None)


def _check_base(loaded: LoadedModel, path: Path) -> None:
    """Adapters on another base, or scaled in another way, would be another policy without any error."""
    written: dict[str, str] = {}
    for file in _files(path):  # what is damaged is read again by `read_weights`, which says so
        with suppress(SafetensorError, OSError), safe_open(file, "pt") as content:
            written |= json.loads((content.metadata() or {}).get(BASE, "{}"))
    if not written:  # a whole model that somebody else has written
        return
    for name, mine in base_of(loaded).items():
        if (theirs := written.get(name)) != mine:
            got, expected = (shorten(each or "none", 200) for each in (theirs, mine))
            raise ModelError(
                f"{path}: these are parameters of a model with another {name}: got {got}, "
                f"expected {expected}, as in this process. Give trainer and inference the same [model] "
                "and the same Silva"
            )


def _digest(path: Path) -> str:
    """Of the names of the files, and of the digests of their blocks: several threads compute these.

    It finds accidents: whoever may write there can also write the run's checkpoints.
    """
    digest, files = xxhash.xxh3_128(), _files(path)
    try:
        with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as pool:
            for file in files:
                with file.open("rb") as content:
                    blocks = range(0, os.fstat(content.fileno()).st_size, BLOCK)
                    found = b"".join(pool.map(partial(_block, content.fileno()), blocks))
                digest.update(f"{file.name} {xxhash.xxh3_128_hexdigest(found)}\n".encode())
    except OSError as error:
        raise ModelError(f"{path}: the weights cannot be read: {error}") from error
    return digest.hexdigest()


def _block(descriptor: int, begin: int) -> bytes:
    return xxhash.xxh3_128_digest(os.pread(descriptor, BLOCK, begin))


def _files(path: Path) -> list[Path]:
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{path}: no safetensors file, expected the weights of a model")
    return files
