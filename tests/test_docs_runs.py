"""What pages show is run where that is cheap: code, and commands that need no model, no network and no time.

Tutorials are run in test_tutorials.py, what is trained from Python in test_docs_blocks.py.
"""

from __future__ import annotations

import ast
import asyncio
import importlib
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest
from tests import test_docs_blocks as shown
from tests.conversion.test_configs import CASES
from tests.fenced import ROOT
from tests.monitoring.fake_run import make_run

from silva.cli import main
from silva.storage import rollouts
from silva.storage.rollouts import RolloutRow

reader = shown.reader

pytestmark = pytest.mark.slow
INSIDE = {
    "Mine = _recipe(": "silva.algorithms.recipes",
    "class PositiveLoss(": "silva.algorithms.losses",
    "def best_only(": "silva.algorithms.advantages",
}
"""Code that stands in a module of Silva, by its beginning."""
ELSEWHERE = ("silva.train(", "OpenAI(", "tinker.")
"""Signs of code that needs a run or a server: tests of theirs have one."""
CODE = {
    place: block.text
    for place, block in shown.of("python").items()
    if "tutorials" not in place and not any(each in block.text for each in ELSEWHERE)
}


def served() -> dict[str, Any]:
    """An engine that is called as the real one can be, and what its page leaves to the reader."""
    from silva.engines.local.engine import LocalEngine

    runs = SimpleNamespace(parameters=lambda name: {})
    return {
        "engine": create_autospec(LocalEngine, instance=True), "runs": runs, "alpha": 32.0, "rank": 16,
        "tokens": (1, 2), "params": None, "look": lambda logits, row: None,
    }  # fmt: skip


@pytest.mark.parametrize("place", CODE)
def test_code_runs(place: str, reader: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(reader)
    monkeypatch.setenv("HOME", str(reader))
    (reader / "data" / "gsm8k").mkdir(parents=True)
    (reader / "data" / "gsm8k" / "test.jsonl").write_text('{"question": "2 + 2?", "answer": "#### 4"}\n')
    text = CODE[place]
    inside = next((module for sign, module in INSIDE.items() if sign in text), "")
    names = {**vars(importlib.import_module(inside))} if inside else {"__name__": "shown"}
    if "engine." in text:
        names |= served()
    if "runs/thoughts" in text:
        finished(reader / "runs" / "thoughts", monkeypatch)
    text = text.replace("LOSSES = {...,", "LOSSES = {**LOSSES,").replace("S = {...,", "S = {**ADVANTAGES,")
    before = {*names}
    run(text, place, names)
    assert {*names} > before or "(" in text, "it neither defines nor calls anything"


def run(text: str, place: str, names: dict[str, Any]) -> None:
    """Raises what the code raises, also from what it awaits."""
    running = eval(compile(text, place, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
    if running is not None:
        asyncio.run(running)


@pytest.mark.parametrize("text", ["from silva import nothing", "import asyncio\nawait asyncio.nothing()"])
def test_code_that_does_not_run_is_noticed(text: str) -> None:
    with pytest.raises((ImportError, AttributeError)):
        run(text, "here", {})


def finished(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with rollouts of one step and a best checkpoint."""
    from silva.storage.checkpoints import CheckpointStore

    make_run(run, steps=1, rollouts=2)
    read = rollouts.read_rollouts

    def thoughts(file: Path) -> list[RolloutRow]:
        rows = list(read(file))
        turns = [replace(row.trajectory.turns[0], rewards={"action_prob": 0.5}) for row in rows]
        return [
            replace(row, trajectory=replace(row.trajectory, turns=(turn,)))
            for row, turn in zip(rows, turns, strict=True)
        ]

    monkeypatch.setattr(rollouts, "read_rollouts", thoughts)
    monkeypatch.setattr(CheckpointStore, "best", lambda self: (1, run))


IMPORTED = {"trl_config.yaml": "trl", "mine.py": "trl", "run_qwen2-7b.sh": "verl", "ppo.yaml": "ragen",
            "rl.toml": "prime-rl", "sft.py": "trl-sft"}  # fmt: skip
"""Of which framework are the files that docs/import.md names."""


def cheap(words: list[str]) -> bool:
    """Whether a command line of `silva` needs nothing but files that exist here, and little time."""
    match words:
        case ["schema" | "diff", *_]:
            return True
        case ["cluster", "plan", "@", file]:
            return (ROOT / file).exists()
        case ["view", *_]:
            return "--export" in words
        case ["monitor", *_]:
            return len(words) > 1 and "wandb" not in " ".join(words)
        case ["import", name]:
            return name in IMPORTED and name.endswith((".sh", ".toml"))
    return False


RUN = {
    line: own
    for line, words in shown.LINES.items()
    if "tutorials" not in line and words[0].endswith("silva") and cheap(own := words[1:])
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("made") / "lake", steps=2, rollouts=4)


@pytest.mark.parametrize("line", RUN)
def test_a_command_does_what_it_says(line: str, reader: Path, made: Path, capsys: Any) -> None:
    for name in ("lake", "a", "b"):
        shutil.copytree(made, reader / "runs" / name)
    (reader / "examples").symlink_to(ROOT / "examples")
    for name, system in IMPORTED.items():
        contents = CASES[system][0]
        (reader / name).write_text([*contents.values()][-1])
    words = RUN[line]
    code = main(words[: words.index(">")] if ">" in words else words)
    said = capsys.readouterr()
    assert code == 0 or (words[0] == "cluster" and "missing: the cluster's token" in said.out)
    assert (said.out + said.err).strip() and "Traceback" not in said.err
