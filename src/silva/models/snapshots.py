"""Weights that a folder brings to a model in use: named with a digest, verified, copied in place."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from silva.errors import ModelError
from silva.models.loading import LoadedModel
from silva.models.weight_files import some
from silva.types import WeightFolder


def weight_folder(path: Path) -> WeightFolder:
    """A plain Hugging Face folder as the source of a snapshot.

    Raises:
        ModelError: there is no safetensors file.
    """
    return WeightFolder(str(path), _digest(path))


@torch.no_grad()
def load_weights(loaded: LoadedModel, folder: WeightFolder) -> None:
    """Copy the folder's weights into the model's own storage, all or none.

    Raises:
        ModelError: the folder has changed since its digest was made, or its weights are not this model's.
    """
    path = Path(folder.path)
    if (found := _digest(path)) != folder.digest:
        raise ModelError(f"{path}: the weights have the digest {found}, expected {folder.digest}")
    try:
        tensors = {name: x for file in _files(path) for name, x in load_file(file).items()}
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: the weights cannot be read: {error}") from error
    parameters = dict(loaded.model.named_parameters())  # each once: a tied head is the embeddings
    wrong = [
        name
        for name, parameter in parameters.items()
        if name not in tensors or tensors[name].shape != parameter.shape
    ]
    if wrong:
        raise ModelError(
            f"{path}: {some(wrong)} missing or of another shape, expected the weights of {loaded.name} "
            "without adapters"
        )
    for name, parameter in parameters.items():
        parameter.copy_(tensors[name])


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
