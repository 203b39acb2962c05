"""What the command line returns: documented, and the same for every error of a kind."""

import re
from pathlib import Path

import pytest

from silva import cli, errors
from silva.orchestrator.interrupt import Interrupted

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
    def command(arguments):
        raise error

    return command


def test_every_error_has_its_code(monkeypatch, capsys):
    kinds = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type)}
    assert set(CODES) <= set(kinds)
    for name, kind in kinds.items():
        monkeypatch.setitem(cli._HANDLERS, "doctor", raising(kind("what went wrong")))
        assert cli.main(["doctor"]) == kind.exit_code == CODES.get(name, kind.exit_code)
        assert capsys.readouterr().err == "silva: what went wrong\n"
    assert {kind.exit_code for kind in kinds.values()} == {1, 2, 3}


def test_done_and_interrupted(monkeypatch):
    assert cli.main(["--version"]) == 0
    monkeypatch.setitem(cli._HANDLERS, "doctor", raising(KeyboardInterrupt()))
    assert cli.main(["doctor"]) == 130


def test_exit_in_somebodys_code_is_a_failure(monkeypatch, capsys):
    monkeypatch.setitem(cli._HANDLERS, "doctor", raising(SystemExit(0)))
    assert cli.main(["doctor"]) == 1
    assert capsys.readouterr().err == "silva: SystemExit: 0\n"


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
