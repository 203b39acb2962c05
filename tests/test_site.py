"""The documentation site: its pages, the reference of every key and option, and what Sphinx finds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.fenced import ROOT

from silva.commands import COMMANDS
from silva.config import field_types
from silva.config.plugins import load_object
from silva.config.schema import run_config
from silva.registries import REGISTRIES

PROGRAM = ROOT / "docs" / "pages.py"


def of_program(name: str):
    return load_object(f"{PROGRAM}:{name}", callable, "function")


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return of_program("pages")()


def test_every_page_has_one_place_in_the_contents() -> None:
    entries = [entry["link"] for section in of_program("sections")().values() for entry in section]
    listed = [(ROOT / "docs" / link).resolve() for link in entries]
    there = {path for path in (ROOT / "docs").rglob("*.md") if path.name != "index.md"}
    assert len(listed) == len({*listed}) and there - {*listed} == set(), (
        "docs/index.md lists every page, once"
    )


def test_links_between_pages_hold(pages: dict[str, str]) -> None:
    pictures = {path.name for path in (ROOT / "docs").glob("*.svg")}
    wrong = []
    for name, text in pages.items():
        for link in re.findall(
            r"\]\(([^)\s#]+)", re.sub(r"^`{3,}.*?^`{3,}$|`[^`\n]+`", "", text, flags=re.M | re.S)
        ):
            target = os.path.normpath(Path(name).parent / link)
            if "://" not in link and target not in pages and target not in pictures:
                wrong.append(f"{name}: {link}")
    assert wrong == [] and len(pages) > 60


def test_the_reference_has_every_key_with_its_words(pages: dict[str, str]) -> None:
    for path, field, _ in field_types.fields(run_config(REGISTRIES)):
        page = pages.get(f"reference/keys/{path[0]}.md") or pages["reference/keys.md"]
        words = " ".join((field.description or "").split())[:20].replace("|", "\\|")
        if not field_types.held(field) and path[-1] != "type":
            assert words and f"| `{path[-1]}` | " in page, path
        assert re.sub(r"[*<\[\]]", ".", words) in re.sub(r"\\?[*<\[\]]", ".", page), path
    optimizer = pages["reference/keys/trainer.md"].partition("`[trainer.optimizer]`")[2]
    assert "| `lr` | `1e-5` | a number > 0 | " in optimizer


def test_the_reference_has_every_option_and_example(pages: dict[str, str]) -> None:
    for name, command in COMMANDS.items():
        told = pages["reference/commands.md"].partition(f"\n## silva {name}\n")[2].partition("\n## ")[0]
        assert f"silva {name} {command.example}" in told
        assert [each.flag for each in command.options if f"`{each.flag}" not in told] == []


def test_llms_txt_lists_pages_that_are_copied(pages: dict[str, str]) -> None:
    text = of_program("llms_txt")()
    links = re.findall(r"^- \[.+\]\(_sources/(.+)\.txt\)", text, re.MULTILINE)
    assert text.startswith("# Silva\n\n> ") and len(links) > 40 and {*links} <= {*pages}


@pytest.mark.slow
def test_sphinx_builds_it_without_a_warning_and_without_other_hosts(tmp_path: Path) -> None:
    for package in ("sphinx", "furo", "myst_parser"):
        pytest.importorskip(package, reason="needs pip install 'silva[docs]'")
    subprocess.run([sys.executable, PROGRAM, tmp_path / "pages"], check=True)
    sphinx = [sys.executable, "-m", "sphinx", "-W", "-n", "-q", "--keep-going"]
    built = subprocess.run([*sphinx, tmp_path / "pages", tmp_path / "site"], capture_output=True, text=True)
    assert (built.returncode, built.stderr) == (0, "")
    for page in (tmp_path / "site").rglob("*.html"):
        loads = re.findall(r"<(?:script|link|img)\b[^>]*?(?:src|href)=\"(https?://[^\"]+)", page.read_text())
        assert loads == [], page
    assert (tmp_path / "site" / "llms.txt").exists() and (
        tmp_path / "site" / "tutorials" / "tool.html"
    ).exists()
