"""`silva new environment NAME`: what it writes works as it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from silva import cli
from silva.commands.new import write_environment
from silva.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_what_is_written_passes_its_own_test_and_the_check(folder: Path, capsys) -> None:
    assert cli.main(["new", "environment", "my_world"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "my_world.py and test_my_world.py are written"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_my_world.py"],
        capture_output=True, text=True, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0 and "3 passed" in done.stdout, done.stdout + done.stderr
    assert cli.main(["envs", "check", "my_world.py"]) == 0


def test_it_is_short_and_formatted(folder: Path) -> None:
    write_environment("my_world", folder)
    assert len((folder / "my_world.py").read_text().splitlines()) < 50
    ruff = Path(sys.executable).with_name("ruff")
    if not ruff.exists():
        pytest.skip("ruff is not installed")
    for command in (["check", "--select", "E,F,I,UP,B,SIM,RUF"], ["format", "--check"]):
        done = subprocess.run(
            [str(ruff), *command, "--line-length", "110", "."], cwd=folder, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("taken", ["my_world.py", "test_my_world.py"])
def test_nothing_is_overwritten(folder: Path, capsys, taken: str) -> None:
    (folder / taken).write_text("mine")
    assert cli.main(["new", "environment", "my_world"]) == 2
    assert capsys.readouterr().err == f"silva: silva new environment: {taken} exists; nothing was written\n"
    assert [(path.name, path.read_text()) for path in folder.iterdir()] == [(taken, "mine")]


FORM = "expected a name for a Python file"


@pytest.mark.parametrize(
    ("name", "place", "message"),
    [
        *((name, ".", FORM) for name in ["My-World", "class", "2worlds", "../world", "", "World", "_world"]),
        ("bandit", ".", "bandit is an environment of Silva"),
        ("my_world", "gone", "No such file or directory"),
    ],
)
def test_a_name_or_a_folder_that_is_none(folder: Path, name: str, place: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        write_environment(name, folder / place)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("arguments", [[], ["environment"], ["environment", "a", "b"], ["reward", "mine"]])
def test_wrong_input(folder: Path, capsys, arguments: list[str]) -> None:
    assert cli.main(["new", *arguments]) == 2
    assert "expected environment NAME" in capsys.readouterr().err
