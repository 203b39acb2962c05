"""`silva convert`: models and data into the formats of other tools."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from silva.commands.command import Given
from silva.errors import ConfigError
from silva.monitoring.printable import put
from silva.ports import CLOCK

MODELS = ("hf", "peft", "gguf")
DATA = ("messages", "trl", "sharegpt", "arpo", "verl")
EVERY = 5.0  # seconds between two lines of progress, if there is no terminal


def run(given: Given) -> int:
    given.only(1, "one source")
    source = given.first("source; expected a run, a model, verl's shards or a file of rows")
    to = given.options.get("--to", "")
    if to not in (*MODELS, *DATA):
        raise ConfigError(f"--to: got {to or 'nothing'}, expected one of {', '.join((*MODELS, *DATA))}")
    output = Path(given.options["--output"]).expanduser() if "--output" in given else None
    with OneLine("rows" if to in DATA else "tensors") as progress:
        made = (_rows if to in DATA else _model)(given, source, to, output, progress)
    put(f"{made.path}: {made}")
    for note in made.notes:
        put(note)
    if repo := given.options.get("--push"):
        from silva.conversion.push import push

        put(f"pushed to {push(made.path, repo, data=to in DATA)}")
    return 0


def _model(given: Given, source: str, to: str, output: Path | None, progress: OneLine) -> Any:
    from silva.conversion.models import convert_model

    if wrong := [flag for flag in ("--best", "--min-reward") if flag in given]:
        raise ConfigError(
            f"{wrong[0]}: a model has no rollouts; expected it only with --to {', '.join(DATA)}"
        )
    form, overwrite = given.options.get("--dtype"), "--overwrite" in given
    return convert_model(source, to, output, form, overwrite=overwrite, on_tensor=progress)


def _rows(given: Given, source: str, to: str, output: Path | None, progress: OneLine) -> Any:
    from silva.conversion.rows import convert_rows

    if "--dtype" in given:
        raise ConfigError(f"--dtype: rows have none; expected it only with --to {', '.join(MODELS)}")
    least = given.options.get("--min-reward")
    try:
        number = None if least is None else float(least)
    except ValueError:
        raise ConfigError(f"--min-reward: got {least!r}, expected a number") from None
    return convert_rows(source, to, output, overwrite="--overwrite" in given, on_row=progress,
                        best="--best" in given, min_reward=number)  # fmt: skip


class OneLine:
    """One line that is written over on a terminal; elsewhere a line from time to time."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._last, self._live = CLOCK.monotonic(), sys.stderr.isatty()

    def __enter__(self) -> OneLine:
        return self

    def __call__(self, done: int, total: int) -> None:
        now = CLOCK.monotonic()
        if now - self._last < (0.1 if self._live else EVERY):
            return
        self._last = now
        text = f"{done:,}{f' of {total:,}' if total else ''} {self._what}"
        print(text, end="\r" if self._live else "\n", file=sys.stderr, flush=True)

    def __exit__(self, *_: object) -> None:
        if self._live:
            print(end="\033[K", file=sys.stderr, flush=True)
