"""`silva import FILE`: another framework's configuration as Silva's, and a line for all without an equal."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

from silva.commands.command import Given
from silva.config.load import load
from silva.config.saved import toml
from silva.config.sources import PYTHON
from silva.conversion.configs import READERS
from silva.conversion.configs.carried import Carried, Note
from silva.conversion.configs.detect import detect
from silva.conversion.configs.source import read
from silva.errors import CapabilityError, ConfigError
from silva.monitoring.printable import printable, put
from silva.ports import FILES
from silva.registries import REGISTRIES
from silva.storage.placed import writing

SHOWN = 80  # characters of a value in a note


def run(given: Given) -> int:
    if not given.rest or any(each.startswith(("-", "@")) for each in given.rest):
        raise ConfigError(
            f"silva import: got {' '.join(given.rest)!r}, expected a configuration of another framework"
        )
    paths = [Path(each).expanduser() for each in given.rest]
    system, draft = convert(paths, given.options.get("--from", ""))
    table = draft.table()
    wrong = problems(table, draft.origins)
    text = written(system, paths, draft, table, wrong)
    output = Path(given.options["--output"]) if "--output" in given else None
    if output is not None:
        if output.exists() and "--overwrite" not in given:
            raise ConfigError(f"--output {output}: it exists already; --overwrite replaces it")
        with writing(output):
            FILES.write_atomic(output, text.encode())
        command = "sft" if "data" in table else "rl"
        put(f"{output}: {len(draft.origins)} keys carried over, {len(draft.notes)} to look at. "
            f"silva {command} @ {output} --dry-run shows the plan")  # fmt: skip
    elif "--json" in given:
        found = {
            "system": system,
            "config": table,
            "notes": [asdict(each) for each in draft.notes],
            "wrong": wrong,
        }
        put(json.dumps(found, indent=1, default=str))
    else:
        put(text.rstrip())
    return 2 if wrong else 0


def convert(paths: list[Path], system: str = "") -> tuple[str, Carried]:
    """Which framework the files are of, and Silva's configuration of them. Later files override earlier ones.

    Raises:
        ConfigError: `system` is none that is known, or the files do not show of which one they are.
        RecordError: a file's syntax is wrong.
    """
    flat = {key: found for path in paths for key, found in read(path).items()}
    system = system or detect(flat, paths)
    if system not in READERS:
        raise ConfigError(f"--from: got {system!r}, expected {', '.join(READERS)}")
    module, _, function = READERS[system].partition(":")
    draft = Carried(flat)
    getattr(importlib.import_module(module), function)(draft)
    return system, draft


def problems(table: dict[str, Any], origins: Mapping[str, str] = MappingProxyType({})) -> str:
    """What Silva would refuse in it; "" if nothing. `origins`: where the values of keys come from."""
    from silva.commands.checks import check  # seconds to import

    try:
        config = load([], REGISTRIES, values=table, env={}, own_code=False).config
        if "data" not in table:
            check(config)
    except (ConfigError, CapabilityError) as error:
        text = re.sub(rf"{PYTHON}: ([\w.]+)", lambda key: _placed(key[1], origins), str(error))
        return "" if "loads no code" in text and text.count("\n") <= 1 else text
    return ""


def _placed(key: str, origins: Mapping[str, str]) -> str:
    return f"{origins[key]}: {key}" if key in origins else key


def written(system: str, paths: list[Path], draft: Carried, table: dict[str, Any], wrong: str) -> str:
    """The TOML, with where each value comes from, and the notes as comments."""
    names = ", ".join(path.name for path in paths)
    lines = [f"# From {names} ({system}), by silva import. Values without a comment are {system}'s defaults."]
    if wrong:
        lines += [
            "#",
            "# Has to be changed, or Silva refuses it:",
            *(f"#   {line}" for line in wrong.splitlines()),
        ]
    for title, dropped in (("For you to decide", False), ("Not carried over", True)):
        told = [f"#   {_line(note)}" for note in draft.notes if note.dropped is dropped]
        lines += ["#", f"# {title}:", *told] if told else []
    lines = ["".join(c if c.isprintable() else "?" for c in printable(line)) for line in lines]
    return "\n".join([*lines, "", toml(table, draft.origins)])


def _line(note: Note) -> str:
    if not note.key:
        return note.text
    value = json.dumps(note.value, default=str, ensure_ascii=False)
    return f"{note.place}  {note.key} = {value[:SHOWN]}: {note.text}"
