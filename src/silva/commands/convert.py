"""`silva convert`: models and data into the formats of other tools."""

from __future__ import annotations

import sys
from pathlib import Path

from silva.commands.command import Given
from silva.errors import ConfigError
from silva.monitoring.printable import put
from silva.ports import CLOCK

MODELS = ("hf", "peft", "gguf")
EVERY = 5.0  # seconds between two lines of progress, where there is no terminal


def run(given: Given) -> int:
    given.only(1, "one source")
    source = given.first("source; expected a run, a model, verl's shards or a file of rows")
    to = given.options.get("--to")
    if to not in MODELS:
        raise ConfigError(f"--to: got {to or 'nothing'}, expected one of {', '.join(MODELS)}")
    output = Path(given.options["--output"]).expanduser() if "--output" in given else None
    return _model(given, source, to, output)


def _model(given: Given, source: str, to: str, output: Path | None) -> int:
    from silva.conversion.models import convert_model
    from silva.conversion.push import push

    with Progress() as progress:
        made = convert_model(
            source,
            to,
            output,
            given.options.get("--dtype"),
            overwrite="--overwrite" in given,
            on_tensor=progress,
        )
    put(f"{made.path}: {made.tensors} tensors, {made.bytes / 1e6:,.1f} MB")
    for note in made.notes:
        put(note)
    if repo := given.options.get("--push"):
        put(f"pushed to {push(made.path, repo)}")
    return 0


class Progress:
    """One line that is written over on a terminal; elsewhere a line from time to time."""

    def __init__(self) -> None:
        self._last, self._live = CLOCK.monotonic(), sys.stderr.isatty()

    def __enter__(self) -> Progress:
        return self

    def __call__(self, done: int, total: int) -> None:
        now = CLOCK.monotonic()
        if now - self._last < (0.1 if self._live else EVERY):
            return
        self._last = now
        print(f"{done} of {total} tensors", end="\r" if self._live else "\n", file=sys.stderr, flush=True)

    def __exit__(self, *_: object) -> None:
        if self._live:
            print(end="\033[K", file=sys.stderr, flush=True)
