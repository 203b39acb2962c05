"""`silva convert` of models: what stands for a model, into a folder or a file that other tools read.

RUN, RUN@best, RUN@step_N, hub id, folder, GGUF file ──┐            ┌──> Hugging Face folder (folders.py)
verl's shards (fsdp.py) ──────────────────────────────> Model ──────┤
                                                                    └──> GGUF file (gguf_files.py)
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from transformers.utils import logging as transformers_logging

from silva.conversion.folders import write_folder
from silva.conversion.fsdp import sharded_model, shards_in
from silva.conversion.gguf_files import FORMATS, write_gguf
from silva.conversion.tensors import DTYPES, Model, OnTensor, model_in, most_common, without_tied
from silva.errors import ConfigError, ModelError
from silva.models.loading import resolve
from silva.storage.placed import placed, refuse_existing

TARGETS = ("hf", "gguf")


class Converted(NamedTuple):
    path: Path
    tensors: int
    bytes: int
    notes: list[str]


def convert_model(
    source: str, to: str, output: Path | None, form: str | None, *, overwrite: bool, on_tensor: OnTensor
) -> Converted:
    """Write the model that `source` names in the format `to`, whole or not at all.

    Args:
        to: one of `TARGETS`.
        output: None: in the working folder, by the name of the source.
        form: one of `FORMATS`; None keeps that of most weights.

    Raises:
        ConfigError: a form that the format does not have.
        ModelError: there is no such model, it is damaged, or the format cannot hold it.
        RunFolderError: something is at `output` already.
    """
    forms = FORMATS if to == "gguf" else tuple(DTYPES)
    if form is not None and form not in forms:
        raise ConfigError(f"--dtype: got {form!r}, expected one of {', '.join(forms)} for --to {to}")
    transformers_logging.disable_progress_bar()
    if output is not None:
        refuse_existing(output, overwrite)  # before a minute of reading
    model = without_tied(model_of(source))
    words = {dtype: word for word, dtype in DTYPES.items()}
    if to == "hf":
        path = output or Path(f"{model.name}-hf")
        with placed(path, overwrite=overwrite) as temporary:
            write_folder(model, temporary, DTYPES[form] if form else None, on_tensor)
        size = sum(file.stat().st_size for file in path.iterdir())
        return Converted(path, len(model.tensors), size, [])
    form = form or words.get(most_common(model.tensors), "f32")
    path = output or Path(f"{model.name}-{form}.gguf")
    if path.suffix != ".gguf":
        path /= f"{model.name}-{form}.gguf"
    with placed(path, overwrite=overwrite) as temporary:
        notes = write_gguf(model, temporary, form, on_tensor)
    return Converted(path, len(model.tensors), path.stat().st_size, notes)


def model_of(source: str) -> Model:
    """Its config, its tokenizer, and its weights as they are needed.

    Raises:
        ModelError: there is no such model, or it is damaged.
    """
    path = Path(source).expanduser()
    if folder := shards_in(path):
        return sharded_model(folder)
    folder = _local(resolve(source))
    name = path.stem if path.suffix == ".gguf" else path.name
    return model_in(folder, name)


def _local(name: str) -> Path:
    """The folder itself, or a hub's model in the cache."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    from silva.models import hub

    hub.options(name, None)
    try:
        return Path(
            snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"])
        )
    except Exception as error:  # offline, gated: as many types as there are causes
        raise ModelError(f"{name}: the hub gave no model ({type(error).__name__}: {error})") from error
