"""What the command line returns: documented, and the same for every error of a kind."""

import asyncio
import gc
import re
import subprocess
import sys
from pathlib import Path

import pytest

from silva import cli, errors
from silva.commands import doctor
from silva.signals import Interrupted

DOCS = Path(__file__).parents[1] / "docs" / "files.md"
CODES = {
    "SilvaError": 1,
    "RecordError": 1,
    "EngineError": 1,
    "ContextOverflow": 1,
    "CheckpointError": 1,
    "LedgerError": 1,
    "OutOfMemory": 1,
    "ConfigError": 2,
    "RenderingError": 2,
    "CapabilityError": 2,
    "ModelError": 2,
    "RunFolderError": 2,
    "NonFiniteError": 3,
    "NoSignalError": 3,
}


def raising(error):
    def command(given):
        raise error

    return command


def test_every_error_has_its_code(monkeypatch, capsys):
    kinds = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type)}
    assert set(CODES) <= set(kinds)
    for name, kind in kinds.items():
        monkeypatch.setattr(doctor, "run", raising(kind("what went wrong")))
        assert cli.main(["doctor"]) == kind.exit_code == CODES.get(name, kind.exit_code)
        said = capsys.readouterr().err.partition(" (")[0]  # behind it the place, for what escaped
        assert said.strip() == "silva: what went wrong"
    assert {kind.exit_code for kind in kinds.values()} == {1, 2, 3}


def test_done_and_interrupted(monkeypatch):
    assert cli.main(["--version"]) == 0
    monkeypatch.setattr(doctor, "run", raising(KeyboardInterrupt()))
    assert cli.main(["doctor"]) == 130


def test_exit_in_somebodys_code_is_a_failure(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "run", raising(SystemExit(0)))
    assert cli.main(["doctor"]) == 1
    assert re.fullmatch(r"silva: SystemExit: 0 \(.*test_exit_codes\.py:\d+\)\n", capsys.readouterr().err)


async def leaving():
    raise SystemExit(0)


async def interrupting():
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "work, code, words", [(leaving, 1, "SystemExit: 0"), (interrupting, 130, "interrupted")]
)
def test_what_a_task_of_somebodys_code_ends_names_the_place(monkeypatch, capsys, work, code, words):
    async def run():
        task = asyncio.create_task(work())
        await asyncio.sleep(60)
        await task

    monkeypatch.setattr(doctor, "run", lambda given: asyncio.run(run()))
    assert cli.main(["doctor"]) == code
    gc.collect()  # a task that nobody asked speaks now, not while Python 3.11 reads a syntax tree
    line = work.__code__.co_firstlineno + 1
    assert re.fullmatch(rf"silva: {words} \(.*test_exit_codes\.py:{line}\)\n", capsys.readouterr().err)


def test_a_process_that_somebodys_code_ends_at_once_says_where():
    code = (
        "import os, sys\nfrom silva.process import report_exit\nreport_exit()\n"
        "if os.fork() == 0:\n    os._exit(0)\nprint(os.wait()[1], flush=True)\nos._exit(0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "0\n")
    assert done.stderr == "silva: ended by os._exit(0) (<string>:7)\n"


@pytest.mark.parametrize("command", ["rl", "sft"])
def test_an_interrupted_run(monkeypatch, command):
    target = {"rl": "silva.commands.train.train", "sft": "silva.commands.sft.supervise"}[command]

    def interrupted(*_, **__):
        raise Interrupted

    monkeypatch.setattr(target, interrupted)
    assert cli.main([command, "--environments.0.type", "bandit"]) == 130


def test_the_table_in_the_documentation_is_complete():
    section = DOCS.read_text().partition("## Exit codes")[2].partition("\n## ")[0]
    assert re.findall(r"^\| (\d+) \|", section, re.M) == ["0", "1", "2", "3", "130"]
    assert re.findall(r"\b\d+\b", cli.EXIT_CODES) == ["0", "1", "2", "3", "130"]
