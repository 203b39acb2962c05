"""`silva view --export DIR`: the same front end over files, opened from disk without a server.

A page opened from disk may load neither modules nor JSON, but scripts: the modules become one script, and
each answer of pages.py a script that hands it over. A bounded part of each run is taken: of steps spread over
it the groups, their forests, dialogues and tokens, and some tasks across the steps; and all rows of rollouts
if they are not too many, for filter.js to look through in place of a server.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from silva.errors import ConfigError, SilvaError
from silva.monitoring.report import embed
from silva.monitoring.report_rollouts import spread
from silva.viewer.catalogue import Catalogue, FoundRun
from silva.viewer.pages import Pages
from silva.viewer.query import MOST
from silva.viewer.routes import static_files

ROWS = 5000  # rollouts of a run that filters look through; of longer runs the first ones are listed
CHARACTERS = 20_000_000  # of what was said in all of them; if it is more, filters do without it
STEPS = 10  # of a run
FORESTS = 4  # of a step
TOKENS = 40  # rollouts of a run with their tokens
TASKS = 10  # of a run, across its steps
VERSIONS = 12  # rollouts of a task: each is compared with the first and the last one
ALL = "all"  # the rows of a run
FIRST = "vendor/preact_htm.js"
POLICY = "default-src 'none'; script-src 'self' file:; style-src 'self' file:; img-src data:; base-uri 'none'"
_IMPORT = re.compile(r'^import \{.*?\} from "\./(.+?)";\n', re.MULTILINE)
_EXPORTED = re.compile(r"export\s*\{([^}]*)\};?\s*$")


def export(pages: Pages, catalogue: Catalogue, folder: Path) -> int:
    """Write the folder; how many pages it holds.

    Raises:
        ConfigError: the folder exists with something in it, or cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--export {folder}: there is something already; expected a new folder")
    try:
        (folder / "data").mkdir(parents=True)
        (folder / "vendor").mkdir()
        files: dict[str, int] = {}
        for name, given in _asked(pages, catalogue):
            key = key_of(name, given)
            listed = name == "rollouts" and "filter" not in given  # that all rows give too
            if key in files or (listed and key_of(ALL, {"run": given["run"]}) in files):
                continue
            try:
                answer = pages.all(given, ROWS, CHARACTERS) if name == ALL else pages.answer(name, given)
            except SilvaError as error:
                answer = None if name == ALL else {"error": str(error)}  # then its lists have some of them
            if answer is None:
                continue
            files[key] = len(files)
            _write(folder / "data" / f"{files[key]}.js", f"silvaData({embed(key)},{embed(answer)});\n")
        about = {"files": files, "most": ROWS}
        _write(folder / "data" / "index.js", f"globalThis.silvaExport={embed(about)};\n")
        _write_front(folder)
    except OSError as error:
        raise ConfigError(f"--export {folder} cannot be written: {error.strerror or error}") from error
    return len(files)


def key_of(name: str, given: dict[str, list[str]]) -> str:
    """As `keyOf` in static/api.js."""
    pairs = sorted(f"{_quoted(key)}={_quoted(value)}" for key, values in given.items() for value in values)
    return f"{name}?{'&'.join(pairs)}" if pairs else name


def bundle(files: dict[str, bytes], entry: str = "app.js") -> str:
    """The modules as one script, each after those that it imports; names of the top level are shared."""
    done: list[str] = []

    def visit(name: str) -> None:
        if name in done:
            return
        text = files[name].decode()
        for needed in _IMPORT.findall(text):
            visit(needed)
        done.append(name)

    visit(entry)
    library = files[FIRST].decode()
    exported = _EXPORTED.search(library)
    assert exported is not None
    pairs = [pair.split(" as ") for pair in exported[1].split(",")]
    names = ",".join(pair[-1].strip() for pair in pairs)
    returned = ",".join(f"{pair[-1].strip()}:{pair[0].strip()}" for pair in pairs)
    head = f"const {{{names}}} = (() => {{{library[: exported.start()]}\nreturn {{{returned}}};\n}})();\n"
    own = [_IMPORT.sub("", files[name].decode()) for name in done if name != FIRST]
    body = "".join(re.sub(r"^export ", "", text, flags=re.MULTILINE) for text in own)
    return f'"use strict";\n(() => {{\n{head}{body}\n}})();\n'


def _write_front(folder: Path) -> None:
    files = static_files()
    for name in ("look.css", "style.css", "vendor/uplot.css", "vendor/uplot.js", "vendor/LICENSES.txt"):
        (folder / name).write_bytes(files[name])
    _write(folder / "app.js", bundle(files))
    page = files["index.html"].decode()
    page = page.replace(
        '<meta charset="utf-8">',
        f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
    )
    page = page.replace(
        '<script type="module" src="app.js"></script>',
        '<script src="data/index.js" defer></script>\n<script src="app.js" defer></script>',
    )
    _write(folder / "index.html", page)


def _asked(pages: Pages, catalogue: Catalogue) -> Iterator[tuple[str, dict[str, list[str]]]]:
    yield "runs", {}
    for run in catalogue.runs().values():
        of = {"run": [run.name]}
        for name in ("run", "steps", "curves", "outcomes", ALL, "rollouts"):
            yield name, of
        yield from _of_rollouts(pages, run, of)


def _of_rollouts(
    pages: Pages, run: FoundRun, of: dict[str, list[str]]
) -> Iterator[tuple[str, dict[str, list[str]]]]:
    chosen: dict[tuple[int, int], None] = {}
    steps_of: dict[str, set[int]] = defaultdict(set)

    def choose(row: dict[str, Any]) -> None:
        chosen[row["step"], row["at"]] = None
        steps_of[row["task"]].add(row["step"])

    for row in _rows(pages, "rollouts", of)[:100]:
        choose(row)
    for step in spread([*run.rollouts()], STEPS):
        at_step = {**of, "step": [str(step)]}
        yield "groups", at_step
        yield "rollouts", at_step
        for group in spread(_rows(pages, "groups", at_step), FORESTS):
            given = {**at_step, "group": [group["group"]]}
            yield "forest", given
            for row in _rows(pages, "forest", given, "members"):
                choose(row)
    for task in spread([task for task, steps in steps_of.items() if len(steps) > 1], TASKS):
        at_all = {**of, "filter": [f"task == {json.dumps(task, ensure_ascii=False)}"], "sort": ["step"],
                  "limit": [str(MOST)]}  # fmt: skip
        yield "rollouts", at_all
        rows = [*spread(_rows(pages, "rollouts", at_all), VERSIONS)]
        for row in rows:
            chosen[row["step"], row["at"]] = None
            for a, b in ((rows[0], row), (row, rows[-1])):
                yield "texts", {**of, "a": [_place(a)], "b": [_place(b)]}
    for number, (step, at) in enumerate(chosen):
        given = {**of, "step": [str(step)], "at": [str(at)]}
        yield "rollout", given
        if number < TOKENS:
            for turn, _ in enumerate(_rows(pages, "rollout", given, "turns")):
                yield "tokens", {**given, "turn": [str(turn)]}


def _place(row: dict[str, Any]) -> str:
    return f"{row['step']}:{row['at']}"


def _rows(pages: Pages, name: str, given: dict[str, list[str]], key: str = "rows") -> list[dict[str, Any]]:
    try:
        return list(pages.answer(name, given)[key])
    except SilvaError:  # the page itself says so
        return []


def _quoted(text: str) -> str:
    return quote(text, safe="!'()*~-._")


def _write(path: Path, text: str) -> None:
    path.write_text(text, "utf-8")
