"""What commands share: a configuration, resolved, and with its parts in this process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from silva.config.load import Resolved, load
from silva.config.schema import RunConfig
from silva.registries import REGISTRIES


def as_resolved(config: str | Path | Mapping[str, Any] | Resolved) -> Resolved:
    if isinstance(config, Resolved):
        return config
    if isinstance(config, Mapping):
        return load([], REGISTRIES, values=config)
    return load([f"@{config}"], REGISTRIES)


def here(config: RunConfig) -> RunConfig:
    """The configuration with all parts in this process."""
    return config.model_copy(update={"placement": config.placement.local})
