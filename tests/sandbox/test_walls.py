"""Which walls are chosen, what a start that fails leaves behind, and what root cannot do behind walls."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tests.sandbox.calling import AUTO, NEEDS_WALLS, children, end_of_those_in_advance, play, runs

from silva.errors import ConfigError
from silva.sandbox import cgroups, starting
from silva.sandbox import walls as module
from silva.sandbox.process import Result, Sandbox, SandboxFault, works
from silva.sandbox.settings import SandboxSettings
from silva.sandbox.walls import Walls, _chosen, _problem, chosen, describe

pytestmark = NEEDS_WALLS


def standing(kind: str, as_nobody: bool = False) -> Walls:
    walls = Walls(kind, as_nobody)
    if problem := _problem(walls):
        pytest.skip(problem)
    return walls


WRITABLE = """
import os
found = []
for folder in ("/proc/sys", "/proc/irq", "/proc/bus", "/proc/fs"):
    for path, _, names in os.walk(folder):
        found += [f"{path}/{name}" for name in names]
for path in ["/proc/sysrq-trigger", *found]:
    try:
        os.close(os.open(path, os.O_WRONLY))
        print(path)
    except OSError:
        pass
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may write settings of the kernel")
@pytest.mark.parametrize("kind", ["bubblewrap", "userns"])
def test_root_without_landlock_writes_no_settings_of_the_kernel(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    walls = standing(kind)
    monkeypatch.setattr(module, "landlock_version", lambda: 0)
    assert "needs Landlock" in _problem(walls)  # a second wall behind the first
    assert runs(WRITABLE, walls=walls) == [Result("ok", "")]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may write settings of the kernel")
def test_walls_through_which_settings_of_the_kernel_are_written_do_not_stand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    walls = standing("bubblewrap")
    source = module._source("template.py")
    assert source.count("NOEXEC | RDONLY") == 1
    sources = {"template.py": source.replace("NOEXEC | RDONLY", "NOEXEC")}
    whole = module._source

    monkeypatch.setattr(module, "landlock_version", lambda: 0)
    monkeypatch.setattr(module, "_source", lambda name: sources.get(name) or whole(name))
    monkeypatch.setattr(module, "_compiled", module._compiled.__wrapped__)
    end_of_those_in_advance()
    assert "/proc/sys/kernel/core_pattern" in works(walls, True)
    end_of_those_in_advance()


@pytest.mark.skipif(not cgroups.parents(), reason="no control groups can be made here")
@pytest.mark.parametrize("keep_state", [False, True])
@pytest.mark.parametrize("kind", ["bubblewrap", "userns"])
def test_code_runs_within_the_control_groups(kind: str, keep_state: bool) -> None:
    walls = standing(kind, AUTO.as_nobody)  # type: ignore[union-attr]

    async def story(sandbox: Sandbox) -> list[Path]:
        assert (await sandbox.run("1")).output == "1\n"
        assert sandbox._process is not None
        pid, name = str(sandbox._process.started.pid), f"sandbox-{os.getpid()}-*"
        below = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        assert bool(below) is keep_state  # who holds the state
        groups = [group for parent in cgroups.parents() for group in parent.glob(name)]
        return [g.parent for g in groups if {pid, *below} <= {*(g / "cgroup.procs").read_text().split()}]

    assert play(story, walls, keep_state=keep_state) == list(cgroups.parents())


@pytest.mark.skipif(not cgroups.parents(), reason="no control groups can be made here")
@pytest.mark.parametrize("fault", ["no group", "no walls", "no program"])
def test_a_start_that_fails_is_told_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    def refused(*given: object) -> None:
        raise OSError(28, "No space left on device")

    def broken(*given: object) -> list[str]:
        return ["bwrap", "--surprise"] if fault == "no walls" else ["/nowhere/bwrap"]

    words = {"no group": "No space left", "no walls": "--surprise", "no program": "nowhere"}[fault]
    if fault == "no group":
        assert not works(Walls("bubblewrap"), True)  # its template stays
        monkeypatch.setattr(cgroups.ControlGroup, "add", refused)
    else:
        monkeypatch.setattr(module, "_bubblewrap", broken)
    walls = Walls("bubblewrap", as_nobody=fault == "no walls" and AUTO.as_nobody)  # type: ignore[union-attr]
    end_of_those_in_advance()
    files, processes = len(os.listdir("/proc/self/fd")), children()
    with pytest.raises(SandboxFault, match=words):
        runs("1", walls=walls)
    end_of_those_in_advance()
    assert len(os.listdir("/proc/self/fd")) == files and children() == processes
    assert not [group for parent in cgroups.parents() for group in parent.glob(f"sandbox-{os.getpid()}-*")]


def test_a_template_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(first: Sandbox) -> tuple[str, str]:
        assert first._process is None and (await first.run("1")).output == "1\n"
        assert first._process is not None
        end_of_those_in_advance()
        outer = first._process.started._template._process.pid
        inner = Path(f"/proc/{outer}/task/{outer}/children").read_text().strip()
        template = int(Path(f"/proc/{inner}/task/{inner}/children").read_text().split()[0])  # the eldest
        monkeypatch.setattr(starting, "START", 0.3)
        os.kill(template, signal.SIGSTOP)
        try:
            with pytest.raises(SandboxFault, match="timed out"):
                await Sandbox(first.settings, first.walls).run("1")
            monkeypatch.undo()
            second = Sandbox(first.settings, first.walls)
            answer = (await second.run("2")).output
            await second.close()
        finally:
            os.kill(template, signal.SIGCONT)
        return answer, (await first.run("3")).output

    assert play(story, Walls("bubblewrap") if not _problem(Walls("bubblewrap")) else None) == ("2\n", "3\n")


def test_without_any_walls_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_problem", lambda walls, packages: "not here")
    monkeypatch.setattr(module, "_chosen", _chosen.__wrapped__)  # without the cache
    with pytest.raises(ConfigError, match=r"no sandbox works here .*bubblewrap: not here.*Install bubble"):
        chosen(SandboxSettings())
    assert chosen(SandboxSettings(sandbox="none")).kind == "none"
    assert "no sandbox works here" in describe()


def test_the_log_says_once_which_walls_stand(caplog: pytest.LogCaptureFixture) -> None:
    _chosen.cache_clear()
    with caplog.at_level("INFO"):
        walls = chosen(SandboxSettings())
        chosen(SandboxSettings())
    assert isinstance(walls, Walls) and len(caplog.records) == 1 and "seccomp" in caplog.records[0].message
