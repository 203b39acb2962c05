"""`silva envs`: a line for each environment, play of one in the terminal, and what a check of it found."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from random import randrange
from typing import TYPE_CHECKING, Any

from silva.commands.command import Given
from silva.config.help import about
from silva.config.plugins import entry_points, names_in
from silva.config.schema import import_settings
from silva.config.sections import PretrainedModel
from silva.environments.settings import EnvironmentSettings
from silva.errors import ConfigError, contained, errors_about
from silva.monitoring.printable import put
from silva.registries import REGISTRIES
from silva.signals import be_caught

if TYPE_CHECKING:
    from silva.environments.check.findings import Check
    from silva.protocols import TaskSet
    from silva.rendering.renderer import Renderer
    from silva.types import Message, ToolSpec


def run(given: Given) -> int:
    match given.rest:
        case ["play", *words]:
            taskset = _settings(given, "play", words).taskset()
            be_caught()
            play_here(taskset)
            return 0
        case ["check", *words]:
            return _check(given, words)
    given.only(0, "nothing, --json, play NAME or check NAME")
    rows = listed({**entry_points(), **REGISTRIES.environments})
    put(json.dumps(rows, indent=1) if "--json" in given else table(rows))
    return 0


def _check(given: Given, words: Sequence[str]) -> int:
    from silva.environments.check.checks import examine

    settings = _settings(given, "check", [*map(sole_environment, words[:1]), *words[1:]])
    be_caught()
    checks = examine(settings)
    found = as_data(settings.label, checks)
    put(json.dumps(found, indent=1) if "--json" in given else shown(settings.label, checks))
    return 0 if found["ok"] else 1


def _settings(given: Given, what: str, words: Sequence[str]) -> EnvironmentSettings:
    """Those of the environment that is named, with its keys."""
    if not words or words[0].startswith("-"):
        raise ConfigError(f"silva envs {what}: got no name; `silva envs` lists them")
    keys = [re.sub("^--(no-)?", r"--\1environments.0.", word) for word in words[1:]]
    try:
        config = given.resolve([f"--environments.0.type={words[0]}", *keys]).config
    except ConfigError as error:
        raise ConfigError(str(error).replace("environments.0.", "")) from None
    settings: EnvironmentSettings = config.environments[0]
    return settings


def listed(targets: Mapping[str, str]) -> list[dict[str, Any]]:
    """One row for each environment (name -> "module:Class"), as plain data."""
    return [_row(name, target) for name, target in targets.items()]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as aligned columns."""
    cells = [("name", "here", "about", "needs", "licence")]
    for row in rows:
        programs = f"no {', '.join(row['programs'])} here" if row["programs"] else ""
        packages = " ".join(name.replace("_", "-") for name in row["missing"])
        install = f"pip install {packages}" if packages else ""
        needs = "; ".join(filter(None, (row["needs"], install, programs))) or "nothing"
        cells.append((row["name"], "yes" if row["here"] else "no", row["about"], needs, row["licence"]))
    widths = [max(len(line[column]) for line in cells) for column in range(4)]
    return "\n".join(
        "  ".join([*(f"{text:<{width}}" for text, width in zip(line, widths, strict=False)), line[4]])
        for line in cells
    )


def sole_environment(target: str) -> str:
    """The `type` of the only environment in a file ("my_env.py"); any other `type` as it is.

    Raises:
        ConfigError: the file holds none, or several.
    """
    if not target.endswith(".py"):
        return target

    def fits(value: Any) -> bool:
        return isinstance(value, type) and issubclass(value, EnvironmentSettings)

    with errors_about(target):
        names = names_in(target, fits)
    if len(names) != 1:
        there = f", such as {target}:{names[0]}" if names else ""
        raise ConfigError(f"{target}: expected one environment, got {len(names)}{there}")
    return f"{target}:{names[0]}"


def shown(label: str, checks: Sequence[Check]) -> str:
    """What a check found, in lines; files relative to the working folder."""
    width = max(len(check.name) for check in checks)
    lines = [label]
    for check in checks:
        lines.append(f"  {'ok' if check.ok else 'wrong':<5}  {check.name:<{width}}  {check.done}".rstrip())
        for finding in check.findings:
            inside = finding.where.startswith(str(Path.cwd()) + os.sep)
            place = os.path.relpath(finding.where) if inside else finding.where
            where = f"  ({place})" if place else ""
            lines.append(f"         {finding.kind}: {finding.text}{where}")
    wrong = sum(finding.kind == "wrong" for check in checks for finding in check.findings)
    lines.append(f"{wrong} {'fault' if wrong == 1 else 'faults'}" if wrong else "nothing is wrong")
    return "\n".join(lines)


def play_here(taskset: TaskSet) -> None:
    """Let the user play a training task in the terminal."""
    from silva.environments.play import play

    for note in getattr(taskset, "notes", ()):
        put(note)
    tasks = taskset.tasks("train")
    try:
        asyncio.run(play(taskset, tasks[randrange(len(tasks))], input, put, prompt_text))
    except EOFError:
        put()


def prompt_text(messages: Sequence[Message], tools: Sequence[ToolSpec], prefill: str) -> str:
    """A dialogue as the packaged model reads it."""
    tokens = _renderer().context(messages, tools, prefill=prefill)
    return f"{PretrainedModel().name} reads {len(tokens):,} tokens:\n{_renderer().decode(tokens)}"


@cache
def _renderer() -> Renderer:
    from silva.models.loading import load_tokenizer
    from silva.rendering.renderer import Renderer

    return Renderer(load_tokenizer(PretrainedModel()))  # type: ignore[arg-type]


def as_data(label: str, checks: Sequence[Check]) -> dict[str, Any]:
    found = [{"name": check.name, "ok": check.ok, **asdict(check)} for check in checks]
    return {"environment": label, "ok": all(check.ok for check in checks), "checks": found}


def _row(name: str, target: str) -> dict[str, Any]:
    settings: Any = None
    try:
        with contained():
            settings = import_settings(target)
        said = about(settings)
    except Exception as error:  # an installed package of somebody else: the others are listed all the same
        said = f"cannot be loaded: {type(error).__name__}: {error}"
    missing = [each for each in getattr(settings, "packages", ()) if importlib.util.find_spec(each) is None]
    programs = [program for program in getattr(settings, "programs", ()) if shutil.which(program) is None]
    own = "Apache-2.0" if target.startswith("silva.") else "of its package"
    return {
        "name": name,
        "about": said,
        "licence": (getattr(settings, "licence", "") or own) if settings else "",
        "needs": getattr(settings, "needs", ""),
        "missing": missing,
        "programs": programs,
        "here": settings is not None and not missing and not programs,
        "settings": target,
    }
