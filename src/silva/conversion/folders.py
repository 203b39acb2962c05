"""A model as a plain Hugging Face folder: config, tokenizer and safetensors of at most 5 GB."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from silva.conversion.tensors import Model, OnDone, cast, most_common
from silva.errors import ModelError
from silva.models.weight_files import INDEX, MOST, differences, file_names, grouped, let_read, write_index

_BESIDE = ("*.json", "*.jinja", "*.txt", "*.model", "LICENSE*", "NOTICE*", "additional_chat_templates")
_NOT = (INDEX, "adapter_config.json")


def write_folder(model: Model, path: Path, dtype: torch.dtype | None, on_tensor: OnDone) -> None:
    """Write the new folder `path`; one file of weights is in memory at a time.

    Args:
        dtype: None keeps each tensor's own.

    Raises:
        ModelError: the weights are not those that config.json describes, or a number has no place in `dtype`.
    """
    path.mkdir()
    for pattern in _BESIDE:
        for file in model.folder.glob(pattern):
            if file.is_dir():
                shutil.copytree(file, path / file.name)
            elif file.name not in _NOT:
                shutil.copyfile(file, path / file.name)
    _write_config(path / "config.json", dtype or most_common(model.tensors))
    every = [(name, dtype or tensor.dtype, tensor) for name, tensor in model.tensors.items()]
    runs = grouped([torch.Size(tensor.shape).numel() * kind.itemsize for _, kind, tensor in every], MOST)
    written, total, done = dict[str, list[str]](), 0, 0
    for filename, run in zip(file_names(len(runs)), runs, strict=True):
        held = dict[str, torch.Tensor]()
        for name, kind, tensor in (every[place] for place in run):
            held[name] = cast(name, tensor.read(), kind).contiguous()
            done += 1
            on_tensor(done, len(every))
        save_file(held, path / filename, metadata={"format": "pt"})
        written[filename] = [*held]
        total += sum(each.nbytes for each in held.values())
    write_index(path, written, total)
    let_read(path)
    check_folder(path)


def check_folder(path: Path) -> None:
    """Raises ModelError if transformers would not load every weight of the folder, and no other one."""
    from transformers import AutoModelForCausalLM

    from silva.models.loading import no_warnings

    with no_warnings():
        _, report = AutoModelForCausalLM.from_pretrained(
            path, dtype="auto", device_map="meta", output_loading_info=True, ignore_mismatched_sizes=True,
            trust_remote_code=False, use_safetensors=True,
        )  # fmt: skip
    if wrong := differences(report) or ", ".join(sorted(report["unexpected_keys"])[:3]):
        raise ModelError(f"{path}: {wrong}, which is not part of the model in config.json")


def _write_config(path: Path, dtype: torch.dtype) -> None:
    config = json.loads(path.read_bytes())
    key = "torch_dtype" if "torch_dtype" in config else "dtype"  # transformers 4 and 5
    path.write_text(json.dumps({**config, key: str(dtype).removeprefix("torch.")}, indent=2) + "\n")
