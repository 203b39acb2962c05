"""How sandboxes start and end: templates, those that are started in advance, and what may be left of them."""

from __future__ import annotations

import asyncio
import gc
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from tests.sandbox.calling import (
    NEEDS_WALLS,
    children,
    comes_true,
    end_of_those_in_advance,
    play,
    runs,
    states,
)

from silva.sandbox import starting
from silva.sandbox.process import Result, Sandbox
from silva.sandbox.settings import SandboxSettings
from silva.sandbox.walls import Walls, _problem

pytestmark = NEEDS_WALLS


@pytest.mark.parametrize("kind", ["bubblewrap", "none"])
def test_a_sandbox_that_was_never_called_leaves_no_process(kind: str) -> None:
    """With kept state a second process waits from the start on."""
    walls = Walls(kind)
    if problem := _problem(walls) if kind != "none" else "":
        pytest.skip(problem)
    made = starting._Kind(walls, SandboxSettings(keep_state=True), ()).started()
    below = Path(f"/proc/{made.pid}/task/{made.pid}/children")
    assert comes_true(below.read_text)
    second = Path(f"/proc/{below.read_text().split()[0]}")
    made.end()
    assert comes_true(lambda: not second.exists())


def test_code_without_walls_ends_with_its_sandbox_too(tmp_path: Path) -> None:
    code = f"import time\nwhile True:\n    open({str(tmp_path / 'beat')!r}, 'w').close(); time.sleep(0.01)"

    async def story(sandbox: Sandbox) -> None:
        call = asyncio.create_task(sandbox.run(code))
        while not (tmp_path / "beat").exists():
            await asyncio.sleep(0.01)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)

    play(story, Walls("none"), seconds=30.0)
    (tmp_path / "beat").unlink()
    time.sleep(0.2)
    assert not (tmp_path / "beat").exists()


def test_a_fork_of_the_host_has_none_of_its_sandboxes() -> None:
    """Two that answer each other's calls would mix up episodes, and an end of one is no end of the other."""

    async def story(sandbox: Sandbox) -> Result:
        await sandbox.run("1")
        starting._asked.join()
        assert starting._next
        child = os.fork()
        if child == 0:
            empty = not starting._next and not starting._templates and not starting._all
            gc.collect()
            os._exit(0 if empty else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        return await sandbox.run("2")

    assert play(story).output == "2\n"


def test_few_sandboxes_are_started_in_advance_and_their_descriptors_are_closed() -> None:
    def story(memory: int) -> None:
        assert runs("1", memory_mb=memory)[0].output == "1\n"

    story(100)
    end_of_those_in_advance()
    before = len(os.listdir("/proc/self/fd"))
    for memory in range(101, 108):
        story(memory)
    starting._asked.join()
    assert len(starting._next) == starting.MOST_AHEAD
    for started in starting._next.values():
        os.kill(started.pid, signal.SIGKILL)
        while started.waits:
            time.sleep(0.01)
    del started
    for memory in range(104, 108):
        story(memory)
    end_of_those_in_advance()
    assert len(os.listdir("/proc/self/fd")) == before


def test_one_that_was_stopped_while_it_waited_is_not_taken() -> None:
    async def story(sandbox: Sandbox) -> tuple[Result, int]:
        await sandbox.run("1")
        starting._asked.join()
        stopped = starting._next[next(reversed(starting._next))]
        os.kill(stopped.pid, signal.SIGSTOP)
        while "T" not in states(stopped.pid):
            time.sleep(0.01)
        await sandbox.close()
        return await sandbox.run("6 * 7"), stopped.pid

    result, stopped = play(story, memory_mb=110)
    assert result.output == "42\n" and not Path(f"/proc/{stopped}").exists()


# The start in advance waits for a template that was stopped.
STUCK = """
import asyncio, os, signal, threading
from pathlib import Path
from silva.sandbox import starting
from silva.sandbox.process import Sandbox
from silva.sandbox.settings import SandboxSettings

def stop(process):
    print(process, flush=True)
    os.kill(process, signal.SIGSTOP)
    for child in Path(f"/proc/{process}/task/{process}/children").read_text().split():
        stop(int(child))

async def story():
    sandbox = Sandbox(SandboxSettings())
    await sandbox.run("1")
    starting._asked.join()
    (kind, ahead), = starting._next.items()
    ahead.end()
    await sandbox.close()
    for template in starting._templates.values():
        stop(template._process.pid)
    starting.START, forked, waits = 1e6, starting._Template.fork, threading.Event()
    starting._Template.fork = lambda *given: (forked(*given), waits.set())
    starting._next.clear()
    starting._asked.put(kind)
    return waits.wait(60)

print("waits" if asyncio.run(story()) else "was never asked")
"""


@pytest.mark.slow
def test_the_end_does_not_wait_for_a_template_that_was_stopped() -> None:
    found = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=120)
    said = found.stdout.split()
    for stopped in filter(str.isdecimal, said):
        with suppress(ProcessLookupError):
            os.kill(int(stopped), signal.SIGKILL)
    assert (found.returncode, found.stderr) == (0, "") and said[-1] == "waits"


NEIGHBOUR = """
import os, socket
heard = socket.socket(socket.AF_UNIX)
found = []
try:
    heard.connect("\\0neighbour")
    found.append("socket")
except OSError:
    pass
found += os.listdir("/tmp")
alive = [name for name in os.listdir("/proc") if name.isdecimal() and int(name) not in (1, os.getpid())]
print(found, alive)
"""


@pytest.mark.parametrize("kind", ["bubblewrap", "userns"])
def test_sandboxes_of_one_template_see_nothing_of_each_other(kind: str) -> None:
    walls = Walls(kind)
    if problem := _problem(walls):
        pytest.skip(problem)
    busy = (
        "import socket, time\nopen('/tmp/file', 'w').close()\nheard = socket.socket(socket.AF_UNIX)\n"
        "heard.bind('\\0neighbour')\nheard.listen()\ntime.sleep(60)"
    )

    async def story(first: Sandbox) -> Result:
        second = Sandbox(first.settings, walls)
        playing = asyncio.create_task(first.run(busy))
        try:
            await second.run("1")  # so that the first call is not ahead of the neighbour's
            for _ in range(200):
                inside = first._process and Path(f"/proc/{first._process.started.pid}/root/tmp/file")
                if inside and inside.exists():
                    break
                await asyncio.sleep(0.05)
            else:
                pytest.fail("the neighbour does not get ready")
            await asyncio.sleep(0.1)  # the socket comes after the file
            return await second.run(NEIGHBOUR)
        finally:
            playing.cancel()
            await second.close()

    assert play(story, walls, seconds=30.0) == Result("ok", "[] []\n")


HOST = """
import asyncio, sys
from silva.sandbox.process import Sandbox
from silva.sandbox.settings import SandboxSettings

async def main():
    sandbox = Sandbox(SandboxSettings(seconds=60))
    await sandbox.run("1")
    print(sandbox._process.started.pid, flush=True)
    await sandbox.run("while True: pass")

asyncio.run(main())
"""


@pytest.mark.slow
def test_nothing_outlives_a_host_that_is_killed() -> None:
    host = subprocess.Popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE, text=True)
    assert host.stdout is not None
    with host.stdout:
        inside = os.pidfd_open(int(host.stdout.readline()))
    below = [int(child) for child in children(host.pid)]
    host.kill()
    host.wait()
    try:
        asked = select.poll()
        asked.register(inside, select.POLLIN)
        assert asked.poll(20_000), "a sandbox in the middle of a call outlives its host"
    finally:
        os.close(inside)
    for _ in range(400):
        if not any(Path(f"/proc/{child}").exists() for child in below):
            break
        time.sleep(0.05)
    else:
        pytest.fail("a template outlives its host")
