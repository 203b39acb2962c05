"""Processes that are started, watched and started again: with small ones that compute nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from silva.errors import SilvaError
from silva.placement import supervisor
from silva.placement.supervisor import Part, Supervisor, line_writer

SOON = 30.0  # seconds within which everything happens, or the test fails
SERVICE = """
import http.server, os, pathlib, socketserver, subprocess, sys, time
from silva.process import tie_to_parent

tie_to_parent()
folder, name, path = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
with open(folder / f"{name}.pids", "a") as file:
    file.write(f"{os.getpid()}\\n")
print(f"{name} begins {os.environ.get('GIVEN', '')}", flush=True)
if (folder / f"{name}.fails").exists():
    print("the last line", file=sys.stderr, flush=True)
    sys.exit(3)
child = subprocess.Popen(["sleep", "1000"], start_new_session=(folder / f"{name}.daemon").exists())
(folder / f"{name}.child").write_text(str(child.pid))
if (folder / f"{name}.long").exists():
    sys.stdout.write("x" * 1_000_000)
    sys.stdout.flush()
    print("\\nafter it", flush=True)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        while (folder / f"{name}.hangs").exists():
            time.sleep(0.01)
        if (folder / f"{name}.key").exists() and self.headers.get("authorization") != "Bearer k":
            self.send_response(401)
            self.end_headers()
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")
        (folder / f"{name}.asked").touch()
    def address_string(self):
        return "unix"
    def log_message(self, *arguments):
        pass

pathlib.Path(path).unlink(missing_ok=True)
socketserver.ThreadingUnixStreamServer(path, Handler).serve_forever()
"""
ORCHESTRATOR = """
import os, pathlib, signal, sys, time
from silva.process import tie_to_parent

tie_to_parent()
folder = pathlib.Path(sys.argv[1])

def note(number, frame):
    with open(folder / "signals", "a") as file:
        file.write(signal.Signals(number).name + "\\n")
    if not (folder / "stubborn").exists():
        sys.exit(130)

for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, note)
with open(folder / "orchestrator.pids", "a") as file:
    file.write(f"{os.getpid()}\\n")
with open(folder / "arguments", "a") as file:
    file.write(" ".join(sys.argv[2:]) + f" {os.environ.get('ONCE', '-')}\\n")
if (folder / "dies").exists():
    os.kill(os.getpid(), signal.SIGKILL)
while not (folder / "end").exists():
    time.sleep(0.01)
sys.exit(int((folder / "end").read_text()))
"""
DRIVER = """
import asyncio, json, pathlib, sys
from silva.placement.supervisor import Part, Supervisor

parts = [Part(**each) for each in json.loads(sys.argv[1])]
say = lambda text: print(text, flush=True)
sys.exit(asyncio.run(Supervisor(parts, log=lambda line: None, say=say).run()))
"""


class Park:
    """The folder in which the processes leave their notes, and the supervisor of them."""

    def __init__(self, folder: Path, *services: str) -> None:
        self.folder, self.services = folder, services or ("trainer",)
        self.said: list[tuple[float, str]] = []
        self.lines: list[str] = []

    def parts(self, **fields: Any) -> list[Part]:
        """`fields`: of the services."""
        python = sys.executable
        made = [
            Part(
                name,
                [python, "-c", SERVICE, str(self.folder), name, f"{self.folder}/{name}.sock"],
                address=f"unix:{self.folder}/{name}.sock",
                **fields,
            )
            for name in self.services
        ]
        line = [python, "-c", ORCHESTRATOR, str(self.folder)]
        return [*made, Part("orchestrator", [*line, "first"], [*line, "again"], once={"ONCE": "1"})]

    def pids(self, name: str) -> list[int]:
        """Of the process of that name and of those before it."""
        with contextlib.suppress(FileNotFoundError):
            return [int(line) for line in (self.folder / f"{name}.pids").read_text().split()]
        return []

    def text(self, name: str) -> str:
        path = self.folder / name
        return path.read_text() if path.exists() else ""

    def touch(self, name: str) -> None:
        (self.folder / name).touch()

    def end(self, code: int = 0) -> None:
        written = self.folder / ".end"
        written.write_text(str(code))
        written.rename(self.folder / "end")

    @property
    def up(self) -> bool:
        """All processes run, and the services have answered."""
        asked = all((self.folder / f"{name}.asked").exists() for name in self.services)
        return asked and bool(self.pids("orchestrator"))

    def everyone(self) -> list[int]:
        """All processes that were ever started."""
        children = [int(self.text(f"{name}.child") or 0) for name in self.services]
        return [pid for name in (*self.services, "orchestrator") for pid in self.pids(name)] + [
            *filter(None, children)
        ]

    async def until(self, condition: Callable[[], Any], what: str) -> None:
        async with asyncio.timeout(SOON):
            while not condition():
                await asyncio.sleep(0.005)

    async def until_said(self, *words: str) -> float:
        """The seconds from now until a line with these words is said."""
        began, count = time.monotonic(), len(self.said)
        await self.until(
            lambda: any(all(w in text for w in words) for _, text in self.said[count:]), f"said: {words}"
        )
        return next(at for at, text in self.said[count:] if all(w in text for w in words)) - began

    @contextlib.asynccontextmanager
    async def running(self, **options: Any) -> AsyncIterator[asyncio.Task[int]]:
        """The supervisor; at the end of the block it is told to end if it has not."""
        parts = options.pop("parts", None) or self.parts()
        made = Supervisor(
            parts,
            log=self.lines.append,
            say=lambda text: self.said.append((time.monotonic(), text)),
            **options,
        )
        task = asyncio.create_task(made.run())
        try:
            yield task
        finally:
            if not task.done():
                self.end()
            await asyncio.wait_for(asyncio.gather(task, return_exceptions=True), SOON)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short enough for sockets; what is left of the processes is killed."""
    with tempfile.TemporaryDirectory(prefix="silva-") as name:
        yield Path(name)
        for pid in left(Park(Path(name), "trainer", "inference")):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """A loop that closes resets the handlers of signals."""
    numbers = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def lives(pid: int) -> bool:
    """Also if it is stopped; not if it has ended and nobody has asked for its code yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


def left(park: Park) -> list[int]:
    return [pid for pid in park.everyone() if lives(pid)]


def gone(park: Park, seconds: float) -> bool:
    """Whether all processes end within so many seconds."""
    until = time.monotonic() + seconds
    while left(park) and time.monotonic() < until:
        time.sleep(0.01)
    return not left(park)


def with_park(park: Park, ask: Callable[[asyncio.Task[int]], Awaitable[Any]], **options: Any) -> Any:
    """What `ask` returns; afterwards no process is left."""

    async def work() -> Any:
        async with park.running(**options) as task:
            return await ask(task)

    found = asyncio.run(asyncio.wait_for(work(), 2 * SOON))
    assert park.everyone() and gone(park, 10)
    return found


@pytest.mark.parametrize("code", [0, 1, 3, 130])
def test_the_exit_code_of_the_orchestrator_comes_through(folder: Path, code: int) -> None:
    park = Park(folder, "trainer", "inference")

    async def ask(task: asyncio.Task[int]) -> int:
        await park.until(lambda: park.up, "all is up")
        park.end(code)
        return await asyncio.wait_for(asyncio.shield(task), SOON)

    assert with_park(park, ask) == code
    assert park.said == [] and {*park.lines} == {"trainer: trainer begins", "inference: inference begins"}
    assert park.text("arguments") == "first 1\n"


def test_a_part_gets_its_environment_and_the_key_opens_it(folder: Path) -> None:
    park = Park(folder)
    park.touch("trainer.key")
    parts = park.parts(env={"GIVEN": "a word"})

    async def ask(task: asyncio.Task[int]) -> None:
        await park.until(lambda: park.up, "it has answered")

    with_park(park, ask, parts=parts, key="k")
    assert park.lines == ["trainer: trainer begins a word"]


@pytest.mark.parametrize(
    ("number", "word"), [(signal.SIGKILL, "was killed (SIGKILL)"), (signal.SIGTERM, "was killed (SIGTERM)")]
)
def test_a_killed_part_is_started_again_and_named(folder: Path, number: int, word: str) -> None:
    park = Park(folder, "trainer", "inference")

    async def ask(task: asyncio.Task[int]) -> float:
        await park.until(lambda: park.up, "all is up")
        os.kill(park.pids("inference")[0], number)
        seconds = await park.until_said(f"inference {word}: it is started again")
        await park.until(lambda: len(park.pids("inference")) == 2, "it runs again")
        return seconds

    assert with_park(park, ask) < 5
    assert len(park.said) == 1 and len(park.pids("trainer")) == 1 and len(park.pids("orchestrator")) == 1


def test_a_stopped_part_is_noticed_at_once_and_started_again(folder: Path) -> None:
    park = Park(folder)

    async def ask(task: asyncio.Task[int]) -> tuple[float, bool]:
        await park.until(lambda: park.up, "all is up")
        (first,) = park.pids("trainer")
        os.kill(first, signal.SIGSTOP)
        seconds = await park.until_said("trainer was stopped (SIGSTOP): it is started again")
        alive = lives(first)
        await park.until(lambda: len(park.pids("trainer")) == 2, "it runs again")
        return seconds, alive

    seconds, alive = with_park(park, ask)
    assert seconds < 5 and not alive  # a tick; the rest is for a busy machine


def test_a_part_that_does_not_answer_is_killed_and_started_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "DEAD_AFTER", 1.0)
    monkeypatch.setattr(supervisor, "CHECK", 0.1)
    park = Park(folder)

    async def ask(task: asyncio.Task[int]) -> tuple[float, bool]:
        await park.until(lambda: park.up, "all is up")
        (first,) = park.pids("trainer")
        park.touch("trainer.hangs")
        seconds = await park.until_said("trainer has not answered for", "s: it is started again")
        (folder / "trainer.hangs").unlink()
        alive = lives(first)
        await park.until(lambda: len(park.pids("trainer")) == 2, "it runs again")
        return seconds, alive

    seconds, alive = with_park(park, ask)
    assert 0.5 < seconds < 1.0 + 4 and not alive


def test_a_part_that_has_not_answered_yet_is_left_in_peace(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading a model takes longer than an answer may take."""
    monkeypatch.setattr(supervisor, "DEAD_AFTER", 0.2)
    monkeypatch.setattr(supervisor, "CHECK", 0.05)
    park = Park(folder)
    park.touch("trainer.hangs")

    async def ask(task: asyncio.Task[int]) -> None:
        await park.until(lambda: park.pids("trainer") and park.pids("orchestrator"), "both have begun")
        began = time.monotonic()
        await park.until(lambda: time.monotonic() > began + 1.0, "some times DEAD_AFTER")

    with_park(park, ask)
    assert park.said == [] and len(park.pids("trainer")) == 1


def test_a_part_that_fails_at_its_start_ends_everything_and_says_why(folder: Path) -> None:
    park = Park(folder, "trainer", "inference")
    park.touch("trainer.fails")

    async def ask(task: asyncio.Task[int]) -> str:
        with pytest.raises(SilvaError) as failed:
            await asyncio.wait_for(asyncio.shield(task), SOON)
        return str(failed.value)

    text = with_park(park, ask)
    first, *lines = text.splitlines()
    assert first == "trainer ended with exit code 3; its last lines:"
    assert [line.strip() for line in lines] == ["trainer begins", "the last line"]
    assert len(park.pids("trainer")) == supervisor.MOST_FAILURES
    assert [text for _, text in park.said] == ["trainer ended with exit code 3: it is started again"] * 2


def test_a_start_that_takes_long_and_fails_counts_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "SHORT", 0.0)
    park = Park(folder)
    park.touch("trainer.fails")

    async def ask(task: asyncio.Task[int]) -> None:
        with pytest.raises(SilvaError, match="trainer ended with exit code 3"):
            await asyncio.wait_for(asyncio.shield(task), SOON)

    with_park(park, ask)
    assert len(park.pids("trainer")) == supervisor.MOST_FAILURES


def test_a_part_that_once_worked_may_be_lost_again_and_again(folder: Path) -> None:
    park = Park(folder)

    async def ask(task: asyncio.Task[int]) -> None:
        for count in range(1, supervisor.MOST_FAILURES + 3):
            await park.until(lambda: (folder / "trainer.asked").exists(), "it answers")
            (folder / "trainer.asked").unlink()
            saying = asyncio.create_task(park.until_said("trainer was killed (SIGKILL)"))
            await asyncio.sleep(0)
            os.kill(park.pids("trainer")[-1], signal.SIGKILL)
            await saying
            await park.until(lambda count=count: len(park.pids("trainer")) == count + 1, "it runs again")

    with_park(park, ask)
    assert len(park.pids("trainer")) == supervisor.MOST_FAILURES + 3


def test_a_command_that_does_not_exist_says_so(folder: Path) -> None:
    parts = [Part("trainer", [str(folder / "no")], address=f"unix:{folder}/t.sock")]

    async def work() -> None:
        with pytest.raises(FileNotFoundError):
            await Supervisor(parts, log=lambda line: None, say=lambda text: None).run()

    asyncio.run(asyncio.wait_for(work(), SOON))


def test_a_line_without_an_end_does_not_stop_its_part(folder: Path) -> None:
    park = Park(folder)
    park.touch("trainer.long")

    async def ask(task: asyncio.Task[int]) -> None:
        await park.until(lambda: park.up, "it goes on behind the line")
        await park.until(
            lambda: any(line.endswith("after it") for line in park.lines), "what follows is read"
        )

    with_park(park, ask)
    assert park.said == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_reaches_the_orchestrator_once_and_everything_ends(
    folder: Path, number: signal.Signals
) -> None:
    park = Park(folder)

    async def ask(task: asyncio.Task[int]) -> int:
        await park.until(lambda: park.up, "all is up")
        os.kill(os.getpid(), number)
        return await asyncio.wait_for(asyncio.shield(task), SOON)

    assert with_park(park, ask) == 130
    assert park.text("signals").split() == [number.name]
    assert park.said == []


def test_an_orchestrator_that_is_killed_while_it_ends_is_not_started_again(folder: Path) -> None:
    park = Park(folder)
    park.touch("stubborn")

    async def ask(task: asyncio.Task[int]) -> int:
        await park.until(lambda: park.up, "all is up")
        os.kill(os.getpid(), signal.SIGINT)
        await park.until(lambda: park.text("signals"), "it was told")
        os.kill(park.pids("orchestrator")[0], signal.SIGKILL)
        return await asyncio.wait_for(asyncio.shield(task), SOON)

    assert with_park(park, ask) == 128 + signal.SIGKILL
    assert len(park.pids("orchestrator")) == 1


def test_every_signal_is_passed_on(folder: Path) -> None:
    """The second Ctrl-C means something else than the first."""
    park = Park(folder)
    park.touch("stubborn")

    async def ask(task: asyncio.Task[int]) -> None:
        await park.until(lambda: park.up, "all is up")
        for count in (1, 2, 3):
            os.kill(os.getpid(), signal.SIGINT)
            await park.until(lambda count=count: len(park.text("signals").split()) == count, "it was told")

    with_park(park, ask)
    assert len(park.text("signals").split()) == 3


def test_an_orchestrator_that_is_killed_starts_again_and_goes_on(folder: Path) -> None:
    park = Park(folder)

    async def ask(task: asyncio.Task[int]) -> int:
        await park.until(lambda: park.up, "all is up")
        os.kill(park.pids("orchestrator")[0], signal.SIGKILL)
        await park.until(lambda: len(park.pids("orchestrator")) == 2, "it runs again")
        await park.until(lambda: len(park.text("arguments").splitlines()) == 2, "it says how")
        park.end(3)
        return await asyncio.wait_for(asyncio.shield(task), SOON)

    assert with_park(park, ask) == 3
    assert park.text("arguments").splitlines() == ["first 1", "again -"]  # `once` is for the first start
    assert [text for _, text in park.said] == ["orchestrator was killed (SIGKILL): it is started again"]
    assert len(park.pids("trainer")) == 1


def test_an_orchestrator_that_dies_at_every_start_ends_everything(folder: Path) -> None:
    park = Park(folder)
    park.touch("dies")

    async def ask(task: asyncio.Task[int]) -> None:
        with pytest.raises(SilvaError, match=r"orchestrator was killed \(SIGKILL\)"):
            await asyncio.wait_for(asyncio.shield(task), SOON)

    with_park(park, ask)
    assert len(park.pids("orchestrator")) == supervisor.MOST_FAILURES


def test_a_stopped_orchestrator_is_left_as_it_is(folder: Path) -> None:
    """Somebody wanted that, and may want it to go on."""
    park = Park(folder)

    async def ask(task: asyncio.Task[int]) -> int:
        await park.until(lambda: park.up, "all is up")
        (pid,) = park.pids("orchestrator")
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        await park.until(lambda: time.monotonic() > began + 5 * supervisor.TICK, "some ticks")
        os.kill(pid, signal.SIGCONT)
        park.end(5)
        return await asyncio.wait_for(asyncio.shield(task), SOON)

    assert with_park(park, ask) == 5
    assert park.said == [] and len(park.pids("orchestrator")) == 1


@pytest.mark.parametrize("how", ["killed", "ended"])
def test_a_part_that_ends_leaves_no_children(folder: Path, how: str) -> None:
    park = Park(folder)

    async def ask(task: asyncio.Task[int]) -> None:
        await park.until(lambda: park.up and park.text("trainer.child"), "all is up")
        child = int(park.text("trainer.child"))
        assert lives(child)
        if how == "killed":
            os.kill(park.pids("trainer")[0], signal.SIGKILL)
        else:
            park.end()
        await park.until(lambda: not lives(child), "the child is gone")

    with_park(park, ask)


def test_a_child_that_left_its_group_and_holds_the_output_is_not_waited_for(folder: Path) -> None:
    park = Park(folder)
    park.touch("trainer.daemon")

    async def ask(task: asyncio.Task[int]) -> None:
        await park.until(lambda: park.up and park.text("trainer.child"), "all is up")
        child = int(park.text("trainer.child"))
        (folder / "trainer.daemon").unlink()
        os.kill(park.pids("trainer")[0], signal.SIGKILL)
        try:
            await park.until(lambda: len(park.pids("trainer")) == 2, "it runs again")
        finally:
            os.kill(child, signal.SIGKILL)

    with_park(park, ask)
    assert len(park.pids("trainer")) == 2


def test_a_part_that_is_stopped_does_not_keep_the_end_from_coming(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "GRACE", 0.5)
    monkeypatch.setattr(supervisor, "TICK", 0.5)
    park = Park(folder)

    async def ask(task: asyncio.Task[int]) -> int:
        await park.until(lambda: park.up, "all is up")
        park.end(0)
        os.kill(park.pids("trainer")[0], signal.SIGSTOP)
        return await asyncio.wait_for(asyncio.shield(task), SOON)

    assert with_park(park, ask) == 0


def driven(park: Park) -> subprocess.Popen[str]:
    """The supervisor in a process of its own."""
    parts = [
        {
            name: value
            for name in ("name", "argv", "again", "address")
            if (value := getattr(part, name)) is not None
        }
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
@pytest.mark.parametrize("stopped", [(), ("orchestrator",), ("trainer", "inference", "orchestrator")])
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
        until = time.monotonic() + 10
        while any(map(lives, parts)) and time.monotonic() < until:
            time.sleep(0.01)
        assert [pid for pid in parts if lives(pid)] == []
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_a_terminal_that_is_closed_or_ctrl_c_in_it_ends_everything(folder: Path) -> None:
    park = Park(folder)
    process = driven(park)
    wait_for(lambda: park.up)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=SOON)
    assert process.returncode == 130 and output == ""
    assert park.text("signals").split() == ["SIGTERM"]
    assert gone(park, 10)


def test_lines_wait_until_the_run_has_begun(tmp_path: Path) -> None:
    ready = tmp_path / "run" / "ledger.jsonl"
    write = line_writer(tmp_path / "run" / "services.log", ready)
    write("trainer: one")
    write("trainer: zwölf")
    assert not ready.parent.exists()  # a folder that is not empty and no run would be refused
    ready.parent.mkdir()
    ready.touch()
    write("trainer: three")
    assert (ready.parent / "services.log").read_text() == "trainer: one\ntrainer: zwölf\ntrainer: three\n"
    write("four")
    assert (ready.parent / "services.log").read_text().endswith("three\nfour\n")
