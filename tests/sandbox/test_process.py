"""What a sandbox does with code that is not hostile, and what it leaves behind when code is."""

from __future__ import annotations

import asyncio
import os
import random
import select
import signal
from typing import Any

import pytest
from tests.sandbox.calling import (
    NEEDS_WALLS,
    children,
    play,
    runs,
    states,
)

from silva.sandbox import process
from silva.sandbox.process import Result, Sandbox
from silva.sandbox.settings import SandboxSettings

pytestmark = NEEDS_WALLS


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("1 + 1", "2\n"),
        ("x = 3\nprint('a')\nx * 2", "a\n6\n"),
        ("print('no newline', end='')", "no newline"),
        ("'text'", "'text'\n"),
        ("None", ""),
        ("", ""),
        ("def f():\n    return 7\nf()", "7\n"),
        ("import sys; print('e', file=sys.stderr); print('o')", "e\no\n"),
        ("print('é', '\\ud800')", "é ?\n"),
        ("import os; os.write(1, bytes([255, 65]))", "\ufffdA2\n"),
        ("import random, json; json.dumps([1])", "'[1]'\n"),
        ("import subprocess; subprocess.run(['echo', 'hi'], capture_output=True).stdout", "b'hi\\n'\n"),
    ],
)
def test_code_runs_as_in_an_interpreter(code: str, output: str) -> None:
    (result,) = runs(code)
    assert result == Result("ok", output)


def test_a_traceback_shows_the_code_and_nothing_of_the_sandbox() -> None:
    wrong, invalid = runs("def f():\n    return 1 / 0\nf()", "1 +")
    assert wrong.how == "raised" and invalid.how == "raised"
    assert wrong.output.splitlines()[0] == "Traceback (most recent call last):"
    assert wrong.output.splitlines()[1] == '  File "<python>", line 3, in <module>'
    assert wrong.output.endswith("ZeroDivisionError: division by zero\n")
    assert "exec(" not in wrong.output and "SyntaxError" in invalid.output


def test_how_a_call_ended_is_told() -> None:
    results = runs(
        "import sys; sys.exit(3)", "import os; os.kill(os.getpid(), 11)", "print('x' * 9)",
        "while True: pass", "1", output_chars=5, seconds=0.5,
    )  # fmt: skip
    assert [(r.how, r.detail) for r in results] == [
        ("exit", 3), ("signal", 11), ("ok", 0), ("timeout", 0), ("ok", 0)
    ]  # fmt: skip
    assert results[2].output == "xxxxx" and results[2].cut and not results[4].cut


def test_input_of_any_size_is_read() -> None:
    async def story(sandbox: Sandbox) -> Result:
        return await sandbox.run("import sys; len(sys.stdin.read())", "x" * 300_000)

    assert play(story).output == "300000\n"


def test_calls_share_variables_and_files_as_asked() -> None:
    codes = ("x = 1", "x")
    assert [r.how for r in runs(*codes)] == ["ok", "raised"]
    assert [r.how for r in runs(*codes, keep_state=True)] == ["ok", "ok"]


def test_a_call_that_dies_leaves_the_state_as_it_was() -> None:
    results = runs(
        "x = [1]", "x.append(2); import os; os.kill(os.getpid(), 9)", "x", "x.append(3); 1 / 0", "x",
        "x.append(4)\nwhile True: pass", "x", "x.append(5); import sys; sys.exit(1)", "x",
        keep_state=True, seconds=1.0,
    )  # fmt: skip
    assert [r.how for r in results] == [
        "ok", "signal", "ok", "raised", "ok", "timeout", "ok", "raised", "ok",
    ]  # fmt: skip
    assert [r.output for r in results[2::2]] == ["[1]\n", "[1, 3]\n", "[1, 3]\n", "[1, 3, 5]\n"]


def test_forks_that_run_on_do_not_confuse_kept_state() -> None:
    results = runs("x = 1\nimport os\nfor _ in range(3): os.fork()\nx = 2", "x", keep_state=True)
    assert [r.how for r in results] == ["ok", "ok"] and results[1].output == "2\n"


# Code finds the memory in which the sandbox is told who holds the state, and names a process that runs on.
FORGED = """
import os, struct, sys
frame = sys._getframe()
while frame and "board" not in frame.f_locals:
    frame = frame.f_back
child = os.fork()
while child == 0:
    pass
if frame:
    struct.pack_into("<i", frame.f_locals["board"], 4, child)
os._exit(0)
"""


@pytest.mark.parametrize("keep_state", [False, True])
def test_nothing_that_a_call_started_outlives_it(keep_state: bool) -> None:
    daemon = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        "        time.sleep(60)\n    os._exit(0)\ntime.sleep(.1)"
    )
    count = "import os; len([p for p in os.listdir('/proc') if p.isdecimal()])"
    first, _, again = runs(count, daemon, count, keep_state=keep_state)
    assert first.output == again.output


@pytest.mark.parametrize(
    "code",
    [
        "import os, signal; os.kill(os.getppid(), signal.SIGKILL)",
        "import os, signal; os.kill(os.getppid(), signal.SIGSTOP); 1",
        # Low numbers: in a process namespace of its own. Elsewhere this would end the machine's processes.
        "import os, signal; os.getpid() < 100 and os.kill(-1, signal.SIGKILL)",
        "import os\nfor fd in range(3, 200):\n    try: os.write(fd, b'\\0' * 64)\n    except OSError: pass",
        "import os\nos.closerange(0, 200)",
        FORGED,
    ],
)
@pytest.mark.parametrize("keep_state", [False, True])
def test_whatever_a_call_does_to_its_sandbox_the_next_sandbox_works(code: str, keep_state: bool) -> None:
    *_, after = runs(code, "1", "6 * 7", seconds=0.5, keep_state=keep_state)
    assert after == Result("ok", "42\n")


def test_code_cannot_tell_that_its_call_has_ended() -> None:
    tell = (
        "import os, time\nfor fd in range(3, 200):\n    for word in (0, 1, 2, 1 << 20):\n"
        "        try: os.write(fd, word.to_bytes(4, 'little'))\n        except OSError: pass\n"
        "time.sleep(0.2)\nx = 1\nprint('the end')"
    )
    told, kept = runs(tell, "x", keep_state=True)
    assert told.how == "ok" and told.output.endswith("the end\n") and kept.output == "1\n"


def test_code_has_no_descriptor_but_its_own_input_and_output() -> None:
    code = (
        "import os\nfound = [f for f in range(3, 200) if os.path.exists(f'/proc/self/fd/{f}')]\n"
        "print({os.fstat(f).st_ino for f in found} - {os.fstat(1).st_ino})"
    )
    for keep_state in (False, True):
        assert runs(code, keep_state=keep_state)[0].output == "set()\n"


@pytest.mark.parametrize("code", ["x = 1", FORGED])
def test_who_holds_the_state_is_stopped_between_calls(code: str) -> None:
    async def story(sandbox: Sandbox) -> tuple[Result, str]:
        result = await sandbox.run(code)
        process = sandbox._process.started.pid  # type: ignore[union-attr]
        return result, "".join(states(process))

    result, found = play(story, keep_state=True)
    assert result.how == "ok" and len(found) == 2 and found.index("T") == 1


@pytest.mark.parametrize("keep_state", [False, True])
def test_classes_of_the_code_are_in_the_module_main(keep_state: bool) -> None:
    code = (
        "import pickle, sys\nclass P: pass\npickle.loads(pickle.dumps(P)) is sys.modules['__main__'].P is P"
    )
    assert runs(code, keep_state=keep_state)[0].output == "True\n"


def test_a_program_ends_as_python_ends_it_and_its_errors_are_apart() -> None:
    code = (
        "import atexit, sys, threading, time\natexit.register(print, 'last')\n"
        "threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()\n"
        "print('wrong', file=sys.stderr)\n{}\nlen(sys.stdin.read())"
    )

    async def story(sandbox: Sandbox) -> list[Result]:
        given: dict[str, Any] = {"program": True, "output_chars": 12}
        ok, raised = [await sandbox.run(code.format(line), "x", **given) for line in ("0", "1 / 0")]
        return [ok, raised, await sandbox.run("print('x' * 13)", **given)]

    ok, raised, cut = play(story, output_chars=100)
    assert ok == Result("ok", "thread\nlast\n", errors="wrong\n")
    assert (raised.how, raised.output) == ("raised", "thread\nlast\n")
    assert raised.errors.startswith("wrong\nTraceback") and raised.errors.endswith("division by zero\n")
    assert (cut.how, cut.output, cut.cut) == ("ok", "x" * 12, True)


def test_kept_state_takes_no_program_and_no_call_without_bounds() -> None:
    async def story(sandbox: Sandbox) -> None:
        with pytest.raises(ValueError, match="got a program"):
            await sandbox.run("1", program=True)
        with pytest.raises(ValueError, match="got 1,000,001 characters"):
            await sandbox.run("1", "x" * 1_000_000)
        assert (await sandbox.run("import sys; len(sys.stdin.read())", "ż" * 900_000)).output == "900000\n"

    play(story, keep_state=True)


def test_many_calls_and_sandboxes_leave_no_process() -> None:
    async def story(sandbox: Sandbox) -> None:
        for number in range(300):
            assert (await sandbox.run(f"{number} + 1")).output == f"{number + 1}\n"

    before = children()
    play(story)
    for _ in range(5):
        runs("1", "import os; os.fork(); os.fork()")
    assert children() <= before


@pytest.mark.parametrize(("processes", "keep_state"), [(1, False), (3, True)])
def test_no_room_for_the_sandbox_itself_is_refused(processes: int, keep_state: bool) -> None:
    with pytest.raises(ValueError, match=f"processes: got {processes}, expected at least {processes + 1}"):
        SandboxSettings(processes=processes, keep_state=keep_state)
    enough = runs("6 * 7", processes=processes + 1, keep_state=keep_state)
    assert enough == [Result("ok", "42\n")]


def test_a_cancelled_call_ends_its_sandbox() -> None:
    async def story(sandbox: Sandbox) -> Result:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await sandbox.run("while True: pass")
        return await sandbox.run("'again'")

    before = children()
    assert play(story).output == "'again'\n"
    assert children() <= before


def test_every_attempt_to_reach_the_network_is_counted() -> None:
    code = "import socket\nfor _ in range(3):\n    try: socket.socket()\n    except OSError: print('no')"
    none, three = runs("import socket; socket.socketpair()[0].close()", code)
    assert none.how == "ok" and none.network_attempts == 0
    assert (three.output, three.network_attempts) == ("no\n" * 3, 3)


def test_attempts_without_end_keep_nobody_busy() -> None:
    """Beyond the first thousand the kernel refuses alone."""
    code = (
        "import socket, errno\nfor _ in range(3000):\n    try: socket.socket()\n"
        "    except OSError as error: last = error.errno\nprint(errno.errorcode[last])"
    )
    first, second = runs(code, "import socket; socket.socket()")
    assert (first.how, first.output, first.network_attempts) == ("ok", "ENOSYS\n", 1000)
    assert (second.how, second.network_attempts) == ("raised", 0)


def test_code_that_is_gone_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end makes the kernel's descriptor readable, as an attempt does; some kernels would wait."""

    async def story(sandbox: Sandbox) -> None:
        await sandbox.run("1")
        started = sandbox._process
        assert started is not None
        if started.started.listener < 0:
            pytest.skip("attempts are not counted here")
        gone = select.poll()
        gone.register(started.started.listener, 0)
        monkeypatch.setattr(process.fcntl, "ioctl", lambda *_: pytest.fail("it waits"))
        os.kill(started.started.pid, signal.SIGKILL)
        assert gone.poll(300_000) == [(started.started.listener, select.POLLHUP)]
        async with asyncio.timeout(300):
            while started.started.listener >= 0:
                await asyncio.sleep(0.01)

    play(story)


RANDOM = "import random\nprint(list({'a', 'b', 'c', 'd', 'e', 'f'}), random.random())"


@pytest.mark.parametrize("keep_state", [False, True])
def test_equal_seeds_give_equal_output(keep_state: bool) -> None:
    one, again, other = (
        [result.output for result in runs(RANDOM, RANDOM, seed=seed, keep_state=keep_state)]
        for seed in (3, 3, 4)
    )
    assert one == again and one[0] != one[1] and one != other
    assert one[0].partition("]")[0] == other[0].partition("]")[0]  # the order of a set has no seed


def test_modules_that_are_ready_do_not_take_a_seed_away() -> None:
    code = "import random; random.random()"

    async def drawn(ready: tuple[str, ...]) -> str:
        sandbox = Sandbox(SandboxSettings(), seed=3, ready=ready)
        try:
            return (await sandbox.run(code)).output
        finally:
            await sandbox.close()

    assert asyncio.run(drawn(("random",))) == asyncio.run(drawn(()))


def test_a_seed_of_the_code_itself_holds() -> None:
    drawn = random.Random(5).random()
    kept = runs("import random; random.seed(5)", "random.random()", keep_state=True)[1]
    assert kept.output == f"{drawn}\n" == runs("import random; random.seed(5); random.random()")[0].output


def test_packages_can_be_left_out() -> None:
    (with_them,), (without,) = runs("import numpy"), runs("import numpy", packages=False)
    assert (with_them.how, without.how) == ("ok", "raised")
