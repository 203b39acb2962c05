"""What is said between a trainer in another process and its users: records, as bytes of wire/codec.py.

    POST /open                        Open -> Opened      builds a trainer; whoever had one before has lost it
    POST /sessions/SESSION/METHOD     Call -> Reply       METHOD of protocols.Trainer

A session ends with the next `open`. So a process that was thought dead, and wakes up, changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from silva.types import LossSpec, OptimParams, Sample, Signals, Snapshot

METHODS = (
    "score", "forward_backward", "optim_step", "publish", "snapshot", "refresh_reference", "restart", "save",
    "load", "export",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Open:
    """Attributes:
    config: the run's configuration as plain data; its environments are not needed and left out.
    recipe: whether what the algorithm needs beside the policy, a reference or a critic, is made too.
    folder: of the run; the trainer reads and writes nowhere else.
    publishes: what the engine can load, of TrainerCapabilities.publishes.
    """

    config: Mapping[str, Any]
    recipe: bool
    folder: str
    publishes: Literal["folder", "parameters"]


@dataclass(frozen=True, slots=True)
class Opened:
    session: str
    needs: tuple[str, ...]
    publishes: Literal["folder", "parameters"]
    version: int
    said: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of any method; those that it does not have keep their defaults."""

    samples: tuple[Sample, ...] = ()
    needs: tuple[str, ...] = ()
    loss: LossSpec | None = None
    policy: OptimParams | None = None
    critic: OptimParams | None = None
    path: str = ""


@dataclass(frozen=True, slots=True)
class Reply:
    """The result of any method. `said`: what people should know, since the last reply."""

    version: int
    said: tuple[str, ...] = ()
    numbers: Mapping[str, float] | None = None
    signals: Signals | None = None
    snapshot: Snapshot | None = None
