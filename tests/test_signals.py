"""Ctrl-C, SIGTERM and SIGHUP before a run has begun; tests/orchestrator has what they do to a run."""

import subprocess
import sys

import pytest

from silva.signals import NUMBERS, STOP_PART, held

BEGIN = """
import os, signal
from silva import signals
def hit(number):  # as a library does that is being imported
    try:
        os.kill(os.getpid(), number)
    except BaseException as error:
        raise ModuleNotFoundError("Could not import module") from error
"""


def run(code, ignored=""):
    """`ignored`: a signal that the process ignores from its first moment on, as a shell can say it."""
    shell = ["sh", "-c", f'trap "" {ignored}; exec "$@"', "sh"] if ignored else []
    python = [sys.executable, "-c", BEGIN + code]
    return subprocess.run([*shell, *python], capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_while_modules_are_imported_a_signal_ends_the_process(name):
    done = run(f"signals.end_at_once(); hit(signal.{name}); print('went on')")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "silva: interrupted\n")


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_then_it_is_a_keyboard_interrupt(name):
    code = f"""
signals.end_at_once(); signals.be_caught()
try:
    os.kill(os.getpid(), signal.{name})
except KeyboardInterrupt:
    print("caught")
"""
    assert run(code).stdout == "caught\n"


def test_what_was_ignored_stays_ignored():
    code = "signals.end_at_once(); signals.be_caught(); hit(signal.SIGHUP); print('goes on')"
    done = run(code, ignored="HUP")  # as nohup does
    assert (done.returncode, done.stdout) == (0, "goes on\n")


def test_a_program_that_uses_the_library_keeps_its_own_handlers():
    code = "signal.signal(signal.SIGTERM, lambda *_: print('mine')); signals.be_caught(); hit(signal.SIGTERM)"
    assert run(code).stdout == "mine\n"


PART = "signals.end_at_once(); signals.end_as_a_part(); signals.be_caught()\n"


@pytest.mark.slow
@pytest.mark.parametrize("ignored", NUMBERS)
def test_a_part_listens_to_its_supervisor_alone(ignored):
    code = f"""
import subprocess, sys
os.kill(os.getpid(), {int(ignored)})
from silva.orchestrator.interrupt import Interrupt
import asyncio
async def work():
    with Interrupt() as interrupt:
        os.kill(os.getpid(), {int(ignored)})
        interrupt.check()
asyncio.run(work())
child = subprocess.Popen([sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)"],
                         stdout=subprocess.PIPE)
child.stdout.read(1)
child.send_signal({int(ignored)})  # its children listen
print(child.wait() == -{int(ignored)})
try:
    os.kill(os.getpid(), signals.STOP_PART)
except KeyboardInterrupt:
    print("caught")
"""
    assert run(PART + code, ignored="INT").stdout == "True\ncaught\n"  # by a shell's `&`


@pytest.mark.parametrize(
    ("number", "output"), [*((number, "goes on\n") for number in NUMBERS), (STOP_PART, "")]
)
def test_a_part_gets_no_signal_before_it_has_said_which_it_listens_to(number, output):
    """Python itself takes a tenth of a second to begin."""
    code = f"""
os.kill(os.getpid(), {int(number)})
signals.end_at_once()
signals.end_as_a_part()
print("goes on")
"""
    with held():
        done = run(code)
    assert (done.returncode, done.stdout) == (0 if output else 130, output)
