"""The whole configuration of a run: static sections plus unions on `type`, closed over registries.

`RunConfig` is what the rest of Silva reads. `run_config` makes the strict subclass that checks a file:
its unions hold the variants that the registries list.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from operator import or_
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, create_model, field_validator

from silva.config import field_types
from silva.config.sections import (
    Checkpoint,
    Eval,
    Foretold,
    Model,
    Natural,
    Positive,
    PretrainedModel,
    Rendering,
    Section,
    Synth,
    WarmStart,
)

MAX_ENVIRONMENTS = 1000
NAME_BYTES = 200  # of a run's name; file systems take 255


UNIONS = {
    "environments": "environments",
    "rollout": "rollouts",
    "algorithm": "algorithms",
    "engine": "engines",
    "trainer": "trainers",
    "placement": "placements",
}
"""The keys that are unions on `type`, each with the table of `Registries` that lists its variants."""
OUTSIDE = {*UNIONS, "data", "monitoring"}
"""The keys whose sections are declared elsewhere, and typed `Any` in `RunConfig`."""
USUAL = ("linear", "grpo", "local")


@dataclass(frozen=True)
class Registries:
    """What may stand under `type`: name -> "module:Settings". The default is the usual name (rollout
    linear, algorithm grpo, the others local), or the first of a table that does not list it."""

    environments: Mapping[str, str]
    rollouts: Mapping[str, str]
    algorithms: Mapping[str, str]
    engines: Mapping[str, str]
    trainers: Mapping[str, str]
    placements: Mapping[str, str]
    environment_base: str = "silva.environments.settings:EnvironmentSettings"
    rollout_base: str = "silva.rollouts.settings:RolloutSettings"
    algorithm_base: str = "silva.algorithms.settings:Algorithm"
    algorithm_parts: str = "silva.algorithms.own"
    """Module with `TABLES`, `adopt` and `widened`: parts of an algorithm that a configuration names."""
    data: str = "silva.data.settings:SupervisedData"
    monitoring: str = "silva.monitoring.settings:Monitoring"

    def only(self, names: Collection[str]) -> Registries:
        """Those of these names, and the defaults: a run imports no other world, engine or strategy."""
        kept: dict[str, Any] = {}
        for key, table in ((table, getattr(self, table)) for table in UNIONS.values()):
            usual = "" if key == "environments" else default_name(table)
            kept[key] = {name: target for name, target in table.items() if name in names or name == usual}
        return replace(self, **kept)


def default_name(table: Mapping[str, Any]) -> str:
    return [*filter(table.__contains__, USUAL), *table][0]


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
    """What is trained."""
    data: Any = None
    """Dialogues that `silva sft` learns from; null: it learns from scripted play (`warm_start`)."""
    environments: tuple[Any, ...] = Field(default=(), max_length=MAX_ENVIRONMENTS, validate_default=True)
    """Environments to learn and to be evaluated in; `type` may also be "file.py:Class" or "module:Class"."""
    rollout: Any = None
    """How one task becomes groups of episodes."""
    rendering: Rendering = Rendering()
    """How messages become tokens."""
    algorithm: Any = None
    """Advantages and loss."""
    engine: Any = None
    """What samples."""
    trainer: Any = None
    """Optimizer, updates and memory."""
    warm_start: WarmStart | None = None
    """Supervised steps before RL; null goes without."""
    eval: Eval = Eval()
    """Evaluation on held-out tasks."""
    synth: Synth | None = None
    """What `silva synth` plays, and which of its episodes become rows; null: the defaults."""
    checkpoint: Checkpoint = Checkpoint()
    """When to save, and how much to keep."""
    monitoring: Any = None
    """Terminal, files, report."""
    placement: Any = None
    """Device and threads."""
    plan: Foretold | None = None
    """What a probe has foretold of a step; null: nothing."""

    @property
    def replays_routing(self) -> bool:
        """Whether the engine has to record which experts tokens go to."""
        return bool(getattr(self.trainer, "replay_routing", False))

    @property
    def ranks(self) -> int:
        """Processes of the trainer; a trainer from outside may know none."""
        return int(getattr(self.trainer, "ranks", 1))

    @property
    def workers(self) -> int:
        """Processes that play episodes."""
        return sum(environment.workers for environment in self.environments)

    @field_validator("name")
    @classmethod
    def _names_a_folder(cls, name: str) -> str:
        """A name is one folder in `output_dir`: `--overwrite` removes it, and must remove no other."""
        if not name.strip():
            raise ValueError("expected a name that is not blank")
        if name in (".", "..") or "/" in name or "\\" in name:
            raise ValueError("expected the name of one folder, without / or \\; output_dir says where it is")
        if not name.isprintable():
            raise ValueError("expected printable characters, without line breaks or control characters")
        if len(name.encode()) > NAME_BYTES:
            raise ValueError(f"expected at most {NAME_BYTES} bytes, got {len(name.encode())}")
        return name

    @field_validator("output_dir")
    @classmethod
    def _expands_home(cls, folder: str) -> str:
        if not folder or "\0" in folder:
            raise ValueError('expected a folder; "." is the working folder')
        try:
            return str(Path(folder).expanduser()) if folder.startswith("~") else folder
        except RuntimeError as error:  # ~nobody
            raise ValueError(f"expected a folder: {error}") from error

    @field_validator("environments")
    @classmethod
    def _labels_differ(cls, environments: tuple[Any, ...], info: ValidationInfo) -> tuple[Any, ...]:
        if not environments and info.data.get("data", ...) is None:  # absent: it has a problem of its own
            raise ValueError(
                "expected at least one [[environments]] table with a type (or [data], for `silva sft`)"
            )
        seen: dict[str, int] = {}
        for index, environment in enumerate(environments):
            first = seen.setdefault(environment.label, index)
            if first != index:
                raise ValueError(
                    f"environments {first} and {index} are both called {environment.label!r}; "
                    "give one a `name`"
                )
        return environments


Own = Mapping[str, Mapping[str, type[Section]]]
"""Classes from files and packages: by key of `UNIONS` and name."""


def run_config(
    registries: Registries, own: Own | None = None, widen: Callable[[Any], Any] | None = None
) -> type[RunConfig]:
    """The strict model for these registries.

    Args:
        widen: what makes recipes take the user's own losses and the like.
    """
    tables = {key: tuple(getattr(registries, table).items()) for key, table in UNIONS.items()}
    tables |= {key: (("", getattr(registries, key)),) for key in ("data", "monitoring")}
    if widen is not None:  # what it does depends on what has been adopted so far
        return _closed.__wrapped__(tuple(tables.items()), _frozen(own or {}), widen)
    return _closed(tuple(tables.items()), _frozen(own or {}))


def _frozen(own: Own) -> tuple[tuple[str, tuple[tuple[str, type[Section]], ...]], ...]:
    return tuple((key, tuple(classes.items())) for key, classes in own.items())


@functools.lru_cache(maxsize=32)
def _closed(
    tables: tuple[tuple[str, tuple[tuple[str, str], ...]], ...],
    own: tuple[tuple[str, tuple[tuple[str, type[Section]], ...]], ...],
    widen: Callable[[Any], Any] | None = None,
) -> type[RunConfig]:
    changes: dict[str, Any] = {}
    for key, table in tables:
        about = RunConfig.model_fields[key].description
        if key == "data":
            settings = import_settings(dict(table)[""])
            changes[key] = (settings | None, Field(default=None, description=about))
            continue
        if key == "monitoring":
            settings = import_settings(dict(table)[""])
            changes[key] = (settings, Field(default=settings(), description=about))
            continue
        variants = {name: tagged(import_settings(target), name) for name, target in table}
        variants |= {name: tagged(settings, name) for name, settings in dict(own).get(key, ())}
        if key == "algorithm" and widen is not None:
            variants = {name: widen(recipe) for name, recipe in variants.items()}
        if key == "environments":
            field = Field(default=(), max_length=MAX_ENVIRONMENTS, validate_default=True, description=about)
            changes[key] = (tuple[_union(variants), ...], field)  # type: ignore[misc]
        else:
            usual = variants[default_name(variants)]()
            changes[key] = (_union(variants), Field(default=usual, description=about))
    return create_model("RunConfig", __base__=RunConfig, __module__=__name__, **changes)


def union(table: Mapping[str, str]) -> Any:
    """The type of a key inside a section that is a union on `type` over a registry."""
    return _union({name: tagged(import_settings(target), name) for name, target in table.items()})


def import_settings(target: str) -> Any:
    """The object "module:Name" names."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def tagged(settings: type[Section], name: str) -> type[Section]:
    """The settings with `type: Literal[name]`: the class itself, or a subclass for one that has it open
    or is called differently (a file's class is named by its path)."""
    field = settings.model_fields.get("type")
    if field is not None and name in field_types.literals(field.annotation):
        return settings
    changes: dict[str, Any] = {"type": (Literal[name], name)}
    label = settings.model_fields.get("name")
    if ":" in name and label is not None and label.default == "":  # a path is no name for a metric
        said = field_types.tag(settings) or name.rpartition(":")[2]
        changes["name"] = (str, Field(default=said, description=label.description))
    return create_model(settings.__name__, __base__=settings, __module__=settings.__module__, **changes)


def _union(variants: Mapping[str, type[Section]]) -> Any:
    if len(variants) < 2:  # pydantic wants at least two for a discriminator
        return next(iter(variants.values()), Section)
    return Annotated[functools.reduce(or_, variants.values()), Field(discriminator="type")]
