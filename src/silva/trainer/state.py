"""What of a trainer goes into a checkpoint: safetensors and JSON, no pickle.

`weights.safetensors` (trainable parameters, of narrow ones their float32 masters), `optimizer.safetensors`
(`<parameter>/exp_avg`, ...), `rng.safetensors`, `trainer.json` (counters, optimiser steps) and, if the
reference is a frozen copy of these parameters, `reference.safetensors`; the same of a critic in the folder
`critic`. Not here: atomic writing, hashes and pruning, which belong to the checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from silva.errors import CheckpointError
from silva.models.weight_files import let_read
from silva.ports import FILES
from silva.trainer.optimizer import Counters, Stepper
from silva.trainer.randomness import Randomness

MOMENTS = ("exp_avg", "exp_avg_sq")
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class TrainerState:
    """Live objects of one trainer: saving reads them, loading writes into the same storage."""

    stepper: Stepper
    randomness: Randomness
    reference: Mapping[str, torch.nn.Parameter] | None = None
    critic: TrainerState | None = None


def save_state(state: TrainerState, path: Path) -> None:
    """Write every file into the folder `path`, made if missing; gradients not stepped on are left out.

    Raises:
        CheckpointError: a file cannot be written (a full disk, for one).
    """
    path.mkdir(parents=True, exist_ok=True)
    moments: Tensors = {}
    steps: dict[str, int] = {}
    for name, master in state.stepper.masters.items():
        if of_parameter := state.stepper.optimizer.state.get(master):
            steps[name] = int(of_parameter["step"])
            moments |= {f"{name}/{moment}": of_parameter[moment] for moment in MOMENTS}
    _write(path / "weights.safetensors", state.stepper.masters)
    _write(path / "optimizer.safetensors", moments)
    _write(path / "rng.safetensors", state.randomness.states)
    if state.reference is not None:
        _write(path / "reference.safetensors", state.reference)
    let_read(path)
    text = json.dumps({**dataclasses.asdict(state.stepper.counters), "steps": steps}, indent=1)
    FILES.write(path / "trainer.json", (text + "\n").encode())
    if state.critic is not None:
        save_state(state.critic, path / "critic")


def load_state(state: TrainerState, path: Path) -> None:
    """Read what `save_state` wrote. Nothing changes unless everything fits.

    Raises:
        CheckpointError: a file is missing or unreadable, or names, shapes or types differ: says which.
    """
    ready = [_read_state(state, path)]
    ready += [_read_state(state.critic, path / "critic")] if state.critic else []
    for apply in ready:
        apply()


def _read_state(state: TrainerState, path: Path) -> Callable[[], None]:
    """What brings `state` to what `path` holds, all of it checked."""
    weights, moments, rng = (_read(path / f"{name}.safetensors") for name in ("weights", "optimizer", "rng"))
    numbers = _read_json(path / "trainer.json")
    masters, steps = state.stepper.masters, numbers["steps"]
    _compare(path / "weights.safetensors", weights, masters)
    expected = {f"{n}/{m}": master for n, master in masters.items() if n in steps for m in MOMENTS}
    _compare(path / "optimizer.safetensors", moments, expected)
    _compare(path / "rng.safetensors", rng, state.randomness.states)
    reference = {}
    if state.reference is not None:
        reference = _read(path / "reference.safetensors")
        _compare(path / "reference.safetensors", reference, state.reference)

    @torch.no_grad()
    def apply() -> None:
        for name, master in masters.items():
            master.copy_(weights[name])
        state.stepper.round()
        for name, frozen in (state.reference or {}).items():
            frozen.copy_(reference[name])
        state.stepper.begin()
        for name, step in steps.items():
            master = masters[name]
            state.stepper.optimizer.state[master] = {
                "step": torch.tensor(float(step), dtype=torch.float32, device=master.device),
                **{moment: moments[f"{name}/{moment}"].to(master.device) for moment in MOMENTS},
            }
        for field in dataclasses.fields(Counters):
            setattr(state.stepper.counters, field.name, int(numbers[field.name]))
        state.randomness.states = rng

    return apply


def _write(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    try:  # by the library, which streams: as bytes the moments of a large model would need a second copy
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be written: {error}") from error


def _read(path: Path) -> Tensors:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read as safetensors: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    wanted = {field.name for field in dataclasses.fields(Counters)} | {"steps"}
    try:
        numbers = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(numbers, dict) or set(numbers) != wanted or not isinstance(numbers["steps"], dict):
        raise CheckpointError(f"{path}: expected an object with {sorted(wanted)}, got {str(numbers)[:200]}")
    return numbers


def _compare(path: Path, got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Name what differs: at most three of each kind, since a wrong model differs everywhere."""
    faults = _list("missing", sorted(expected.keys() - got.keys()))
    faults += _list("unexpected", sorted(got.keys() - expected.keys()))
    differing = [
        f"{name}: got {_describe(got[name])}, expected {_describe(expected[name])}"
        for name in sorted(expected.keys() & got.keys())
        if _describe(got[name]) != _describe(expected[name])
    ]
    faults += _list("different", differing)
    if faults:
        raise CheckpointError(f"{path} does not belong to this model or these settings: " + "; ".join(faults))


def _list(kind: str, names: list[str]) -> list[str]:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return [f"{kind}: {', '.join(names[:3])}{more}"] if names else []


def _describe(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
