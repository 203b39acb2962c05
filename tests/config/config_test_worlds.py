"""Small settings the configuration tests close their unions over."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from silva.config.sections import EpisodeLimits, Positive, Sampling, Section
from silva.environments.settings import EnvironmentSettings


class Toy(EnvironmentSettings):
    """A board."""

    type: Literal["toy"] = "toy"
    size: Positive = 4
    """Side of the board."""


class Grid(EnvironmentSettings):
    type: Literal["grid"] = "grid"
    slippery: bool = False
    shape: tuple[int, int] = (4, 4)
    prices: dict[str, float] = Field(default={})


class Linear(Section):
    type: Literal["linear"] = "linear"
    group_size: Positive = 8
    sampling: Sampling = Sampling()
    limits: EpisodeLimits = EpisodeLimits()


class Branching(Section):
    type: Literal["branching"] = "branching"
    group_size: Positive = 8
    width: Positive = 2


class Reinforce(Section):
    type: Literal["reinforce"] = "reinforce"
    baseline: Literal["mean", "none"] = "mean"
    entropy: float | Literal["auto"] = 0.0


class Grpo(Section):
    type: Literal["grpo"] = "grpo"
    clip: Annotated[float, Field(gt=0)] = 0.2
    kl: float | None = 0.1
    label: str | None = "plain"


class Local(Section):
    type: Literal["local"] = "local"
    max_concurrent: Positive = 64
