"""The tool `python`: what the model reads of a call."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from silva.errors import CapabilityError
from silva.sandbox.process import Result
from silva.sandbox.walls import _chosen
from silva.tools.function import ToolError
from silva.tools.python import PythonSettings, shown

AUTO = _chosen("auto")
pytestmark = pytest.mark.skipif(isinstance(AUTO, str), reason=str(AUTO))


def answers(*arguments: Mapping[str, Any], **settings: Any) -> tuple[list[str], Mapping[str, float]]:
    async def play() -> tuple[list[str], Mapping[str, float]]:
        session = await PythonSettings(**settings).build().open(0)
        try:
            (tool,) = session.tools
            return [await tool(each) for each in arguments], session.metrics()
        finally:
            await session.close()

    return asyncio.run(play())


def test_the_model_reads_what_was_printed() -> None:
    texts, metrics = answers({"code": "print('a')\n2 * 3"}, {"code": "x = 1"}, {"code": "y"})
    assert texts[:2] == ["a\n6", "[no output]"] and texts[2].endswith("NameError: name 'y' is not defined")
    assert metrics == {}


def test_an_attempt_to_reach_the_network_is_told_and_counted_once() -> None:
    texts, metrics = answers({"code": "import socket\ntry: socket.socket()\nexcept OSError: pass"})
    assert texts == ["[there is no network]"] and metrics == {"network_attempts": 1.0}


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (Result("timeout", "a\n"), "a\n[stopped after 3 s]"),
        (Result("output", "aaa", cut=True), "aaa\n[stopped: more than 10000 characters of output]"),
        (Result("signal", "", 11), "[ended by SIGSEGV]"),
        (Result("signal", "", 9), "[ended by SIGKILL]\n[limits: 1024 MiB of memory, 10 s of computing]"),
        (Result("signal", "", 99), "[ended by signal 99]"),
        (Result("exit", "bye\n", 3), "bye\n[exit status 3]"),
        (Result("lost"), "[the interpreter was ended, by the code or by its limits, and starts again]"),
        (Result("ok", "", 0, False, 2), "[there is no network]"),
    ],
)
def test_how_a_call_ended_is_said_in_brackets(result: Result, words: str) -> None:
    assert shown(result, PythonSettings(seconds=3.0)) == words


BAD: tuple[Mapping[str, Any], ...] = (
    {},
    {"code": 3},
    {"code": "1", "x": 1},
    {"code": "a\0"},
    {"code": "\ud800"},
    {"code": "1" * 100_001},
)


@pytest.mark.parametrize("arguments", BAD, ids=range(len(BAD)))
def test_bad_arguments_are_told_to_the_model(arguments: Mapping[str, Any]) -> None:
    with pytest.raises(ToolError, match="python: "):
        answers(arguments)


def test_variables_stay_if_asked_for_and_then_the_episode_cannot_be_forked() -> None:
    texts, _ = answers({"code": "x = 5"}, {"code": "x"}, keep_state=True)
    assert texts[1] == "5"

    async def fork(keep_state: bool) -> None:
        session = await PythonSettings(keep_state=keep_state).build().open(0)
        try:
            await (await session.fork(1)).close()
        finally:
            await session.close()

    asyncio.run(fork(False))
    with pytest.raises(CapabilityError, match="keep_state"):
        asyncio.run(fork(True))
