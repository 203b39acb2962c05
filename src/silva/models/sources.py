"""What a name of a model stands for if it is no plain one: a run, one of its steps, an adapter of PEFT.

    runs/lake            its newest weights
    runs/lake@best       those of its best evaluation
    runs/lake@step_200   those of a step
    adapters/poet        a folder with adapter_config.json and adapter_model.safetensors

A run exports plain folders (weights/step_N) when it ends. Its checkpoints hold what was trained, so the model
of one is that of the run's config.toml with the checkpoint's parameters laid over it. Not here: how either is
loaded (loading.py, overlays.py).
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from silva.errors import ModelError
from silva.storage.checkpoints import MANIFEST, CheckpointStore
from silva.storage.layout import Layout, steps_in

if TYPE_CHECKING:
    from silva.config.sections import PretrainedModel, TinyModel

ADAPTER = "adapter_config.json"


@dataclass(frozen=True)
class RunCheckpoint:
    """A run's model at a step: `model` built with `seed`, and the parameters in `folder` over it."""

    folder: Path
    model: PretrainedModel | TinyModel
    seed: int


@dataclass(frozen=True)
class Adapter:
    """LoRA in PEFT's format, over the model called `base`."""

    folder: Path
    base: str


def find(name: str) -> str | RunCheckpoint | Adapter:
    """What to load for `model.name`: its plain folder if it is a run that has exported these weights, a
    checkpoint or an adapter, otherwise the name itself.

    Raises:
        ModelError: the run has no such weights (it says which it has), or a file about them is damaged.
    """
    path = Path(name).expanduser()
    run, at = run_of(name)
    if run is not None:
        step = _step(run, name, at)
        exported = exports(run).get(step)
        return str(exported) if exported else _checkpoint(run, step, name)
    if (path / ADAPTER).is_file() and not (path / "config.json").is_file():
        return Adapter(path, _base_of(path, name))
    return name


def weight_files(name: str) -> list[Path]:
    """The files that decide a model's weights; none of a model of the hub, or that is in a package."""
    found = find(name)
    if isinstance(found, RunCheckpoint):
        return [found.folder / MANIFEST, *weight_files(getattr(found.model, "name", ""))]
    if isinstance(found, Adapter):
        return [*sorted(found.folder.glob("adapter_*")), *weight_files(found.base)]
    path = Path(found).expanduser()
    return sorted(path.glob("*.safetensors")) if path.is_dir() else [path] if path.is_file() else []


def checkpoint(name: str) -> RunCheckpoint:
    """The checkpoint that a name is about, also if the run has exported these weights: it has adapters apart.

    Raises:
        ModelError: the name is about no run, or the run has no such checkpoint any more.
    """
    run, at = run_of(name)
    if run is None:
        raise ModelError(f"{name}: got no run's folder, expected one, or RUN@best or RUN@step_N")
    step, store = _step(run, name, at), CheckpointStore(Layout(run).checkpoints, read_only=True)
    if not (store.path(step) / MANIFEST).is_file():
        raise ModelError(f"{name}: no checkpoint of step_{step} is left; there are {_listed(store.steps())}")
    return _checkpoint(run, step, name)


def pinned(name: str) -> str:
    """The name with the step that it means now: a run that goes on has other newest weights later."""
    run, at = run_of(name)
    return name if run is None else f"{run}@step_{_step(run, name, at)}"


def series(folder: str, steps: list[int] | None = None) -> dict[int, str]:
    """Names of models by step: of a run's folder, or of one that holds folders step_N.

    Args:
        steps: only these.

    Raises:
        ModelError: there are none, or not all of them.
    """
    path = Path(folder).expanduser()
    run = path.parent if path.name in ("weights", "checkpoints") and is_run(path.parent) else path
    if is_run(run):
        found = {step: f"{run}@step_{step}" for step in _steps(run)}
    else:
        found = {step: str(each) for step, each in steps_in(path).items()}
    if not found:
        raise ModelError(f"{folder}: no weights there; expected a run's folder, or one with folders step_N")
    if missing := sorted({*(steps or ())} - found.keys()):
        shown = ", ".join(f"step_{step}" for step in missing)
        raise ModelError(f"{folder}: no {shown}; it has {_listed(found)}")
    return found if steps is None else {step: found[step] for step in sorted(steps)}


def is_run(folder: Path) -> bool:
    layout = Layout(folder)
    return any(path.exists() for path in (layout.ledger, layout.checkpoints)) or bool(exports(folder))


def exports(run: Path) -> dict[int, Path]:
    """The plain folders of a run's weights by step, the first step first."""
    found = steps_in(Layout(run).weights).items()
    return {step: path for step, path in found if (path / "config.json").is_file()}


def run_of(name: str) -> tuple[Path | None, str]:
    """The run that a name is about, and what follows its "@"; (None, "") if it is about none."""
    path = Path(name).expanduser()
    if path.parent.name == "checkpoints" and (path / MANIFEST).is_file():
        return path.parent.parent, path.name
    if is_run(path):
        return path, ""
    front, sign, at = name.rpartition("@")
    run = Path(front).expanduser()
    if sign and not path.exists() and run.is_dir():
        if not is_run(run):
            raise ModelError(f"{name}: {front} is no run's folder, so nothing can follow it after @")
        return run, at
    return None, ""


def _step(run: Path, name: str, at: str) -> int:
    steps, best = _steps(run), CheckpointStore(Layout(run).checkpoints, read_only=True).best()
    if not steps:
        raise ModelError(f"{run}: this run has no weights and no checkpoint yet; --resume it")
    if not at:
        return steps[-1]
    if at == "best" and best:
        return best[0]
    named = {f"step_{step}": step for step in steps}
    if at not in named:
        marked = f"best is step_{best[0]}" if best else "none is marked best"
        raise ModelError(f"{name}: {run} has {_listed(steps)}; {marked}")
    return named[at]


def _steps(run: Path) -> list[int]:
    store = CheckpointStore(Layout(run).checkpoints, read_only=True)
    return sorted({*exports(run), *(s for s in store.steps() if (store.path(s) / MANIFEST).is_file())})


def _listed(steps: list[int] | dict[int, str]) -> str:
    return ", ".join(f"step_{step}" for step in steps)


def _checkpoint(run: Path, step: int, name: str) -> RunCheckpoint:
    from pydantic import TypeAdapter, ValidationError

    from silva.config.sections import Model

    file = Layout(run).config_toml
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
        text = json.dumps({"type": "pretrained", **values.get("model", {})})
        model: PretrainedModel | TinyModel = TypeAdapter(Model).validate_json(text)
        seed = int(values.get("seed", 0))
    except (OSError, ValueError, TypeError, ValidationError) as error:
        raise ModelError(
            f"{name}: the model of a checkpoint is that of {file}, which cannot be read: {error}"
        ) from error
    return RunCheckpoint(CheckpointStore(Layout(run).checkpoints, read_only=True).path(step), model, seed)


def _base_of(folder: Path, name: str) -> str:
    file = folder / ADAPTER
    try:
        settings = json.loads(file.read_bytes())
        kind, base = settings["peft_type"], settings["base_model_name_or_path"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ModelError(f"{file}: no description of an adapter of PEFT ({error!r})") from error
    if kind != "LORA" or not isinstance(base, str) or not base:
        raise ModelError(
            f"{file}: got peft_type {kind!r} and base_model_name_or_path {base!r}; expected LORA, and the "
            "name of the model that it belongs to"
        )
    if not (folder / "adapter_model.safetensors").is_file():
        raise ModelError(f"{name}: no adapter_model.safetensors beside {ADAPTER}; other formats are pickle")
    return base
