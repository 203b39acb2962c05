"""docs/tutorials: files are written, commands run in the order of the page, and print what it shows."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fenced import ROOT, Block, blocks, commands

from silva.cli import main

PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
BEFORE = {"collapse": "environment", "agent": "environment"}
"""Tutorials that go on with the files of another."""
BY_HAND = ("make", ".", "silva envs play")  # installs, or waits for somebody who types
FAILS = {"silva attack first.py:contains --data rows.jsonl": 1}
ADDRESS = "http://127.0.0.1:8000"


def test_they_are_short() -> None:
    assert {path.stem: lines for path in PAGES if (lines := len(path.read_text().splitlines())) > 120} == {}


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_a_tutorial(
    page: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    served: Served,
) -> None:
    monkeypatch.chdir(tmp_path)
    if page.stem in BEFORE:
        for block in blocks(page.with_stem(BEFORE[page.stem])):
            write(block)
    said = ""
    for block in blocks(page):
        if write(block):
            continue
        if block.language == "text":
            for line in block.text.splitlines():
                found = re.search(numbers_apart(line), said)
                assert found, f"{page.name}:{block.line}: got\n{said[-2000:]}"
                if " before, " in line:
                    assert change(found[0]) == change(line), f"{page.name}:{block.line}: got {found[0]}"
        elif block.language == "python":
            exec(compile(block.text.replace(ADDRESS, served.url), page.name, "exec"), {})
            said = capsys.readouterr().out
        elif block.language == "":
            for words in commands(block):
                run(words, served)
            said = capsys.readouterr().out + "\n"


def write(block: Block) -> bool:
    """Whether the block is a file, which its first line names; it is then written."""
    named = re.match(r"# (\w+\.(?:py|toml))\n", block.text)
    if named:
        Path(named[1]).write_text(block.text)
    return named is not None


def numbers_apart(line: str) -> str:
    """What the page shows, as a pattern in which numbers may differ."""
    return r"\d[\d.,]*".join(re.escape(part) for part in re.split(r"\d[\d.,]*", line))


def change(line: str) -> int:
    """Whether a held-out result rose or fell between two intervals that do not touch."""
    _, low, high, _, _, low_after, high_after, *_ = map(float, re.findall(r"\d+(?:\.\d+)?", line))
    return (low_after > high) - (high_after < low)


def run(words: list[str], served: Served) -> None:
    shown = " ".join(words)
    if shown.startswith(BY_HAND):
        return
    if words[0] == "python":
        out = subprocess.run([sys.executable, *words[1:]], check=True, capture_output=True, text=True).stdout
        print(out)
    elif words[:2] == ["silva", "inference"]:
        served.start([word for word in words[1:] if word not in ("--port", "8000")])
    else:
        assert main(words[1:]) == FAILS.get(shown, 0), shown


class Served:
    """A server in another process, as in a second terminal; it chooses its port."""

    url = ADDRESS
    process: subprocess.Popen[str] | None = None

    def start(self, words: list[str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "silva", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self.process.stdout is not None
        found = next(filter(None, (re.search(r"http://\S+", line) for line in self.process.stdout)))
        self.url = found[0]


@pytest.fixture
def served() -> Iterator[Served]:
    server = Served()
    yield server
    if server.process is not None:
        server.process.kill()
        server.process.wait()
