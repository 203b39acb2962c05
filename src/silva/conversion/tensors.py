"""The weights of a model by name, each read from its file when it is needed: no format needs all at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from silva.errors import ModelError

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
"""The types that `--dtype` names."""
_STORED = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

OnDone = Callable[[int, int], None]
"""Takes how many tensors or rows are done, and how many there are (0: it is not known)."""


class LazyTensor(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]


class Model(NamedTuple):
    """`folder` holds config.json and the tokenizer, `tensors` the weights by the names of transformers."""

    name: str
    folder: Path
    tensors: Mapping[str, LazyTensor]


def model_in(folder: Path) -> Model:
    """A plain Hugging Face folder.

    Raises:
        ModelError: there are no safetensors files, or one is missing or cannot be read.
    """
    found = dict[str, LazyTensor]()
    files = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = sorted({folder / file for file in json.loads(index.read_bytes())["weight_map"].values()})
    if not files:
        raise ModelError(f"{folder}: got no *.safetensors, expected a Hugging Face folder of a model")
    for file in files:
        try:
            with safe_open(file, "pt") as content:
                for key in content.keys():  # noqa: SIM118
                    of = content.get_slice(key)
                    found[key] = _lazy(file, key, tuple(of.get_shape()), of.get_dtype())
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file}: cannot be read as safetensors: {error}") from error
    return Model(folder.name, folder, found)


def without_tied(model: Model) -> Model:
    """The model without its head if that equals the embeddings and config.json ties them; FSDP has both."""
    head, embeddings = (model.tensors.get(name) for name in ("lm_head.weight", "model.embed_tokens.weight"))
    tied = json.loads((model.folder / "config.json").read_bytes()).get("tie_word_embeddings")
    if not tied or head is None or embeddings is None or not torch.equal(head.read(), embeddings.read()):
        return model
    return model._replace(
        tensors={name: each for name, each in model.tensors.items() if name != "lm_head.weight"}
    )


def cast(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor in another dtype.

    Raises:
        ModelError: a finite number would become infinite.
    """
    made = tensor.to(dtype)
    if dtype == torch.float16 and tensor.dtype != dtype and not bool(made.isfinite().all()):
        largest = float(tensor[tensor.isfinite()].abs().max())
        raise ModelError(
            f"{name}: got numbers up to {largest:.3g}, and f16 ends at 65504; take --dtype bf16 or f32"
        )
    return made


def most_common(tensors: Mapping[str, LazyTensor]) -> torch.dtype:
    """The dtype of most numbers."""
    counts = dict[torch.dtype, int]()
    for each in tensors.values():
        counts[each.dtype] = counts.get(each.dtype, 0) + torch.Size(each.shape).numel()
    return max(counts, key=lambda dtype: counts[dtype])


def _lazy(file: Path, key: str, shape: tuple[int, ...], stored: str) -> LazyTensor:
    if stored not in _STORED:
        raise ModelError(
            f"{file}: {key} is stored as {stored}, expected {', '.join(_STORED)}: a quantised model "
            "cannot be converted; take the one that it was made from"
        )

    def read() -> torch.Tensor:
        with safe_open(file, "pt") as content:
            tensor: torch.Tensor = content.get_tensor(key)
            return tensor

    return LazyTensor(shape, _STORED[stored], read)
