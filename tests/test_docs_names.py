"""What pages, docstrings and comments name exists: modules and names of silva, files, sections of pages."""

from __future__ import annotations

import ast
import importlib
import io
import re
import tokenize
import tomllib
from functools import cache
from pathlib import Path

import pytest

from silva.config.schema_json import json_schema
from silva.registries import REGISTRIES

ROOT = Path(__file__).parents[1]
FILES = {
    "/" + path.relative_to(ROOT).as_posix()
    for folder in ("src", "tests", "docs", "configs", "examples", "benchmarks", "skills")
    for path in (ROOT / folder).rglob("*.*")
} | {f"/{path.name}" for path in ROOT.glob("*.*")}
PAGES = [ROOT / file[1:] for file in sorted(FILES) if file.endswith(".md")]
CODE = [ROOT / file[1:] for file in sorted(FILES) if re.match(r"/(src|benchmarks|examples)/.*\.py$", file)]
OF_USERS = set(
    re.findall(
        r"\S+",
        """file.py mine.py server.py rewards.py my_env.py my_tasks.py guess.py sums.py NAME.py
        test_NAME.py towns.py test_towns.py towns.toml FILE.toml NAME.toml a.toml b.toml run.toml lake.toml
        api.toml infer.toml sft.toml rl.toml config.toml task.toml instruction.md agent.py agent.toml
        parity.py parity.toml prices.py prices.toml rows.py first.py second.py sums.toml signs.py
        served.toml planned.toml""",
    )
)
"""Files that a user writes, or a run, or a library of tasks."""
START = (ROOT / "docs" / "start.md").read_text() + (ROOT / "docs" / "troubleshooting.md").read_text()
"""Pages whose tables are read here."""


def written(path: Path) -> str:
    """A page, or the docstrings and comments of a module."""
    text = path.read_text()
    if path.suffix != ".py":
        return text
    strings = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr)]
    docs = [node.value for node in strings if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return "\n".join([*docs, *(token.string for token in tokens if token.type == tokenize.COMMENT)])


def prose(page: Path) -> str:
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)


def short(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_the_pages_and_the_code_are_found():
    assert {"README.md", "docs/start.md", "benchmarks/RESULTS.md"} <= {short(path) for path in PAGES}
    assert {"src/silva/cli.py", "benchmarks/chaos.py"} <= {short(path) for path in CODE}


@pytest.mark.slow
def test_files_that_are_named_exist():
    wrong = [
        f"{short(path)}: {name}"
        for path in [*PAGES, *CODE]
        for name in sorted(set(re.findall(r"[\w./-]*\w\.(?:py|toml|md|svg)\b", written(path))))
        if name.rpartition("/")[2] not in OF_USERS
        and not any(file.endswith("/" + re.sub(r"^(\.\.?/)+", "", name)) for file in FILES)
    ]
    assert wrong == []


@pytest.mark.slow
def test_dotted_names_of_silva_exist():
    named = {
        (name, short(path))
        for path in [*PAGES, *CODE]
        for name in re.findall(r"(?<![\w./])silva(?:\.[A-Za-z_]\w*)+", written(path))
    }
    wrong = [(name, path) for name, path in sorted(named) if not found(name)]
    assert [each for each in wrong if each[0] != "silva.schema.json"] == []
    assert len(named) > 10


@cache
def found(name: str) -> bool:
    """Whether the longest part of a dotted name that is a module has the rest."""
    module, rest = name, list[str]()
    while importlib.util.find_spec(module.partition(".")[0]):
        try:
            each = importlib.import_module(module)
            break
        except ModuleNotFoundError:
            module, _, last = module.rpartition(".")
            rest.insert(0, last)
    for part in rest:
        if not hasattr(each, part):
            return False
        each = getattr(each, part)
    return True


@pytest.mark.parametrize("page", PAGES, ids=short)
def test_links_point_at_files_and_sections(page):
    wrong = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        file, _, section = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if "://" in link or (target.exists() and (not section or section in sections(target))):
            continue
        wrong.append(link)
    assert wrong == []


@cache
def sections(page: Path) -> set[str]:
    """The anchors of a page: its headings as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower() for title in titles]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in plain}


def table(title: str) -> list[list[str]]:
    """The rows of a section of these pages: the names in backticks, by column."""
    section = START.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")][2:]
    return [[name for cell in row for name in re.findall(r"`([^`]+)`", cell)] for row in rows]


def test_addresses_are_well_formed_and_each_has_one_form():
    """They are asked by hand (`sphinx-build -b linkcheck`): tests have no network."""
    found = {link for page in PAGES for link in re.findall(r"\]\((https?://[^)\s]+)\)", page.read_text())}
    assert len(found) > 30
    assert [
        link for link in found if not re.fullmatch(r"https://[\w-]+(\.[\w-]+)+(/[\w./~%-]*)?(#[\w-]+)?", link)
    ] == []
    assert len({link.rstrip("/") for link in found}) == len(found)


def test_the_extras_of_the_first_page_are_those_of_the_package():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    told = re.findall(
        r"^\| (`.*?) \|", START.partition("\n## Extras\n")[2].partition("\n## ")[0], re.MULTILINE
    )
    assert {name for cell in told for name in re.findall(r"`(\w+)`", cell)} == {*extras} - {"dev"}


def test_the_base_classes_of_the_first_page_exist():
    modules = [path.read_text() for path in CODE if "/environments/bases/" in path.as_posix()]
    defined = {name for text in modules for name in re.findall(r"^class (\w+)", text, re.MULTILINE)}
    named = {name for row in table("Which base class") for name in row if name.isidentifier()}
    assert len(named) >= 5 and named - defined == {"Environment"}


def test_metrics_and_keys_of_the_first_page_exist():
    schema = str(json_schema(REGISTRIES))
    metrics = {
        name
        for line in (ROOT / "docs" / "files.md").read_text().splitlines()
        for name in re.findall(r"`([^`]+)`", line)
    }
    named = {name for row in table("When it does not learn") for name in row}
    assert {name for name in named if "/" in name} - metrics == set()
    keys = {name for name in named if re.fullmatch(r"[a-z]\w*(\.\w+)+", name)} - {"run.log"}
    assert keys and {key for key in keys if f"'{key.rpartition('.')[2]}'" not in schema} == set()


def test_papers_of_the_methods_are_listed_with_keys_that_exist():
    page = (ROOT / "docs" / "papers.md").read_text()
    cited = {
        paper
        for path in CODE
        if re.search(r"/src/silva/(algorithms|rollouts|data)/", path.as_posix())
        for paper in re.findall(r"arXiv:(\d+\.\d+)", path.read_text())
    }
    assert cited - set(re.findall(r"\[(\d+\.\d+)\]", page)) == set()
    schema = str(json_schema(REGISTRIES))
    keys = set(re.findall(r"`((?:algorithm|rollout|data|monitoring|trainer)(?:\.\w+)+)", page))
    assert len(keys) > 10
    assert {key for key in keys if not all(f"'{part}'" in schema for part in key.split("."))} == set()


def test_stops_of_the_walks_exist():
    page = (ROOT / "docs" / "architecture.md").read_text()
    stops = re.findall(
        r"^\d+\. `([\w/]+\.py)`, `(?:\w+\.)?(\w+)`", page.partition("\n## Walks\n")[2], re.MULTILINE
    )
    assert len(stops) > 20
    wrong = [
        stop
        for stop in stops
        if not re.search(rf"^\s*(async )?def {stop[1]}\b", (ROOT / "src/silva" / stop[0]).read_text(), re.M)
    ]
    assert wrong == []
