"""Questions about the rollouts of a run, asked of its parquet files as they are: no import, no copy, no
index.

    filter (expression.py) ──> SQL with bound parameters ──> duckdb over rollouts/step_N.parquet ──> rows

A page goes on where the one before ended (keyset): by step and place in the file, or by a sorted column
first. Pages in order of steps read only as many files as they need, the newest first. One duckdb serves all
requests, with a limit on its memory and threads.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb

from silva.errors import ConfigError, RecordError
from silva.viewer.expression import Kind, parse, sql

PAGE = 100  # rows
MOST = 500
MEMORY = "400MB"
THREADS = 2
FIRST_FILES = 4  # of a page in order of steps; then twice as many, and so on
MEMBERS = 2000  # rollouts of one piece of work
SHORT = 240  # characters of a text in a list

KINDS: Mapping[str, Kind] = {
    "step": "number", "environment": "text", "task": "text", "group": "text", "work": "text",
    "trajectory": "text", "parent": "text", "agent": "text", "status": "text", "reason": "text",
    "stop_reason": "text", "failure": "text", "error": "text", "reward": "number", "shaped_reward": "number",
    "advantage": "number", "turns": "number", "tokens": "number", "response_tokens": "number",
    "tool_calls": "number", "entropy": "number", "oldest_version": "number", "text": "text",
    "truncated": "flag", "failed": "flag", "branch": "flag", "version": "number", "staleness": "number",
}  # fmt: skip
"""Columns of a filter, with their kinds."""
NAMED: Mapping[str, Kind] = {"rewards": "number", "shaped": "number", "metrics": "number"}
"""Columns that hold values by name: `rewards.success`."""
CUT = ("truncated", "max_turns", "max_tokens", "context_overflow", "timeout")

_IN_FILES = {
    "reward": "reward_raw", "shaped_reward": "reward_shaped", "turns": "turn_count", "group": '"group"',
    "work": "regexp_replace(\"group\", '/t[0-9]+$', '')",  # as rollouts.work_of
    "truncated": f"(stop_reason IN {CUT})", "failed": "(failure IS NOT NULL)",
    "branch": "(parent IS NOT NULL)",
    "staleness": "(version - oldest_version)",
}  # fmt: skip
SQL = {name: _IN_FILES.get(name, name) for name in KINDS} | {
    name: f"map_extract_value({name}, ?)" for name in NAMED
}
LISTED = ("step", "environment", "task", "group", "trajectory", "parent", "status", "reason", "stop_reason",
          "failure", "error", "reward", "shaped_reward", "advantage", "turns", "tokens", "response_tokens",
          "tool_calls", "entropy", "staleness")  # fmt: skip
"""Columns of a list."""
SORTS = tuple(name for name, kind in KINDS.items() if kind == "number")


class Query:
    """Asks about files of rollouts."""

    def __init__(self) -> None:
        self._base = duckdb.connect(":memory:")
        for setting in (f"memory_limit = '{MEMORY}'", f"threads = {THREADS}", "parquet_metadata_cache = true",
                        "preserve_insertion_order = false", "lock_configuration = true"):  # fmt: skip
            self._base.execute(f"SET GLOBAL {setting}")  # also for cursors
        self._few = threading.Semaphore(2)  # questions at once

    def page(
        self, files: Mapping[int, Path], filter: str = "", sort: str = "-step", after: Sequence[Any] = (),
        limit: int = PAGE,
    ) -> dict[str, Any]:  # fmt: skip
        """`rows`, and `next`: what continues after them, None at the end.

        Args:
            files: by step.
            sort: a column, with "-" for the largest first.
            after: the `next` of the page before.

        Raises:
            ConfigError: the filter, the column or the place is wrong.
            RecordError: a file cannot be read.
        """
        column, down = sort.removeprefix("-"), sort.startswith("-")
        if column not in SORTS:
            raise ConfigError(f"sort: got {sort!r}, expected one of {', '.join(SORTS)}, - before it for down")
        limit = max(1, min(limit, MOST))
        tree = parse(filter, KINDS, NAMED)
        where, bound = sql(tree, SQL) if tree else ("true", [])
        place = _place(column, down, after)
        order = (
            'step DESC, "at"'
            if column == "step" and down
            else (
                'step, "at"'
                if column == "step"
                else f'{SQL[column]} {"DESC" if down else "ASC"} NULLS LAST, step, "at"'
            )
        )
        rows: list[dict[str, Any]] = []
        for part in _parts(files, column, down, after):
            rows += self._ask(
                f"SELECT {_selected()}, {SQL[column]} AS sorted FROM {_SOURCE} "
                f"WHERE ({where}) AND ({place[0]}) ORDER BY {order} LIMIT {limit - len(rows)}",
                [_names(part), *bound, *place[1]],
            )
            if len(rows) >= limit:
                break
        last = rows[-1] if len(rows) == limit else None
        following = last and [last["sorted"], last["step"], last["at"]]
        return {"rows": [{k: v for k, v in row.items() if k != "sorted"} for row in rows], "next": following}

    def count(self, files: Sequence[Path], filter: str = "") -> dict[str, Any]:
        """How many rollouts fit, with their mean reward; errors as of `page`."""
        tree = parse(filter, KINDS, NAMED)
        where, bound = sql(tree, SQL) if tree else ("true", [])
        if not files:
            return {"count": 0, "reward": None}
        return self._ask(f"{_COUNT} WHERE {where}", [_names(files), *bound])[0]

    def everything(self, files: Sequence[Path], characters: int) -> tuple[list[dict[str, Any]], list[str]]:
        """All rows, with all columns that a filter may name, and these columns: without `text` if all texts
        together have more characters."""
        size = self._ask(f"SELECT sum(length(text)) AS size FROM {_SOURCE}", [_names(files)])[0]["size"]
        names = [name for name in KINDS if name != "text" or (size or 0) <= characters]
        columns = ", ".join([*(f'{SQL[name]} AS "{name}"' for name in names), *NAMED, '"at"'])
        return self._ask(f'SELECT {columns} FROM {_SOURCE} ORDER BY step, "at"', [_names(files)]), names

    def groups(self, file: Path) -> list[dict[str, Any]]:
        """The groups of a step, with what became of them."""
        return self._ask(_GROUPS, [_names([file])])

    def members(self, file: Path, work: str) -> list[dict[str, Any]]:
        """The rollouts of a piece of work: of its group, or of the states of an expert in it."""
        return self._ask(
            f'SELECT {_selected()} FROM {_SOURCE} WHERE {SQL["work"]} = ? ORDER BY "at" LIMIT {MEMBERS}',
            [_names([file]), work],
        )

    def outcomes(self, files: Sequence[Path]) -> list[dict[str, Any]]:
        """What was dropped, failed, cut or stale, each once and as the first of these, by kind: messages of a
        kind differ only in numbers."""
        return self._ask(_OUTCOMES, [_names(files)]) if files else []

    def _ask(self, query: str, bound: Sequence[Any]) -> list[dict[str, Any]]:
        with self._few, self._base.cursor() as cursor:
            try:
                found = cursor.execute(query, bound)
                names = [column[0] for column in found.description]
                return [dict(zip(names, row, strict=True)) for row in found.fetchall()]
            except duckdb.OutOfMemoryException as error:
                raise ConfigError(
                    "this question needs more memory than the viewer may use; narrow it"
                ) from error
            except duckdb.BinderException as error:
                raise RecordError(
                    f"rollouts of an earlier version of Silva lack a column: {_first_line(error)}"
                ) from error
            except duckdb.Error as error:
                raise RecordError(f"rollouts cannot be read: {_first_line(error)}") from error


_SOURCE = '(SELECT *, file_row_number AS "at" FROM read_parquet(?, file_row_number = true))'
_RESULT = "FILTER (failure IS NULL)"
_COUNT = f"SELECT count(*) AS count, avg(reward_raw) {_RESULT} AS reward FROM {_SOURCE}"
_GROUPS = f"""
SELECT "group", any_value(task) AS task, any_value(environment) AS environment, count(*) AS rollouts,
    avg(reward_raw) {_RESULT} AS reward, min(reward_raw) {_RESULT} AS low, max(reward_raw) {_RESULT} AS high,
    count(*) FILTER (parent IS NOT NULL) AS branches, count(*) FILTER (failure IS NOT NULL) AS failed,
    any_value(reason) FILTER (status = 'dropped') AS reason, any_value(status) AS status,
    avg(entropy) AS entropy, avg(response_tokens) AS response_tokens, min("at") AS "at"
FROM {_SOURCE} WHERE "group" <> '' GROUP BY "group" ORDER BY min("at")
"""
_BEHIND = _IN_FILES["staleness"]
_OUTCOMES = f"""
SELECT kind, what, count(*) AS count, min(step) AS first, max(step) AS step, arg_max("at", step) AS "at"
FROM (
    SELECT step, "at",
        CASE
            WHEN failure IS NOT NULL THEN 'failed' WHEN status = 'dropped' THEN 'dropped'
            WHEN stop_reason IN {CUT} THEN 'cut' ELSE 'stale'
        END AS what,
        CASE
            WHEN failure IS NOT NULL
                THEN left(regexp_replace(split_part(error, chr(10), 1), '[0-9]+', '#', 'g'), {SHORT})
            WHEN status = 'dropped' THEN reason WHEN stop_reason IN {CUT} THEN stop_reason
            ELSE {_BEHIND} || IF({_BEHIND} = 1, ' version behind', ' versions behind')
        END AS kind
    FROM {_SOURCE}
    WHERE failure IS NOT NULL OR status = 'dropped' OR stop_reason IN {CUT} OR {_BEHIND} > 0
)
GROUP BY kind, what ORDER BY count DESC LIMIT {MOST}
"""


def _names(files: Sequence[Path]) -> list[str]:
    return [str(path) for path in files]


def _selected() -> str:
    cut = {"error", "reason"}
    columns = [f"left({SQL[n]}, {SHORT}) AS {n}" if n in cut else f'{SQL[n]} AS "{n}"' for n in LISTED]
    return ", ".join([*columns, '"at"'])


def _place(column: str, down: bool, after: Sequence[Any]) -> tuple[str, list[Any]]:
    """The condition of what comes after a place, and what is bound to it."""
    if not after:
        return "true", []
    if (
        len(after) != 3
        or not all(_is_number(each) for each in after[1:])
        or not (after[0] is None or _is_number(after[0]))
    ):
        raise ConfigError(f"after: got {list(after)!r}, expected what the page before gave as next")
    value, step, at = after
    if column == "step":
        return f'(step {"<" if down else ">"} ? OR (step = ? AND "at" > ?))', [step, step, at]
    behind = '(step > ? OR (step = ? AND "at" > ?))'
    if value is None:  # they come last
        return f"({SQL[column]} IS NULL AND {behind})", [step, step, at]
    beyond = "<" if down else ">"
    return (
        f"({SQL[column]} {beyond} ? OR {SQL[column]} IS NULL OR ({SQL[column]} = ? AND {behind}))",
        [value, value, step, step, at],
    )


def _parts(files: Mapping[int, Path], column: str, down: bool, after: Sequence[Any]) -> Iterator[list[Path]]:
    """The files that a page may need, a part after the other."""
    steps = sorted(files, reverse=down)
    if column != "step":
        yield from [[files[step] for step in steps]] if steps else []
        return
    if after and len(files) > 1:
        steps = [step for step in steps if (step <= after[1] if down else step >= after[1])]
    size = FIRST_FILES
    while steps:
        yield [files[step] for step in steps[:size]]
        steps, size = steps[size:], size * 2


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:SHORT]
