"""What commands share: a configuration, resolved, and with its parts in this process; and how they serve."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any

from silva import signals
from silva.config.load import Resolved, load
from silva.config.schema import RunConfig
from silva.errors import ConfigError
from silva.monitoring.printable import put
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


def served(app: Any, bind: Any, what: str, beside: AbstractAsyncContextManager[None] = nullcontext()) -> int:
    """Ctrl-C, SIGTERM and a closed terminal are how a server ends. It does not wait for what computes in a
    thread, such as an update, and cannot be cut short: nobody gets its result any more.

    Args:
        beside: is entered while it serves.
    """
    from silva.wire.listening import serve

    async def work() -> None:
        async with beside:
            await serve(app, bind, ready=lambda address: say(f"{what}: listening at {address}"))

    async def run() -> None:
        serving = asyncio.ensure_future(work())
        for number in signals.stop_signals():
            asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
        try:
            await serving
        except asyncio.CancelledError:
            say(f"{what}: stopped")
            os._exit(0)

    asyncio.run(run())
    return 0


def say(text: str) -> None:
    put(text, error=True)
