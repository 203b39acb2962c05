"""Many runs of many clients, trained on one base model: what they are given and what they give back.

learner.py   the runs: gradients of several in one pass, steps, folders
full.py      a run that trains all weights
parts.py     what of a pass goes through the model at once
folder.py    a run on disk, as PEFT or transformers reads it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Datum:
    """A sequence of n tokens, and the token that the model is to predict after each of them."""

    tokens: np.ndarray  # [n] int64: what the model reads
    targets: np.ndarray  # [n] or [n, k] int64: of place i, after the tokens up to i
    inputs: Mapping[str, np.ndarray]  # of the loss (algorithms/summed.py), each shaped as the targets


@dataclass(frozen=True)
class Pass:
    """A run's data and a loss over them, which is a sum."""

    run: str
    data: Sequence[Datum]
    loss: str
    params: Mapping[str, float]
    backward: bool  # whether its gradient is added to the run's


@dataclass(frozen=True)
class Passed:
    """What a pass has found."""

    logprobs: Sequence[np.ndarray]  # of each datum, as its targets: float32, float64 of a float64 model
    metrics: Mapping[str, float]  # "name:reduction"


@dataclass(frozen=True)
class AdamParams:
    """One step of AdamW, as the Tinker service has it."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0  # 0: no limit
