"""How the supervisor and its processes end: by themselves, by a signal, killed; and that nothing is left."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.placement.processes import SOON, Park, end_of, gone, lives

from silva.placement import supervisor
from silva.placement.supervisor import Running, Supervisor
from silva.signals import is_stopped

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("handlers")]
DRIVER = """
import asyncio, json, pathlib, sys
from silva.placement.supervisor import Part, Supervisor

parts = [Part(**each) for each in json.loads(sys.argv[1])]
say = lambda text: print(text, flush=True)
sys.exit(asyncio.run(Supervisor(parts, log=lambda line: None, say=say).run()))
"""


@pytest.mark.parametrize("code", [0, 3])
async def test_the_exit_code_of_the_orchestrator_comes_through(folder: Path, code: int) -> None:
    park = Park(folder, "trainer", "inference")
    async with park.supervised() as task:
        await park.until(lambda: park.up, "all is up")
        park.end(code)
        assert await end_of(task) == code
    assert park.said == [] and {*park.lines} == {"trainer: trainer begins", "inference: inference begins"}
    assert park.text("arguments") == "first 1\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_to_everybody_reaches_the_orchestrator_once_and_everything_ends(
    folder: Path, number: signal.Signals
) -> None:
    park = Park(folder)
    async with park.supervised() as task:
        await park.until(lambda: park.up, "all is up")
        for pid in (*park.pids("trainer"), *park.pids("orchestrator"), os.getpid()):
            os.kill(pid, number)
        assert await end_of(task) == 130
    assert park.text("signals").split() == ["SIGUSR2"]  # a part listens to no other
    assert park.said == []


@pytest.mark.parametrize("sent", [["SIGHUP", "SIGHUP SIGINT"], ["SIGINT", "SIGINT", "SIGINT"]], ids=str)
async def test_every_signal_is_passed_on_but_that_of_a_terminal_which_closes_twice(
    folder: Path, sent: Sequence[str]
) -> None:
    """The second Ctrl-C means something else than the first."""
    park = Park(folder)
    park.touch("stubborn")
    async with park.supervised():
        await park.until(lambda: park.up, "all is up")
        for count, names in enumerate(sent, 1):
            for name in names.split():
                os.kill(os.getpid(), signal.Signals[name])
            await park.until(lambda count=count: len(park.text("signals").split()) == count, "it was told")
    assert park.text("signals").split() == ["SIGUSR2"] * len(sent)


@pytest.mark.parametrize("at", ["trainer", "inference", "orchestrator", "orchestrator again"])
async def test_a_signal_while_parts_are_started_is_not_lost(
    folder: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """It comes when the process is there, and nobody has noted it down yet."""
    original = asyncio.create_subprocess_exec
    park, starts = Park(folder, "trainer", "inference"), iter(["trainer", "inference", "orchestrator"])

    async def start(*argv: str, **options: Any) -> asyncio.subprocess.Process:
        process = await original(*argv, **options)
        if next(starts, "orchestrator again") == at:
            told = asyncio.Event()
            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, told.set)
            os.kill(os.getpid(), signal.SIGINT)  # the loop sees signals in their order
            os.kill(os.getpid(), signal.SIGUSR1)
            await told.wait()
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)

    async with park.running() as task:
        if at == "orchestrator again":
            await park.until(lambda: park.up, "all is up")
            os.kill(park.pids("orchestrator")[0], signal.SIGKILL)
        assert await end_of(task) == 130
    assert gone(park, 10)
    ran = [name for name in (*park.services, "orchestrator") if park.pids(name)]
    last = ["trainer", "inference", "orchestrator"].index(at.split()[0])
    assert len(ran) <= last + 2  # signals are held while a process is made, so the next one may be begun


@pytest.mark.skipif(sys.platform != "linux", reason="looks for states of processes in /proc")
def test_ctrl_z_stops_everybody_and_nobody_is_lost_when_they_go_on(folder: Path) -> None:
    park = Park(folder, "trainer", "inference")
    process = driven(park)
    wait_for(lambda: park.up)
    everyone = [process.pid, *park.everyone()]
    process.send_signal(signal.SIGTSTP)
    wait_for(lambda: all(map(is_stopped, everyone)))
    process.send_signal(signal.SIGCONT)
    wait_for(lambda: not any(map(is_stopped, everyone)))
    for name in park.services:  # and they are asked again
        (folder / f"{name}.asked").unlink()
    wait_for(lambda: park.up)
    park.end(0)
    output, _ = process.communicate(timeout=SOON)
    assert (process.returncode, output) == (0, "")
    assert {name: len(park.pids(name)) for name in park.services} == {"trainer": 1, "inference": 1}


async def test_the_orchestrator_ends_before_the_parts_that_it_uses(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []
    no_more = Supervisor._no_more

    async def noted(made: Supervisor, running: Running) -> None:
        ended.append(running.part.name)
        await no_more(made, running)

    monkeypatch.setattr(Supervisor, "_no_more", noted)
    park = Park(folder, "trainer", "inference")
    async with park.supervised() as task:
        await park.until(lambda: park.up, "all is up")
        task.cancel()
    assert ended == ["orchestrator", "trainer", "inference"]


async def test_an_orchestrator_that_is_killed_while_it_ends_is_not_started_again(folder: Path) -> None:
    park = Park(folder)
    park.touch("stubborn")
    async with park.supervised() as task:
        await park.until(lambda: park.up, "all is up")
        os.kill(os.getpid(), signal.SIGINT)
        await park.until(lambda: park.text("signals"), "it was told")
        os.kill(park.pids("orchestrator")[0], signal.SIGKILL)
        assert await end_of(task) == 128 + signal.SIGKILL
    assert len(park.pids("orchestrator")) == 1


@pytest.mark.parametrize("how", ["killed", "ended"])
async def test_a_part_that_ends_leaves_no_children(folder: Path, how: str) -> None:
    park = Park(folder)
    async with park.supervised():
        await park.until(lambda: park.up and park.text("trainer.child"), "all is up")
        child = int(park.text("trainer.child"))
        assert lives(child)
        if how == "killed":
            os.kill(park.pids("trainer")[0], signal.SIGKILL)
        else:
            park.end()
        await park.until(lambda: not lives(child), "the child is gone")


async def test_a_child_that_left_its_group_and_holds_the_output_is_not_waited_for(folder: Path) -> None:
    park = Park(folder)
    park.touch("trainer.daemon")
    async with park.supervised():
        await park.until(lambda: park.up and park.text("trainer.child"), "all is up")
        child = int(park.text("trainer.child"))
        (folder / "trainer.daemon").unlink()
        os.kill(park.pids("trainer")[0], signal.SIGKILL)
        try:
            await park.until(lambda: len(park.pids("trainer")) == 2, "it runs again")
        finally:
            os.kill(child, signal.SIGKILL)
    assert len(park.pids("trainer")) == 2


async def test_a_part_that_is_stopped_does_not_keep_the_end_from_coming(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "GRACE", 0.5)
    monkeypatch.setattr(supervisor, "TICK", 0.5)
    park = Park(folder)
    async with park.supervised() as task:
        await park.until(lambda: park.up, "all is up")
        park.end(0)
        os.kill(park.pids("trainer")[0], signal.SIGSTOP)
        assert await end_of(task) == 0


def driven(park: Park) -> subprocess.Popen[str]:
    """The supervisor in a process of its own."""
    parts = [
        {name: value for name in ("name", "argv", "address") if (value := getattr(part, name)) is not None}
        for part in park.parts()
    ]
    argv = [sys.executable, "-c", DRIVER, json.dumps(parts)]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)


def wait_for(condition: Callable[[], Any]) -> None:
    until = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills a stopped process with its parent")
@pytest.mark.parametrize("stopped", [(), ("trainer", "inference", "orchestrator")])
def test_a_supervisor_that_is_killed_takes_everything_with_it(folder: Path, stopped: Sequence[str]) -> None:
    park = Park(folder, "trainer", "inference")
    process = driven(park)
    try:
        wait_for(lambda: park.up)
        if stopped:  # and not yet noticed
            process.send_signal(signal.SIGSTOP)
        for name in stopped:
            os.kill(park.pids(name)[-1], signal.SIGSTOP)
        process.kill()
        parts = [pid for name in (*park.services, "orchestrator") for pid in park.pids(name)]
        until = time.monotonic() + 120
        while any(map(lives, parts)) and time.monotonic() < until:
            time.sleep(0.01)
        assert [pid for pid in parts if lives(pid)] == []
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
