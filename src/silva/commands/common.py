"""What commands share: a configuration, resolved, and with its parts in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from silva.config.load import Resolved, load
from silva.config.schema import RunConfig
from silva.errors import ConfigError
from silva.registries import REGISTRIES
from silva.storage.layout import Layout


def as_resolved(config: str | Path | Mapping[str, Any] | Resolved) -> Resolved:
    if isinstance(config, Resolved):
        return config
    if isinstance(config, Mapping):
        return load([], REGISTRIES, values=config)
    return load([f"@{config}"], REGISTRIES)


def here(config: RunConfig) -> RunConfig:
    """The configuration with all parts in this process."""
    return config.model_copy(update={"placement": config.placement.local})


def existing(flag: str, weights: str) -> str:
    """The weights that a flag names. Raises ConfigError if nothing lies at their path."""
    from silva.models.sources import run_of

    if run_of(weights)[0] is None and not Path(weights).expanduser().exists():
        raise ConfigError(
            f"{flag} {weights}: no such file or folder; expected a run's folder or a model folder"
        )
    return weights


def run_config(weights: str, rest: Sequence[str]) -> list[str]:
    """The file of the run that has these weights, as "@FILE", unless the command line names another file."""
    from silva.models.sources import run_of

    folder = Path(weights).expanduser()
    run = run_of(weights)[0] or (folder.parent if folder.name in ("weights", "checkpoints") else folder)
    saved, named = Layout(run).config_toml, any(argument.startswith("@") for argument in rest)
    return [f"@{saved}"] if saved.is_file() and not named else []
