"""What stands in fences on any page: configurations load, code compiles and names what exists, and command
lines are read by the commands.

Nothing is trained here: the tutorials run in test_tutorials.py, and much code in the tests of what it shows.
"""

from __future__ import annotations

import ast
import importlib
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.fenced import ROOT, Block, blocks, commands

import silva
from silva.cli import ALIASES, main
from silva.commands import COMMANDS, asked
from silva.commands.attack import reward_settings
from silva.commands.command import CONFIGURED
from silva.config.load import load
from silva.config.schema import RunConfig
from silva.registries import REGISTRIES

PAGES = [
    *(ROOT / name for name in ("README.md", "AGENTS.md")),
    *(path for folder in ("docs", "examples", "skills") for path in sorted((ROOT / folder).rglob("*.md"))),
]
FOUND = {f"{page.relative_to(ROOT)}:{each.line}": each for page in PAGES for each in blocks(page)}
LINES = {f"{place}: {' '.join(words)}": words for place, block in FOUND.items() for words in commands(block)}
MINE = """
from silva.algorithms.assign import assign
from silva.algorithms.losses import Loss, LossSettings


class Dppo(LossSettings):
    max_tv: float = 0.1


def later_turns(samples, groups, recipe):
    return assign(samples, groups, recipe)


def lenient(reply, answer):
    return 0.0


my_reward = lenient
dppo = Loss(Dppo, lambda *, logprobs: (logprobs, {}))
"""
"""What a reader may have written in the files that the pages only name."""


def of(language: str) -> dict[str, Block]:
    return {place: block for place, block in FOUND.items() if block.language == language}


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adopted: None) -> Path:
    """A reader's folder: the files that pages show or name."""
    monkeypatch.chdir(tmp_path)
    for name in ("mine.py", "rewards.py"):
        Path(name).write_text(MINE)
    Path("run.toml").write_text('[placement]\ntype = "services"\n')
    for block in FOUND.values():
        if named := re.match(r"# (\w+\.(?:py|toml))\n", block.text):
            Path(named[1]).write_text(block.text)
        elif "class Towns(" in block.text:
            Path("towns.py").write_text(block.text)
    return tmp_path


def test_they_are_found() -> None:
    assert len(of("toml")) > 50 and len(of("python")) > 20 and len(LINES) > 100


@pytest.mark.slow
@pytest.mark.parametrize("place", of("toml"))
def test_a_configuration_loads(place: str, reader: Path) -> None:
    values = tomllib.loads(FOUND[place].text)
    if values.keys() <= RunConfig.model_fields.keys():
        world = values.get("environments", {"type": "bandit"})
        if isinstance(world, dict):  # a table of the environment before it
            values["environments"] = [{"type": "bandit"} if "type" in world else SOME_ROWS | world]
        load([], REGISTRIES, values=values, env={})
    else:
        assert values.keys() == {"project"}  # of a package


SOME_ROWS = {"type": "dataset", "path": "rows.jsonl", "reward": "exact_match"}


@pytest.mark.parametrize("place", of("python"))
def test_code_compiles_and_what_it_imports_exists(place: str) -> None:
    text = FOUND[place].text.replace("{...,", "{")
    tree = compile(text, place, "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("silva"):
            module = importlib.import_module(str(node.module))
            assert [name.name for name in node.names if not hasattr(module, name.name)] == []


def test_what_pages_train_from_python_can_be_trained(reader: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (reader / "lake.toml").write_text('[[environments]]\ntype = "frozen_lake"\n')
    (reader / "configs").symlink_to(ROOT / "configs")
    asked_for: list[Any] = []

    def train(what: Any, **flags: bool) -> SimpleNamespace:
        given: dict[str, Any] = {"values": what} if isinstance(what, dict) else {}
        asked_for.append(load([] if given else [f"@{what}"], REGISTRIES, env={}, **given).config.name)
        return SimpleNamespace(summary={"eval_after": []}, weights="", report="")

    monkeypatch.setattr(silva, "train", train)
    for place in ("README.md", "docs/configuration.md"):
        for name, block in of("python").items():
            if name.startswith(place) and "silva.train(" in block.text:
                exec(block.text, {})
    assert asked_for == ["smoke", "run", "lake"]


@pytest.mark.slow
@pytest.mark.parametrize("line", LINES)
def test_a_command_line_is_read(line: str, reader: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = LINES[line]
    while re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    if "-m" in words and "silva" in words:  # torchrun, python
        words = words[words.index("silva", words.index("-m")) :]
    program = words[0].removeprefix(".venv/bin/")
    if program == "make":
        assert f"\n{words[1]}:" in (ROOT / "Makefile").read_text()
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert {name for each in re.findall(r"silva\[(.*?)\]", line) for name in each.split(",")} <= {*extras}
    elif program == "python" and words[1] != "-m":
        assert (ROOT / words[1]).exists() or (reader / words[1]).exists()
    elif program == "silva":
        monkeypatch.setattr(asked, "existing", lambda flag, weights: weights)
        own = words[1 : words.index(">") if ">" in words else None]
        understood([word for word in own if word != "..."])


def understood(words: list[str]) -> None:
    """As `silva` reads the words, up to the configuration that they come to."""
    if "--help" in words:
        assert main(words) == 0
        return
    name = ALIASES.get(words[0], words[0])
    command = COMMANDS[name]
    given = command.read(name, words[1:])
    rest = [existing_file(word) for word in given.rest]
    before = next((i for i, word in enumerate(rest) if word.startswith(("@", "-"))), len(rest))
    keys = rest[before:]
    if CONFIGURED not in command.usage and not any("@" in form or "--key" in form for form in command.usage):
        assert [word for word in keys if word.startswith("-")] == []
    elif name in ("envs", "attack") and "@" not in keys:
        assert not keys or rest[:before], "keys of something"
    elif "--regrade" in given:
        reward_settings([given.options["--reward"], *keys])
    elif keys or name in ("rl", "sft"):
        front = [*asked._engine(given), *asked._counts(given)] if name in ("eval", "synth") else []
        load([*front, *keys], REGISTRIES, env={"SILVA_ENVIRONMENTS": '[{"type": "bandit"}]'})


def existing_file(word: str) -> str:
    """A file of the repository by its place, and in place of a reader's own one that any key fits."""
    if not word.endswith(".toml"):
        return word
    if (ROOT / word).exists():
        return str(ROOT / word)
    Path(word).write_text("") if not Path(word).exists() else None
    return word
