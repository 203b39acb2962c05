"""`silva convert` of models: what stands for a model, into a folder or a file that other tools read.

RUN, RUN@best, RUN@step_N, hub id, folder, GGUF file ──┐            ┌──> Hugging Face folder (folders.py)
verl's shards (fsdp.py) ──────────────────────────────> Model ──────┤
                                                                    └──> GGUF file (gguf_files.py)
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from transformers.utils import logging as transformers_logging

from silva.config.sections import PretrainedModel
from silva.conversion.adapters import write_adapter
from silva.conversion.folders import write_folder
from silva.conversion.fsdp import sharded_model, shards_in
from silva.conversion.gguf_files import FORMATS, write_gguf
from silva.conversion.tensors import DTYPES, Model, OnDone, model_in, most_common, without_tied
from silva.errors import ConfigError, ModelError
from silva.models.loading import load_model, resolve
from silva.models.sources import RunCheckpoint, checkpoint, find, run_of
from silva.storage.placed import placed, refuse_existing, refuse_lossy, writing
from silva.trainer.export import export_model


class Converted(NamedTuple):
    path: Path
    tensors: int
    notes: list[str]

    def __str__(self) -> str:
        files = self.path.rglob("*") if self.path.is_dir() else [self.path]
        size = sum(file.stat().st_size for file in files if file.is_file())
        return f"{self.tensors} tensors, {size / 1e6:,.1f} MB"


def convert_model(
    source: str, to: str, output: Path | None, form: str | None, *, overwrite: bool, on_tensor: OnDone
) -> Converted:
    """Write the model that `source` names in the format `to`, whole or not at all.

    Args:
        to: "hf", "peft" or "gguf".
        output: None: in the working folder, by the name of the source. For gguf a file, or a folder for it.
        form: one of `FORMATS`; None keeps that of most weights.

    Raises:
        ConfigError: a form that the format does not have.
        ModelError: there is no such model, it is damaged, or the format cannot hold it.
        RunFolderError: something is at `output` already, or it cannot be written.
    """
    forms = {"hf": tuple(DTYPES), "peft": (), "gguf": FORMATS}[to]
    if form is not None and form not in forms:
        raise ConfigError(f"--dtype: got {form!r}, expected {', '.join(forms) or 'none'} for --to {to}")
    transformers_logging.disable_progress_bar()
    name = name_of(source)
    if to == "gguf" and output is not None and output.suffix != ".gguf":
        output /= f"{name}-{form}.gguf" if form else f"{name}.gguf"
    path = output or Path(f"{name}.gguf" if to == "gguf" else f"{name}-{to}")
    refuse_existing(path, overwrite)  # before a minute of reading
    refuse_lossy(
        path, run_of(source)[0] or Path(source).expanduser(), "" if to == "gguf" else "*.safetensors"
    )
    with writing(path):
        return _written(source, name, to, path, form, overwrite, on_tensor)


def _written(
    source: str, name: str, to: str, path: Path, form: str | None, overwrite: bool, on_tensor: OnDone
) -> Converted:
    with placed(path, overwrite=overwrite) as temporary:
        if to == "peft":
            return Converted(path, *write_adapter(checkpoint(source), temporary))
        model = without_tied(model_of(source, temporary.with_name(".merged")))._replace(name=name)
        notes = list[str]()
        if to == "hf":
            write_folder(model, temporary, DTYPES[form] if form else None, on_tensor)
        else:
            words = {dtype: word for word, dtype in DTYPES.items()}
            form = form or words.get(most_common(model.tensors), "f32")
            notes = write_gguf(model, temporary, form, on_tensor)
    return Converted(path, len(model.tensors), notes)


def name_of(source: str) -> str:
    """What the output is called after: the model, or the run and its step."""
    run, at = run_of(source)
    if run is not None:
        return "-".join(filter(None, (run.resolve().name, at)))
    path = Path(source).expanduser()
    path = path.parent if shards_in(path) == path and path.name == "actor" else path
    return path.stem if path.suffix == ".gguf" else path.resolve().name


def model_of(source: str, scratch: Path) -> Model:
    """Its config, its tokenizer, and its weights as they are needed.

    Args:
        scratch: a new folder for the merged model, if something lies over a plain one.

    Raises:
        ModelError: there is no such model, or it is damaged.
    """
    if folder := shards_in(Path(source).expanduser()):
        return sharded_model(folder)
    found = find(source)
    if isinstance(found, str):
        return model_in(_local(resolve(found)))
    narrow = isinstance(found, RunCheckpoint) and found.model.dtype == "bfloat16"
    settings = PretrainedModel(name=source, dtype="bfloat16" if narrow else "float32")
    export_model(load_model(settings, seed=0), scratch)
    return model_in(scratch)


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
