"""Weights that a folder brings to a model in use: named with a digest, verified, copied in place.

A folder holds a whole model, or only the parameters that training changes (with LoRA, the adapters).
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from silva.errors import ModelError
from silva.models.loading import LoadedModel
from silva.models.weight_files import some
from silva.types import WeightFolder


def weight_folder(path: Path) -> WeightFolder:
    """The folder as the source of a snapshot.

    Raises:
        ModelError: there is no safetensors file.
    """
    return WeightFolder(str(path), _digest(path))


def save_parameters(loaded: LoadedModel, path: Path) -> None:
    """Write the parameters that require a gradient into the new folder `path`, under their own names."""
    tensors = {
        name: x.detach().contiguous() for name, x in loaded.model.named_parameters() if x.requires_grad
    }
    path.mkdir(parents=True)
    save_file(tensors, path / "model.safetensors")


@torch.no_grad()
def load_weights(loaded: LoadedModel, folder: WeightFolder) -> None:
    """Copy the folder's weights into the model's own storage, all or none.

    Raises:
        ModelError: the folder has changed since its digest was made, or its weights are not this model's:
            a parameter that training changes is missing, or one has another shape.
    """
    path = Path(folder.path)
    if (found := _digest(path)) != folder.digest:
        raise ModelError(f"{path}: the weights have the digest {found}, expected {folder.digest}")
    try:
        tensors = {name: x for file in _files(path) for name, x in load_file(file).items()}
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: the weights cannot be read: {error}") from error
    parameters = dict(loaded.model.named_parameters())  # each once: a tied head is the embeddings
    changing = [name for name, parameter in parameters.items() if parameter.requires_grad] or [*parameters]
    wrong = [name for name in changing if name not in tensors]
    wrong += [name for name in parameters.keys() & tensors if tensors[name].shape != parameters[name].shape]
    if wrong:
        raise ModelError(
            f"{path}: {some(sorted(wrong))} missing or of another shape, expected the weights of "
            f"{loaded.name}{' with its adapters' if loaded.lora else ''}"
        )
    for name in parameters.keys() & tensors:
        parameters[name].copy_(tensors[name])


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    for file in _files(path):
        with file.open("rb") as content:
            digest.update(f"{file.name} {hashlib.file_digest(content, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


def _files(path: Path) -> list[Path]:
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{path}: no safetensors file, expected the weights of a model")
    return files
