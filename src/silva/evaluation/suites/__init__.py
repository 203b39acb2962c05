"""The evaluation suites of the field by name.

    silva eval gsm8k math500 --data ~/data

    SUITES["gsm8k"] ── environment("gsm8k", data=...) ──> an [[environments]] entry ──> rows, episodes,
                                                                        rewards as in every other run

A suite is a preset: it names a data set, a prompt, a reward and tools. Reading and grading are those of the
environments and rewards that it names. No rows are shipped: they come from a folder of the user's, from the
hub, or from a package.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from silva.data.rows import Row, read_rows
from silva.errors import ConfigError
from silva.evaluation.suites.packaged import PACKAGED
from silva.evaluation.suites.published import PUBLISHED
from silva.evaluation.suites.suite import Suite, found

SUITES: Mapping[str, Suite] = {**PUBLISHED, **PACKAGED}


def suite(name: str) -> Suite:
    """Raises ConfigError with the nearest name for one that is unknown."""
    if name in SUITES:
        return SUITES[name]
    near = get_close_matches(name.casefold(), SUITES, n=1)
    hint = f'; did you mean "{near[0]}"?' if near else ""
    raise ConfigError(f"suite: got {name!r}, expected one of {', '.join(SUITES)}{hint}")


def environment(
    name: str,
    *,
    data: Path | None = None,
    tools: Sequence[Any] = (),
    judge: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The `[[environments]]` entry of a suite, as plain values. All of its rows are held out.

    Args:
        data: a folder with the rows, or the file itself; None: from the hub.
        tools: what is offered, as in the key `tools`; nothing by default.
        judge: keys of the reward `judge` (`model`, `base_url`, ...), for suites that a model grades. Its
            `model` is needed; a configuration may also set it later, as environments.0.reward.model.

    Raises:
        ConfigError: the name is unknown, or the rows are missing; it says what to do.
    """
    wanted = suite(name)
    entry: dict[str, Any] = {"type": wanted.type, "name": name, "eval_share": 1.0, **wanted.keys}
    entry |= _rows_of(name, wanted, data)
    if wanted.instructions:
        entry["instructions"] = wanted.instructions
    if wanted.reward:
        entry["reward"] = {**wanted.reward, **(judge if wanted.judged and judge else {})}
    if wanted.calls:  # also without tools, so that those of a configuration have these limits
        entry |= {"max_calls_of": dict(wanted.calls), "max_tool_calls": sum(wanted.calls.values())}
    if tools and not wanted.calls:
        raise ConfigError(f"suite {name}: tools: its environment {wanted.type} takes none")
    return entry | ({"tools": list(tools)} if tools else {})


def published(name: str) -> tuple[Iterator[Row], str]:
    """The rows of a suite as they are published, from the hub or from its package, and the column that asks.

    Raises:
        ConfigError: the name is unknown, or its rows are no texts that can be read; it says what to do.
    """
    wanted = suite(name)
    keys, (file_key, hub_key) = _rows_of(name, wanted, None), wanted.place
    source = keys.get(file_key) or keys.get(hub_key)
    if source is None or "canary" in wanted.keys:
        what = "are encrypted" if source else "stand in its package in a form of its own"
        raise ConfigError(
            f"suite {name}: its rows {what}; give a file with its questions in place of the name"
        )
    of_hub = {key: keys[key] for key in ("split", "subset") if key in keys}
    return read_rows(source, **of_hub), wanted.columns[0].partition(",")[0]


def rows() -> list[dict[str, Any]]:
    """The table, one object a suite, for `silva eval --list`."""
    return [
        {
            "name": name,
            "title": each.title,
            "rows": each.rows,
            "source": each.source,
            "licence": each.licence,
            "gate": each.gate,
            "columns": list(each.columns),
            "metric": each.metric,
            "tools": list(each.tools),
            "citation": each.citation,
        }
        for name, each in SUITES.items()
    ]


def _rows_of(name: str, wanted: Suite, data: Path | None) -> dict[str, Any]:
    """The keys that say where the rows are."""
    for module, command in wanted.packages.items():
        if importlib.util.find_spec(module) is None:
            raise ConfigError(f"suite {name}: it needs a package that is not installed: {command}")
    file_key, hub_key = wanted.place
    if data is None and wanted.inside:
        package = importlib.util.find_spec(next(iter(wanted.packages)))
        return {file_key: str(Path(package.origin or "").parent / wanted.inside)} if package else {}
    if not wanted.files:  # the environment finds them in its package
        return {}
    if data is None:
        if not wanted.hub:
            raise ConfigError(f"suite {name}: its rows cannot be read from the hub; {wanted.where()}")
        if importlib.util.find_spec("datasets") is None:
            raise ConfigError(
                f"suite {name}: reading {wanted.hub} from the hub needs the package datasets: pip install "
                f"'silva[hub]'. Or, for its rows, {wanted.where()}"
            )
        chosen = {hub_key: wanted.hub, "subset": wanted.subset, "split": wanted.split}
        return {key: value for key, value in chosen.items() if value}
    data = data.expanduser().resolve()
    if not data.exists():
        raise ConfigError(f"suite {name}: {data}: no such file or folder")
    file = data if data.is_file() else found(name, wanted, wanted.files, data)
    if file is None:
        tried = ", ".join(f"{each}/test.jsonl, {each}*.jsonl" for each in wanted.files[:2])
        raise ConfigError(
            f"suite {name}: {data} holds no rows of it (looked for {tried}, ...); {wanted.where()}"
        )
    folder = data if data.is_dir() else data.parent
    beside = {key: found(name, wanted, names, folder) for key, names in wanted.beside.items()}
    return {file_key: str(file)} | {key: str(path) for key, path in beside.items() if path}
