"""The pages of the documentation site, which `python docs/pages.py FOLDER` writes for Sphinx.

Pages of the repository are copied to their places in the site and their links follow them; files that are no
pages are shown on pages of their own. The reference is made from the settings and the records of commands.
The sidebar, and llms.txt for agents, have the order of docs/index.md. The pages themselves stay plain
Markdown: what only Sphinx reads is written here.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Collection
from pathlib import Path

from silva.commands import COMMANDS
from silva.config.field_types import Key, held
from silva.config.help import HelpPage, KeyRow, keys
from silva.config.schema import run_config
from silva.registries import REGISTRIES

ROOT = Path(__file__).resolve().parents[1]
INDEX = ROOT / "docs" / "index.md"
FRONT = ROOT / "README.md"
CODE = re.compile(r"(^ *```.*?^ *```$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
ENTRY = re.compile(r"^- \[(?P<title>[^\]]+)\]\((?P<link>[^)]+)\): (?P<about>.*)$", re.MULTILINE)
LANGUAGES = {".py": "python", ".toml": "toml", ".sh": "bash", ".sbatch": "bash", ".yaml": "yaml"}
MADE = {
    "reference/keys": "Keys of a configuration",
    "reference/commands": "Commands",
    "reference/protocols": "Protocols",
    "reference/types": "Records",
}


def main(folder: Path) -> None:
    """Write all pages, and what Sphinx needs beside them."""
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("conf.py", "favicon.svg", "narrow.css"):
        put(folder / name, (ROOT / "docs" / name).read_text())
    for name, text in pages().items():
        put(folder / name, text)
    for picture in (ROOT / "docs").glob("*.svg"):
        put(folder / picture.name, picture.read_text())
    put(folder / "llms.txt", llms_txt())


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def pages() -> dict[str, str]:
    """The text of each page by its place in the site."""
    places = {path: place(path) for path in written()}
    shown: dict[Path, str] = {}
    found = {name: follow(path.read_text(), path, places, shown) for path, name in places.items()}
    found |= {name: listing(path) for path, name in shown.items()}
    found |= reference()
    found["index.md"] += "\n" + "\n".join(
        toctree(
            [page_of(entry["link"]) for entry in entries] + (list(MADE) if title == "Reference" else []),
            title,
        )
        for title, entries in sections().items()
    )
    found["examples/index.md"] += toctree(sorted(inside(found, "examples/")))
    found["results.md"] += toctree(sorted(inside(found, "history/")))
    found["agents.md"] += toctree(sorted(inside(found, "skills/")))
    return found


def written() -> list[Path]:
    """The Markdown files of the repository that readers want; the list of contents becomes the sidebar."""
    folders = ("docs", "examples", "benchmarks", "skills")
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.md"))]
    return [FRONT, ROOT / "CHANGELOG.md", ROOT / "AGENTS.md", *(path for path in found if path != INDEX)]


def place(path: Path) -> str:
    """Where a page of the repository stands in the site."""
    name = path.relative_to(ROOT).as_posix()
    if name == "README.md":
        return "index.md"
    name = (
        name.replace("benchmarks/RESULTS.md", "results.md").removeprefix("docs/").removeprefix("benchmarks/")
    )
    name = re.sub(r"(\w+)/(?:README|SKILL)\.md$", r"\1.md", name)
    return "examples/index.md" if name == "examples.md" else name.lower()


def follow(text: str, page: Path, places: dict[Path, str], shown: dict[Path, str]) -> str:
    """The text with links that hold in the site. Files that are linked and are no pages join `shown`."""

    def moved(match: re.Match[str]) -> str:
        file, mark, section = match[1].partition("#")
        if not file or "://" in file:
            return match[0]
        target = (page.parent / file).resolve()
        if target == INDEX:
            target = FRONT
        if target.is_dir() and (target / "README.md") in places:
            target /= "README.md"
        if not target.exists():
            raise SystemExit(f"{page}: got a link to {file}, expected a file that exists")
        here = Path(place(page)).parent
        if target.suffix == ".svg":
            return f"]({os.path.relpath(target.name, here)})"
        if target not in places:
            shown[target] = f"files/{target.relative_to(ROOT).as_posix()}.md"
        return f"]({os.path.relpath(places.get(target) or shown[target], here)}{mark}{section})"

    parts = CODE.split(text)  # prose and code in turns
    parts[::2] = [re.sub(r"\]\(([^)\s]+)\)", moved, part) for part in parts[::2]]
    return "".join(parts)


def listing(path: Path) -> str:
    """A page that shows a file, or the names in a folder."""
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        lines = [
            f"- `{each.name}`" for each in sorted(path.iterdir()) if not each.name.startswith((".", "_"))
        ]
        return "\n".join(["---\norphan: true\n---", f"# `{name}`", "", *lines, ""])
    language = LANGUAGES.get(path.suffix, "text")
    return f"---\norphan: true\n---\n# `{name}`\n\n`````{language}\n{path.read_text().rstrip()}\n`````\n"


def sections() -> dict[str, list[re.Match[str]]]:
    """The entries of docs/index.md, by heading."""
    parts = re.split(r"^## (.*)$", INDEX.read_text(), flags=re.MULTILINE)
    return {title: list(ENTRY.finditer(text)) for title, text in zip(parts[1::2], parts[2::2], strict=True)}


def page_of(link: str) -> str:
    return place((INDEX.parent / link).resolve()).removesuffix(".md")


def inside(found: Collection[str], folder: str) -> list[str]:
    names = [name.removesuffix(".md") for name in found if name.startswith(folder)]
    return [name for name in names if name != f"{folder}index"]


def toctree(names: Collection[str], caption: str = "") -> str:
    head = [f":caption: {caption}"] if caption else []
    own = ["self" if name == "index" else f"/{name}" for name in names]
    return "\n".join(["\n```{toctree}", ":hidden:", *head, "", *own, "```\n"]) if own else ""


def llms_txt() -> str:
    """docs/index.md in the form of llmstxt.org: the links lead to the Markdown of the pages."""

    def plain(match: re.Match[str]) -> str:
        return f"- [{match['title']}](_sources/{page_of(match['link'])}.md.txt): {match['about']}"

    made = "\n".join(
        f"- [{title}](_sources/{name}.md.txt): made from the code" for name, title in MADE.items()
    )
    text = ENTRY.sub(plain, INDEX.read_text()).replace("# Contents", "# Silva", 1)
    return text.replace("\n## Help\n", f"{made}\n\n## Help\n", 1)


def reference() -> dict[str, str]:
    """The pages that are made from the code."""
    config = run_config(REGISTRIES)
    top = Markdown([f"# {MADE['reference/keys']}", "", KEYS, ""])
    top.rows(keys(config))
    tables = {name: field for name, field in config.model_fields.items() if held(field)}
    found = {
        "reference/keys.md": "\n".join(top.lines) + toctree([f"reference/keys/{name}" for name in tables])
    }
    for name, field in tables.items():
        page = Markdown([f"# `{name}`"])
        page.field(field, (name,))
        found[f"reference/keys/{name}.md"] = "\n".join(page.lines) + "\n"
    found["reference/commands.md"] = commands()
    for name, module in (("protocols", "silva.protocols"), ("types", "silva.types")):
        title = MADE[f"reference/{name}"]
        body = f".. automodule:: {module}\n   :members:\n   :undoc-members:\n"
        found[f"reference/{name}.md"] = f"# {title}\n\nModule `{module}`.\n\n```{{eval-rst}}\n{body}```\n"
    return found


KEYS = """\
Every key of a run's file, made from the settings. `silva rl --help SECTION` prints the same in a terminal,
and [configuration](../configuration.md) says how files and the command line go together. These keys stand at
the top; each section has a page."""


class Markdown(HelpPage):
    """The sections of a configuration as headings and tables."""

    def title(self, title: str, about: str | None, path: Key) -> None:
        own = re.sub(r"^(\[+)([^]]*)(\]+)(.*)$", r"`\1\2\3`\4", title)
        own = re.sub(r'type = "([^"]*)"', r'`type = "\1"`', own)
        level = "#" * min(2 + len([part for part in path if part != 0]) - 1, 5)
        self.lines += ["", f"{level} {own}", "", cell(about or ""), ""]

    def rows(self, rows: Collection[KeyRow]) -> None:
        if not rows:
            return
        self.lines += ["", "| key | default | accepts | meaning |", "|---|---|---|---|"]
        for row in rows:
            default = "required" if row.default == "required" else code(row.default)
            self.lines.append(f"| `{row.name}` | {default} | {cell(row.accepts)} | {cell(row.about)} |")
        self.lines.append("")

    def remark(self, text: str) -> None:
        self.lines += ["", cell(text), ""]


def code(text: str) -> str:
    """Text as code, in a cell."""
    return "`" + text.replace("|", "\\|") + "`"


def cell(text: str) -> str:
    """Text that stays what it is in a cell and beside HTML."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    for index in range(0, len(parts), 2):
        parts[index] = re.sub(r"([*<\[\]])", r"\\\1", parts[index])
    return "".join(parts).replace("|", "\\|")


def commands() -> str:
    """Each command's record: usage, words, options, example."""
    lines = [
        f"# {MADE['reference/commands']}",
        "",
        "Made from the commands. Exit codes: [files](../files.md#exit-codes).",
        "",
    ]
    for name, command in COMMANDS.items():
        usage = "\n".join(f"silva {name} {form}".rstrip() for form in command.usage)
        lines += [
            f"## silva {name}",
            "",
            f"{command.summary[0].upper()}{cell(command.summary[1:])}.",
            "",
            "```",
            usage,
            "```",
            "",
        ]
        options = {f"{each.flag} {each.value}".rstrip(): each.about for each in command.options}
        rows = [f"| {code(word)} | {cell(about)} |" for word, about in {**command.words, **options}.items()]
        lines += ["| word or option | meaning |", "|---|---|", *rows, ""] if rows else []
        lines += [cell(command.details), ""] if command.details else []
        lines += ["For example:", "", "```", f"silva {name} {command.example}", "```", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
