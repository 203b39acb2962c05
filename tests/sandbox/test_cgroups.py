"""Control groups are gone once nobody needs them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.sandbox.calling import end_of_those_in_advance

from silva.sandbox import cgroups

pytestmark = pytest.mark.skipif(not cgroups.parents(), reason="no control groups can be made here")


def groups(process: int) -> list[Path]:
    return [group for parent in cgroups.parents() for group in parent.glob(f"sandbox-{process}-*")]


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    end_of_those_in_advance()
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("with_the_next", [True, False], ids=["with the next", "at the end"])
def test_a_group_whose_processes_go_late_is_removed(
    sleeper: subprocess.Popen[bytes], with_the_next: bool
) -> None:
    late = cgroups.ControlGroup(1 << 26, 10)
    late.add(sleeper.pid)
    late.remove()
    assert set(late.paths) <= set(groups(os.getpid()))
    sleeper.kill()
    sleeper.wait()
    if with_the_next:
        cgroups.ControlGroup(1 << 26, 10).remove()
    else:
        cgroups._at_the_end()
    assert not groups(os.getpid())


@pytest.mark.parametrize("reused", [False, True], ids=["dead", "its number is another's"])
def test_the_groups_of_a_killed_run_are_removed_at_the_next_start(reused: bool) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    process = os.getppid() if reused else gone.pid
    mine = cgroups.ControlGroup(1 << 26, 10)
    left = [parent / f"sandbox-{process}-1-abc" for parent in cgroups.parents()]
    for path in left:
        path.mkdir()
    cgroups.parents.cache_clear()
    assert cgroups.parents()
    assert not any(path.exists() for path in left) and all(path.exists() for path in mine.paths)
    mine.remove()


def test_a_group_that_cannot_be_limited_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    end_of_those_in_advance()
    with pytest.raises(OSError):
        cgroups.ControlGroup(-7, -7)
    assert not groups(os.getpid())


def test_no_two_groups_have_one_name() -> None:
    assert len({cgroups._name() for _ in range(100)}) == 100
