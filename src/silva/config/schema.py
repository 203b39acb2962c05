"""The whole configuration of a run: static sections plus unions on `type`, closed over registries.

`RunConfig` is what the rest of Silva reads. `run_config` makes the strict subclass that checks a file:
its environments, rollout, algorithm and engine are the variants the registries list.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from operator import or_
from typing import Annotated, Any, Literal

from pydantic import Field, create_model, field_validator

from silva.config import shape
from silva.config.sections import (
    Checkpoint,
    Eval,
    Model,
    Monitoring,
    Natural,
    Placement,
    Positive,
    PretrainedModel,
    Rendering,
    Section,
    Trainer,
    WarmStart,
)


@dataclass(frozen=True)
class Registries:
    """What may stand under `type`: name -> "module:Settings". The first entry is the default, unless
    the usual one (rollout linear, algorithm grpo, engine local) is listed."""

    environments: Mapping[str, str]
    rollouts: Mapping[str, str]
    algorithms: Mapping[str, str]
    engines: Mapping[str, str]
    environment_base: str = "silva.environments.settings:EnvironmentSettings"


class RunConfig(Section):
    """Everything one run depends on. Parts typed `Any` here are unions over the registries."""

    name: str = "run"
    """Names the run's folder: output_dir/name."""
    seed: Natural = 0
    """Of everything random in the run."""
    output_dir: str = "runs"
    """Folder that holds the runs."""
    steps: Positive = 100
    """Training steps: one batch of rollouts each."""
    model: Model = PretrainedModel()
    environments: tuple[Any, ...] = Field(min_length=1)
    """Worlds to learn in, at least one; `type` may also be "file.py:Class" or "module:Class"."""
    rollout: Any = None
    """How one task becomes groups of episodes."""
    rendering: Rendering = Rendering()
    algorithm: Any = None
    """Advantages and loss."""
    engine: Any = None
    """What samples."""
    trainer: Trainer = Trainer()
    warm_start: WarmStart | None = None
    """Supervised steps before RL; null goes without."""
    eval: Eval = Eval()
    checkpoint: Checkpoint = Checkpoint()
    monitoring: Monitoring = Monitoring()
    placement: Placement = Placement()

    @field_validator("environments")
    @classmethod
    def _labels_differ(cls, environments: tuple[Any, ...]) -> tuple[Any, ...]:
        seen: dict[str, int] = {}
        for index, environment in enumerate(environments):
            first = seen.setdefault(environment.label, index)
            if first != index:
                raise ValueError(
                    f"environments {first} and {index} are both called {environment.label!r}; "
                    "give one a `name`"
                )
        return environments


def run_config(
    registries: Registries, own_environments: Mapping[str, type[Section]] | None = None
) -> type[RunConfig]:
    """The strict model for these registries; `own_environments` adds classes from files and packages."""
    tables = (registries.environments, registries.rollouts, registries.algorithms, registries.engines)
    return _closed(*(tuple(table.items()) for table in tables), tuple((own_environments or {}).items()))


Items = tuple[tuple[str, str], ...]


@functools.lru_cache(maxsize=32)
def _closed(
    environments: Items,
    rollouts: Items,
    algorithms: Items,
    engines: Items,
    own: tuple[tuple[str, type[Section]], ...],
) -> type[RunConfig]:
    worlds = {**_settings(environments), **{name: _tagged(cls, name) for name, cls in own}}
    changes: dict[str, Any] = {
        "environments": (
            tuple[_union(worlds), ...],  # type: ignore[misc]
            Field(min_length=1, description=RunConfig.model_fields["environments"].description),
        )
    }
    for name, items, usual in (
        ("rollout", rollouts, "linear"),
        ("algorithm", algorithms, "grpo"),
        ("engine", engines, "local"),
    ):
        variants = _settings(items)
        default = variants[usual] if usual in variants else next(iter(variants.values()))
        description = RunConfig.model_fields[name].description
        changes[name] = (_union(variants), Field(default=default(), description=description))
    return create_model("RunConfig", __base__=RunConfig, __module__=__name__, **changes)


def import_settings(target: str) -> Any:
    """The object "module:Name" names."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def _settings(items: Items) -> dict[str, type[Section]]:
    return {name: _tagged(import_settings(target), name) for name, target in items}


def _tagged(settings: type[Section], name: str) -> type[Section]:
    """The settings with `type: Literal[name]`: the class itself, or a subclass for one that has it open
    or is called differently (a file's class is named by its path)."""
    field = settings.model_fields.get("type")
    if field is not None and name in shape.literals(field.annotation):
        return settings
    changes: dict[str, Any] = {"type": (Literal[name], name)}
    if ":" in name and settings.model_fields["name"].default == "":  # a path is no name for a metric
        label = shape.tag(settings) or name.rpartition(":")[2]
        description = settings.model_fields["name"].description
        changes["name"] = (str, Field(default=label, description=description))
    return create_model(settings.__name__, __base__=settings, __module__=settings.__module__, **changes)


def _union(variants: Mapping[str, type[Section]]) -> Any:
    if len(variants) == 1:  # pydantic wants at least two for a discriminator
        return next(iter(variants.values()))
    return Annotated[functools.reduce(or_, variants.values()), Field(discriminator="type")]
