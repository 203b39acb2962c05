"""Each attack wins without walls and loses with them."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.sandbox.attacks import ATTACKS, Attack
from tests.sandbox.calling import runs

from silva.sandbox import cgroups
from silva.sandbox.process import Result
from silva.sandbox.walls import Walls, _problem

pytestmark = pytest.mark.slow

KINDS = [Walls("bubblewrap"), Walls("bubblewrap", True), Walls("userns"), Walls("userns", True)]
PROBLEMS = {walls: _problem(walls) for walls in KINDS if os.geteuid() == 0 or not walls.as_nobody}
STANDING = [walls for walls, problem in PROBLEMS.items() if not problem]
# Whoever starts a user namespace, what stands around it is the same; one of the two is enough.
ATTACKED = [*STANDING[:2], *STANDING[-1:]] if len(STANDING) == 4 else STANDING


def called(walls: Walls) -> str:
    return walls.kind + (" as nobody" if walls.as_nobody else "")


@pytest.mark.parametrize("walls", KINDS, ids=called)
def test_these_walls_stand_here(walls: Walls) -> None:
    if walls not in PROBLEMS:
        pytest.skip("the tests run as an ordinary user, and so does every sandbox")
    if problem := PROBLEMS[walls]:
        pytest.skip(f"this machine cannot build them: {problem.splitlines()[-1]}")
    assert walls in STANDING


def test_there_are_enough_of_them() -> None:
    assert len(ATTACKS) >= 60


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    """The port of a server that takes connections and datagrams."""
    with socket.create_server(("127.0.0.1", 0)) as tcp:
        thread = threading.Thread(target=_accept, args=(tcp,), daemon=True)
        thread.start()
        yield tcp.getsockname()[1]
        tcp.shutdown(socket.SHUT_RDWR)  # to close it would leave the thread in accept()
        thread.join()


def _accept(listening: socket.socket) -> None:
    try:
        while True:
            listening.accept()[0].close()
    except OSError:
        pass


@pytest.fixture
def host(tmp_path: Path, server: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    (tmp_path / "secret").write_text("SECRET")
    name = uuid.uuid4().hex
    unix, abstract = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    path = f"/tmp/{name}.sock"
    unix.bind(path)
    abstract.bind(f"\0{name}")
    for each in (unix, abstract):
        each.listen()
        threading.Thread(target=_accept, args=(each,), daemon=True).start()
    victim = subprocess.Popen(["sleep", "60"], env={"SILVA_SECRET": "1"})
    home = Path.home()
    (home / name).write_text("private")
    yield {
        "pid": victim.pid, "group": os.getpgrp(), "victim": victim.pid, "uid": os.getuid(),
        "secret": str(tmp_path / "secret"), "mark": str(tmp_path / "mark"), "shared": name, "port": server,
        "unix": path, "abstract": name, "home": str(home), "private": name, "name": platform.node(),
    }  # fmt: skip
    victim.kill()
    victim.wait()
    for each in (unix, abstract):
        each.shutdown(socket.SHUT_RDWR)  # its thread ends
        each.close()
    for left in (home / name, path, f"/tmp/{name}.big", f"/tmp/{name}"):
        Path(left).unlink(missing_ok=True)
    shutil.rmtree(f"/tmp/{name}.many", ignore_errors=True)


def played(attack: Attack, host: dict[str, Any], walls: Walls) -> tuple[bool, Result]:
    """Whether the attack won, and what its code said."""
    limits = attack.down if walls.kind == "none" else attack.up
    (result,) = runs(f"HOST = {host!r}\n{attack.code}", walls=walls, **{"cpu_seconds": 5} | limits)
    marks = [Path(f"{folder}/{host['shared']}") for folder in ("/tmp", "/dev/shm")]
    marked = [mark for mark in (*marks, Path(host["mark"])) if mark.exists()]
    for mark in marked:
        mark.unlink()
    return "WON" in result.output.splitlines() or bool(marked), result


@pytest.mark.parametrize("walls", ATTACKED, ids=called)
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_wins_without_walls_and_loses_with_them(
    name: str, walls: Walls, host: dict[str, Any]
) -> None:
    attack = ATTACKS[name]
    if attack.together and not cgroups.parents():
        pytest.skip("no control groups can be made here")
    won, result = played(attack, host, walls)
    assert not won, result
    if attack.network:
        assert result.network_attempts > 0
    if walls == STANDING[0]:
        won, result = played(attack, host, Walls("none"))
        if not won:
            pytest.skip(f"loses on this machine without walls too: {result.how}, {result.output[-100:]!r}")
