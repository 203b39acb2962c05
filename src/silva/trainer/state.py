"""What of a trainer goes into a checkpoint: safetensors and JSON, no pickle.

`weights.safetensors` (trainable parameters, of narrow ones their float32 masters), `optimizer.safetensors`
(`<parameter>/exp_avg`, ...), `rng.safetensors`, `trainer.json` (counters, optimiser steps) and, if the
reference is a frozen copy of these parameters, `reference.safetensors`; the same of a critic in the folder
`critic`. Of several ranks each writes its parts (models/pieces.py) and its random numbers. Not here: atomic
writing, hashes and pruning, which belong to the checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from silva.errors import CheckpointError
from silva.models.pieces import Pieces, write, written
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
    steps: Mapping[str, int] = field(init=False)  # of the parameters of all ranks, as `names`
    names: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:  # other ranks are asked before one of them can fail alone
        object.__setattr__(self, "steps", self.stepper.steps())
        object.__setattr__(self, "names", self.stepper.names())


def save_state(state: TrainerState, path: Path, rank: int = 0) -> None:
    """Write the files of a rank into the folder `path`, made if missing.

    Gradients that were not stepped on are left out.

    Raises:
        CheckpointError: a file cannot be written (a full disk, for one).
    """
    path.mkdir(parents=True, exist_ok=True)
    moments: Tensors = {}
    for name, master in state.stepper.masters.items():
        if of_parameter := state.stepper.optimizer.state.get(master):
            moments |= {f"{name}/{moment}": of_parameter[moment] for moment in MOMENTS}
    write(path, "weights", state.stepper.masters, rank)
    write(path, "optimizer", moments, rank)
    write(path, _rng(rank), state.randomness.states, 0)
    if state.reference is not None:
        write(path, "reference", state.reference, rank)
    let_read(path)
    if rank == 0:
        text = json.dumps({**dataclasses.asdict(state.stepper.counters), "steps": state.steps}, indent=1)
        FILES.write(path / "trainer.json", (text + "\n").encode())
    if state.critic is not None:
        save_state(state.critic, path / "critic", rank)


def load_state(state: TrainerState, path: Path, rank: int = 0) -> Callable[[], None]:
    """Read what `save_state` has written, on as many ranks as there were or others.

    Args:
        rank: whose random numbers this one goes on with, if so many wrote: of ranks that must draw the same
            the first, as each of those that wrote may have drawn others.

    Returns:
        What brings `state` to it; all of it is checked, and nothing has changed before it is called.

    Raises:
        CheckpointError: a file is missing or unreadable, or names, shapes or types differ: says which.
    """
    steps = [_read_state(state, path, rank)]
    steps += [_read_state(state.critic, path / "critic", rank)] if state.critic else []

    def apply() -> None:
        for step in steps:
            step()

    return apply


def _rng(rank: int) -> str:
    return f"rng_{rank}" if rank else "rng"


def _read_state(state: TrainerState, path: Path, rank: int) -> Callable[[], None]:
    """What brings `state` to what `path` holds, all of it checked."""
    numbers = _read_json(path / "trainer.json")
    masters, steps = state.stepper.masters, numbers["steps"]
    others = set(state.names) - masters.keys()
    weights = _read(path, "weights", masters, others)
    expected = {f"{n}/{m}": master for n, master in masters.items() if n in steps for m in MOMENTS}
    moments = _read(path, "optimizer", expected, [f"{name}/{m}" for name in others for m in MOMENTS])
    rng: Tensors | None = None
    if rank == 0 or (path / f"{_rng(rank)}.safetensors").exists():  # else it was written by fewer ranks
        rng = _read(path, _rng(rank), state.randomness.states)
    reference = {} if state.reference is None else _read(path, "reference", state.reference, others)

    @torch.no_grad()
    def apply() -> None:
        for name, master in masters.items():
            master.copy_(weights[name])
        state.stepper.round()
        for name, frozen in (state.reference or {}).items():
            frozen.copy_(reference[name])
        state.stepper.begin()
        for name in (each for each in masters if each in steps):
            master, step = masters[name], steps[name]
            state.stepper.optimizer.state[master] = {
                "step": torch.tensor(float(step), dtype=torch.float32, device=master.device),
                **{moment: moments[f"{name}/{moment}"] for moment in MOMENTS},
            }
        for counter in dataclasses.fields(Counters):
            setattr(state.stepper.counters, counter.name, int(numbers[counter.name]))
        if rng is not None:
            state.randomness.states = rng

    return apply


def _read(
    path: Path, name: str, expected: Mapping[str, torch.Tensor], others: Collection[str] = ()
) -> Tensors:
    """`others`: what else may be there, as other ranks expect it."""
    with Pieces(written(path, name)) as pieces:
        pieces.check(expected, others)
        return {each: pieces.like(each, tensor) for each, tensor in expected.items()}


def _read_json(path: Path) -> dict[str, Any]:
    wanted = {field.name for field in dataclasses.fields(Counters)} | {"steps"}
    try:
        numbers = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(numbers, dict) or set(numbers) != wanted or not isinstance(numbers["steps"], dict):
        raise CheckpointError(f"{path}: expected an object with {sorted(wanted)}, got {str(numbers)[:200]}")
    return numbers
