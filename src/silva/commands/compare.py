"""`silva eval compare A B ...`: evaluations of the same tasks side by side, as tables, JSON and a page.

Not here: the numbers (evaluation/comparison.py), and the page (monitoring/report_comparison.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from silva.commands.command import Given
from silva.commands.kept import EVALS, kept
from silva.errors import ConfigError, shorten
from silva.evaluation.comparison import compare, is_share
from silva.monitoring.printable import printable, put
from silva.monitoring.report_comparison import write_comparison

SHOWN = 12  # tasks that changed sides, in the terminal
LINE = 100  # characters of a reply there
Row = Mapping[str, Any]


def run(given: Given) -> int:
    """Read what stands after the word `compare`, and show the comparison."""
    names = given.rest[1:]
    if len(names) < 1 or any(each.startswith(("-", "@")) for each in names):
        raise ConfigError(
            f"silva eval compare: got {' '.join(names)!r}, expected two or more evaluations, as in silva "
            "eval compare lake-before lake-after"
        )
    contenders = [each for name in names for each in kept(name).contenders()]
    if len(contenders) < 2:
        raise ConfigError(f"silva eval compare: {names[0]} is one evaluation; expected another one too")
    found = compare(contenders, shared="--shared" in given)
    usual = shorten("-".join(Path(name).name for name in names), 100).strip(".")
    page = Path(given.options.get("--output", EVALS / f"compare-{usual}.html"))
    if "--json" in given:
        put(json.dumps(found, indent=1))
    else:
        show(found)
    write_comparison(page, found)  # last: where it cannot be written, the numbers are there all the same
    if "--json" not in given:
        put(f"{page}: plots, and both replies to each task that changed sides")
    return 0


def show(found: Mapping[str, Any], console: Console | None = None) -> None:
    """The tables of a comparison, and what changed sides."""
    console = console or Console()
    for note in found["notes"]:
        put(f"note: {printable(note)}")
    names = [each["name"] for each in found["contenders"]]
    labels = list(dict.fromkeys(row["environment"] for row in found["metrics"]))
    for label in labels:
        if len(labels) > 1:
            put(f"{printable(label)}:")
        console.print(_means(_of(label, found["metrics"]), names))
        for name, rows in _by_contender(_of(label, found["differences"])).items():
            if len(names) > 2:
                put(f"{printable(name)} against {printable(names[0])}:")
            console.print(_differences(rows))
    costs = ["-" if each["cost"] is None else f"{each['cost']:.4g}" for each in found["contenders"]]
    if {*costs} != {"-"}:
        put(f"cost: {', '.join(f'{printable(n)} {c}' for n, c in zip(names, costs, strict=True))}")
    for each in found["contenders"]:
        if any(each["left_out"].values()):
            put(f"{printable(each['name'])}: left out for lack of a result: {_left_out(each)}")
    _show_changes(found["changes"])


def _means(rows: Sequence[Row], names: Sequence[str]) -> Table:
    table = _table("metric", *map(printable, names))
    for row in rows:
        table.add_row(row["metric"], *(_value(each, row["metric"]) for each in row["estimates"]))
    return table


def _differences(rows: Sequence[Row]) -> Table:
    table = _table("metric", "difference", "95 % interval", "p", "p (Holm)", "tasks")
    for row in rows:
        known = row["ci_low"] is not None
        interval = f"[{_signed(row['ci_low'], row['metric'])}, {_signed(row['ci_high'], row['metric'])}]"
        table.add_row(row["metric"], _signed(row["mean"], row["metric"]), interval if known else "-",
                      _p(row["p"]), _p(row["p_holm"]), str(row["n"]))  # fmt: skip
    return table


def _of(label: str, rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["environment"] == label]


def _by_contender(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by whom they compare with the first."""
    found = dict[str, list[Row]]()
    for row in rows:
        found.setdefault(row["b"], []).append(row)
    return found


def _table(*columns: str) -> Table:
    """Names that are wider than a column go on in the next line, and no end of one is lost."""
    table = Table()
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _show_changes(changes: Sequence[Row]) -> None:
    for name, those in _by_contender(changes).items():
        better = sum(each["gain"] > 0 for each in those)
        put(
            f"{len(those)} tasks changed sides from {printable(those[0]['a'])} to {printable(name)}: "
            f"{better} are solved now, {len(those) - better} no longer"
        )
        for each in those[:SHOWN]:
            sides = f"{each['solved_a']}/{each['of_a']} -> {each['solved_b']}/{each['of_b']}"
            put(f"  {printable(each['environment'])} {printable(each['task'])}: {sides}")
            for side in "ab":
                reply = printable(shorten(" ".join(each[f"reply_{side}"].split()), LINE))
                put(f"    {printable(each[side])}: {reply or '(nothing)'}")
        if len(those) > SHOWN:
            put(f"  and {len(those) - SHOWN} more, which the page shows")
    if not changes:
        put("no task changed sides")


def _left_out(contender: Mapping[str, Any]) -> str:
    words = []
    for label, count in contender["left_out"].items():
        if count:
            bounds = contender["bounds"].get(label, {}).get("success")
            ends = f" (success {bounds[0]:.3f} to {bounds[1]:.3f} with them)" if bounds else ""
            words.append(f"{printable(label)} {count}{ends}")
    return ", ".join(words)


def _value(each: Mapping[str, Any], metric: str) -> str:
    text = _number(each["mean"], metric)
    if each["ci_low"] is None:
        return text
    return f"{text} [{_number(each['ci_low'], metric)}, {_number(each['ci_high'], metric)}]"


def _number(value: float | None, metric: str) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if is_share(metric) or metric == "reward" else f"{value:.1f}"


def _signed(value: float | None, metric: str) -> str:
    text = _number(value, metric)
    return f"+{text}" if value is not None and value > 0 else text


def _p(value: float | None) -> str:
    return "-" if value is None else "<0.0001" if value < 1e-4 else f"{value:.4f}"
