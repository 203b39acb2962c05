"""Private folders of processes that end by themselves, or are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from silva import scratch
from silva.errors import ConfigError

HOLDS = """
import subprocess, sys
from silva.scratch import private_folder
if "alone" in sys.argv:  # without a shell
    def refused(*arguments, **options):
        raise OSError
    subprocess.Popen = refused
with private_folder("sockets") as folder:
    (folder / "trainer.sock").touch()
    print(folder, flush=True)
    sys.stdin.read()
"""


def holder(folder: Path, *words: str, **variables: str) -> tuple[subprocess.Popen[str], Path]:
    """A process with a private folder, which it keeps until its stdin ends."""
    environment = {**os.environ, "TMPDIR": str(folder), **variables}
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS, *words], env=environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def killed(folder: Path, *words: str) -> Path:
    process, made = holder(folder, *words)
    process.kill()
    process.communicate()
    return made


@pytest.mark.slow
def test_what_killed_processes_leave_is_removed_by_the_next_and_nothing_else(tmp_path: Path) -> None:
    others = [tmp_path / "silva-x3k1", tmp_path / "silva-socket", tmp_path / "sockets"]
    for other in others:
        other.mkdir()
    living, held = holder(tmp_path)
    for _ in range(10):
        left = killed(tmp_path, "alone")
        assert {*tmp_path.iterdir()} == {*others, held, left} and (held / "trainer.sock").exists()
    last, own = holder(tmp_path)
    assert {*tmp_path.iterdir()} == {*others, held, own} and own.stat().st_mode & 0o777 == 0o700
    for process in (last, living):
        process.communicate()
    assert {*tmp_path.iterdir()} == {*others}


def test_what_a_killed_process_leaves_is_gone_soon(tmp_path: Path) -> None:
    for number in (signal.SIGKILL, signal.SIGTERM):
        process, made = holder(tmp_path)
        assert (made / "trainer.sock").exists()
        process.send_signal(number)
        process.communicate()
        until = time.monotonic() + 120
        while made.exists() and time.monotonic() < until:
            time.sleep(0.01)
        assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.parametrize("late", [False, True])
def test_a_signal_to_all_processes_as_clusters_send_it_leaves_nothing(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, late: bool
) -> None:
    """Also if the shell that removes the folder is slow to start."""
    programs = tmp_path_factory.mktemp("bin")
    (programs / "sh").write_text(
        f"#!{sys.executable} -S\nimport os, sys, time\ntime.sleep(1)\nos.execv('/bin/sh', sys.argv)\n"
    )
    (programs / "sh").chmod(0o755)
    path = f"{programs}:{os.environ['PATH']}" if late else os.environ["PATH"]
    process, made = holder(tmp_path, PATH=path)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        for pid in [*children, process.pid]:
            os.kill(int(pid), number)
    process.communicate()
    until = time.monotonic() + 120
    while made.exists() and time.monotonic() < until:
        time.sleep(0.01)
    assert children and list(tmp_path.iterdir()) == []


def test_what_was_left_in_shared_memory_is_removed_by_the_next_trainer(tmp_path: Path) -> None:
    left = tmp_path / "silva-weights-x3k1v9qa"
    (left / "version_1").mkdir(parents=True)
    with scratch.private_folder("weights", parent=tmp_path) as folder:
        assert [*tmp_path.iterdir()] == [folder]
    assert not folder.exists()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Temporary files lie in a folder with a long name."""
    monkeypatch.setattr(scratch.tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_short_path_lies_elsewhere_if_the_folder_of_temporary_files_is_long(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = len(str(place)) + len("/silva-sockets-12345678")
    with scratch.private_folder("sockets", longest=longest) as folder:
        assert folder.parent == place and len(str(folder)) == longest
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    with scratch.private_folder("sockets", longest=longest - 1) as folder:
        assert folder.parent == Path("/tmp") and folder.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()
    with pytest.raises(
        ConfigError, match=f"TMPDIR = {place}: got a path of {len(str(place))} bytes, expected"
    ):
        scratch.private_folder("sockets", longest=24).__enter__()
