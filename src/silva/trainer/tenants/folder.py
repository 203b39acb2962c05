"""A run's folder: an adapter that PEFT loads, or a whole model, and beside it what training needs to go on.

    adapter_model.safetensors, adapter_config.json   as PEFT stores them
    model.safetensors, config.json, ...   of a run that trains all weights, as transformers stores them
    optimizer.safetensors   AdamW's moments (`<parameter>/exp_avg`, ...), gradients not yet stepped on, and
                            the masters of narrow weights
    run.json                what the run is, of which base, and the digests of the other files

No pickle. Not here: that a folder is there whole or not at all, which is the matter of who asks for it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors import SafetensorError

from silva.errors import CheckpointError
from silva.models.loading import LoadedModel
from silva.models.pieces import Pieces, write, written
from silva.models.stored import StoredWeights
from silva.models.weight_files import let_read
from silva.ports import FILES
from silva.trainer.export import export_model
from silva.trainer.optimizer import Stepper
from silva.trainer.state import MOMENTS

ADAPTER, OPTIMIZER, RUN = "adapter_model", "optimizer", "run.json"
CONFIG = "adapter_config.json"
PREFIX = "base_model.model."  # PEFT's, of the names of parameters
GRADIENT, MASTER = "gradient", "master"
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class LoraShape:
    """The rank and the layers of a run's adapters; of rank 0, a run trains all weights."""

    rank: int
    alpha: float
    attn: bool
    mlp: bool
    unembed: bool


@dataclass(frozen=True)
class TenantRun:
    """A run in memory. `whole`: its copy of the model, if it trains all weights."""

    shape: LoraShape
    stepper: Stepper
    whole: LoadedModel | None = None


def save(loaded: LoadedModel, run: TenantRun, folder: Path, base: str, *, optimizer: bool) -> None:
    """Write a run over the model `loaded` into `folder`, made if missing.

    Args:
        base: a digest of that model.

    Raises:
        CheckpointError: a file cannot be written (a full disk, for one).
    """
    folder.mkdir(parents=True, exist_ok=True)
    stepper, shape = run.stepper, run.shape
    try:
        if run.whole is None:
            _save_adapter(loaded, run, folder)
        else:
            export_model(run.whole, folder)
        others = (RUN, f"{OPTIMIZER}.safetensors")  # of what was here before
        files = sorted(file.name for file in folder.iterdir() if file.name not in others)
        if optimizer:
            write(folder, OPTIMIZER, _moments(stepper), 0)
            files.append(f"{OPTIMIZER}.safetensors")
        let_read(folder)
        digests = {name: _digest(folder / name) for name in files}
        content = {**asdict(shape), "base": base, "steps": _steps(stepper), "files": digests}
        FILES.write(folder / RUN, (json.dumps(content, indent=1) + "\n").encode())
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: cannot be written: {error}") from error


def _save_adapter(loaded: LoadedModel, run: TenantRun, folder: Path) -> None:
    parameters, shape = run.stepper.parameters, run.shape
    write(folder, ADAPTER, {f"{PREFIX}{name}": each for name, each in parameters.items()}, 0)
    layers = {name.rpartition(".lora_")[0] for name in parameters}
    config = LoraConfig(
        r=shape.rank,
        lora_alpha=shape.alpha,  # type: ignore[arg-type]
        target_modules=_shortened(loaded, layers),
        base_model_name_or_path=loaded.name,
        task_type="CAUSAL_LM",
    )
    config.inference_mode = True
    config.target_modules = _shortened(loaded, layers)  # sorted: PEFT has made it a set
    config.save_pretrained(str(folder))


def load(run: TenantRun, folder: Path, base: str, *, optimizer: bool) -> Callable[[], None]:
    """Read what `save` has written; arguments as there.

    Returns:
        What brings the run to it; all of it is checked, and nothing has changed before it is called.

    Raises:
        CheckpointError: a file is missing or damaged, or belongs to another model or another kind of run.
    """
    content, stepper = _read(folder), run.stepper
    mine = {**asdict(run.shape), "base": base}
    for name, expected in mine.items():
        if content[name] != expected:
            raise CheckpointError(f"{folder}: a run with {name} {content[name]}, expected {expected}")
    for name, digest in content["files"].items():
        if (found := _digest(folder / name)) != digest:
            raise CheckpointError(f"{folder / name}: damaged, its sha256 is {found}, expected {digest}")
    parameters = stepper.parameters
    if run.whole is None:
        adapters = {f"{PREFIX}{name}": each for name, each in parameters.items()}
        read = _tensors(written(folder, ADAPTER), adapters)
        weights = {name: read[f"{PREFIX}{name}"] for name in parameters}
    else:
        weights = StoredWeights(str(folder), {}).tensors(run.whole.model)
        for name, parameter in parameters.items():
            if name not in weights or weights[name].shape != parameter.shape:
                got = tuple(weights[name].shape) if name in weights else "nothing"
                raise CheckpointError(f"{folder}: got {got} for {name}, expected {tuple(parameter.shape)}")
    steps: Mapping[str, int] = content["steps"] if optimizer else {}
    if unknown := steps.keys() - parameters.keys():
        raise CheckpointError(f"{folder / RUN}: steps of {sorted(unknown)[0]}, which this run has not")
    saved: Tensors = {}
    masters = stepper.masters
    if optimizer:
        if f"{OPTIMIZER}.safetensors" not in content["files"]:
            raise CheckpointError(f"{folder}: saved without its optimizer, so it cannot be loaded with it")
        of_step = {f"{name}/{moment}": masters[name] for name in steps for moment in MOMENTS}
        pending = {f"{name}/{GRADIENT}": each for name, each in masters.items()}
        saved = _tensors(written(folder, OPTIMIZER), of_step | _narrow(stepper), pending)

    @torch.no_grad()
    def apply() -> None:
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
        stepper.adopt()
        for name, parameter in parameters.items():
            if (master := saved.get(f"{name}/{MASTER}")) is not None:
                stepper.masters[name].copy_(master)
            if (gradient := saved.get(f"{name}/{GRADIENT}")) is not None:
                parameter.grad = gradient
        for name, step in steps.items():
            stepper.optimizer.state[masters[name]] = {
                "step": torch.tensor(float(step), dtype=torch.float32, device=masters[name].device),
                **{moment: saved[f"{name}/{moment}"] for moment in MOMENTS},
            }

    return apply


def _steps(stepper: Stepper) -> dict[str, int]:
    """How often AdamW has changed each parameter, without those it has not; every rank knows of all."""
    states = {name: stepper.optimizer.state.get(master) for name, master in stepper.masters.items()}
    return {name: int(state["step"]) for name, state in states.items() if state}


def _moments(stepper: Stepper) -> Tensors:
    found: Tensors = _narrow(stepper)
    for name, parameter in stepper.parameters.items():
        if state := stepper.optimizer.state.get(stepper.masters[name]):
            found |= {f"{name}/{moment}": state[moment] for moment in MOMENTS}
        if parameter.grad is not None:
            found[f"{name}/{GRADIENT}"] = parameter.grad
    return found


def _narrow(stepper: Stepper) -> Tensors:
    """The masters of weights that are not their own."""
    masters = stepper.masters.items()
    return {f"{name}/{MASTER}": each for name, each in masters if each is not stepper.parameters[name]}


def _tensors(
    files: Sequence[Path],
    needed: Mapping[str, torch.Tensor],
    others: Mapping[str, torch.Tensor] | None = None,
) -> Tensors:
    """Those of the files: all that are needed, and others if they are there."""
    with Pieces(files) as pieces:
        there = pieces.describe()
        expected = {**needed, **{each: like for each, like in (others or {}).items() if each in there}}
        pieces.check(expected)
        return {each: pieces.like(each, like) for each, like in expected.items()}


def _shortened(loaded: LoadedModel, layers: set[str]) -> list[str]:
    """The layers by the last parts of their names, if no other layer has the same."""
    short = {layer.rpartition(".")[2] for layer in layers}
    meant = {name for name, _ in loaded.model.named_modules() if name.rpartition(".")[2] in short}
    return sorted(short if meant == layers else layers)


def _digest(file: Path) -> str:
    try:
        with file.open("rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from error


def _read(folder: Path) -> dict[str, Any]:
    file, wanted = folder / RUN, {*LoraShape.__annotations__, "base", "steps", "files"}
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}; expected a folder of a run") from error
    kinds = {"steps": dict, "files": dict}
    whole = isinstance(content, dict) and content.keys() == wanted
    if not whole or not all(isinstance(content[name], kind) for name, kind in kinds.items()):
        raise CheckpointError(f"{file}: got {str(content)[:200]}, expected {', '.join(sorted(wanted))}")
    return content
