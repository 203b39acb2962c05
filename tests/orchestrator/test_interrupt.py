"""Signals while a run is trained: the first stops at the next safe point, the second at once."""

import asyncio
import os
import signal

import pytest

from silva.orchestrator.interrupt import Interrupt
from silva.signals import Interrupted

NUMBERS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


def send(*numbers):
    for number in numbers:
        os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", NUMBERS)
def test_each_gives_up_what_can_be_given_up(number):
    async def work():
        with Interrupt() as interrupt:
            asyncio.get_running_loop().call_soon(send, number)
            await interrupt.during(asyncio.Event().wait())

    before = signal.getsignal(number)
    with pytest.raises(Interrupted):
        asyncio.run(work())
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("first", NUMBERS)
def test_the_second_ends_at_once(first, second):
    async def work():
        with Interrupt():
            send(first)
            send(second)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(work())


@pytest.mark.parametrize("first", NUMBERS)
def test_a_terminal_that_closes_may_say_so_twice(first):
    async def work():
        with Interrupt() as interrupt:
            send(first, signal.SIGHUP, signal.SIGHUP)
            saved.append(True)
            interrupt.check()

    saved = []
    with pytest.raises(Interrupted):
        asyncio.run(work())
    assert saved == [True]


def test_nohup_is_respected():
    async def work():
        with Interrupt() as interrupt:
            send(signal.SIGHUP)
            interrupt.check()
            return "goes on"

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert asyncio.run(work()) == "goes on"
    finally:
        signal.signal(signal.SIGHUP, before)
