"""Does the gateway leak anything, or give one call the answer of another?

    .venv/bin/python benchmarks/gateway.py --kills 100 --json gateway.json

An engine without a model says the word that its prompt asks for, after some milliseconds. Three trials:

    storm        clients that give up after a random time and ask again, ten times each
    half-open    connections that stop in the head, in the body, or after the request, and stay open
    kills        programs, each with a daemon of its own, that ask all the time; one after the other they are
                 killed, or their episode is cancelled, or the process of Silva that plays them is killed

Counted: answers to another call, calls of the engine, sessions, processes and connections that are left, and
the seconds until the last of them is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
from common import Row, parser, results, write
from scripted_engine import ScriptedEngine

from silva.actors.policy import Policy
from silva.config.sections import EpisodeLimits, Sampling
from silva.environments.foreign.command import CommandProgram
from silva.models.tiny import tiny_tokenizer
from silva.protocols import Endpoint
from silva.rendering.renderer import Renderer
from silva.rollouts.calls import CallRecorder
from silva.server.gateway import SessionGateway
from silva.types import Task

LIMITS = EpisodeLimits(max_turns=100_000, max_turn_tokens=16, max_episode_tokens=4096)
TASK = Task("t", "agent", 0, {})
PATIENCE = 10.0  # seconds in which all must be gone
PROGRAM = """
import json, os, subprocess, sys, urllib.request
daemon = subprocess.Popen(["sleep", "1000"], start_new_session=True)
with open(sys.argv[1] + ".part", "w") as file:
    print(os.getpid(), daemon.pid, file=file)
os.rename(sys.argv[1] + ".part", sys.argv[1])
for number in range(100000):
    asked = {"messages": [{"role": "user", "content": f"say word-{os.getpid()}x{number}."}]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions",
                                     json.dumps(asked).encode(), {"content-type": "application/json"})
    said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
    if said != f"{os.getpid()}x{number}":
        open(sys.argv[1] + ".shifted", "w").close()
"""


Killed = tuple[list[int], float]
"""Processes of a program, and when it was killed."""


class Slow(ScriptedEngine):
    """Says the word that the prompt asks for, after a random time."""

    def __init__(self, renderer: Renderer) -> None:
        def reply(tokens: Any, params: Any) -> list[int]:
            return renderer.encode_reply(renderer.decode(tokens).rpartition("word-")[2].partition(".")[0])

        super().__init__(reply)
        self.running, self._random = 0, random.Random(0)

    async def sample(self, tokens: Any, params: Any, *, session: str = "") -> Any:
        self.running += 1
        try:
            await asyncio.sleep(self._random.random() * 0.02)
            return await super().sample(tokens, params, session=session)
        finally:
            self.running -= 1


class Played:
    """One engine, one gateway, and its sessions."""

    def __init__(self, renderer: Renderer) -> None:
        self.renderer, self.engine, self.gateway = renderer, Slow(renderer), SessionGateway()

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[Endpoint]:
        policy = Policy(self.engine, self.renderer, Sampling())
        calls = CallRecorder(policy, self.renderer, LIMITS, id="e", seed=0, label="agent")
        async with self.gateway.open(calls, TASK) as endpoint:
            yield endpoint

    @property
    def left(self) -> int:
        return self.engine.running + len(self.gateway._live)


async def seconds_until(done: Callable[[], bool]) -> float:
    began = time.monotonic()
    while not done() and time.monotonic() - began < PATIENCE:
        await asyncio.sleep(0.01)
    return time.monotonic() - began


async def storm(played: Played, clients: int) -> list[Row]:
    rng, shifted, answered = random.Random(1), 0, 0

    async def one(number: int, endpoint: Endpoint) -> None:
        nonlocal shifted, answered
        body = {"messages": [{"role": "user", "content": f"say word-{number}."}]}
        for attempt in range(10):
            try:
                async with httpx2.AsyncClient(timeout=rng.choice([0.005, 0.02, 0.1, 20.0])) as client:
                    headers = {"x-stainless-retry-count": str(attempt)}
                    answer = await client.post(
                        f"{endpoint.openai}/chat/completions", json=body, headers=headers
                    )
            except httpx2.TransportError:
                continue
            answered += 1
            shifted += answer.json()["choices"][0]["message"]["content"] != str(number)

    async with played.session() as endpoint:
        await asyncio.gather(*(one(number, endpoint) for number in range(clients)))
    seconds = await seconds_until(lambda: played.left == 0)
    return rows("storm", answered, shifted, played.left, seconds)


async def half_open(played: Played, connections: int) -> list[Row]:
    head = "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    asked = '{{"messages": [{{"role": "user", "content": "word-1. "}}]}}'
    beginnings = ["POST /x", head, head + "content-length: 80\r\n\r\n{{",
                  head + f"content-length: 55\r\n\r\n{asked}"]  # fmt: skip
    files = len(os.listdir("/proc/self/fd"))
    writers = []
    async with played.session() as endpoint:
        host, path = endpoint.openai.removeprefix("http://").split("/", 1)
        for number in range(connections):
            _, writer = await asyncio.open_connection(*host.split(":"))
            writer.write(beginnings[number % 4].format(path=f"/{path}/chat/completions").encode())
            writers.append(writer)
        async with httpx2.AsyncClient(timeout=20) as client:
            body = {"messages": [{"role": "user", "content": "say word-7."}]}
            answer = await client.post(f"{endpoint.openai}/chat/completions", json=body)
            shifted = answer.json()["choices"][0]["message"]["content"] != "7"
    seconds = await seconds_until(lambda: played.left == 0)
    for writer in writers:
        writer.close()
    await seconds_until(lambda: len(os.listdir("/proc/self/fd")) <= files)
    left = played.left + max(0, len(os.listdir("/proc/self/fd")) - files)
    return rows("half-open", connections, int(shifted), left, seconds)


def episode(folder: str, number: int) -> None:
    """A process of Silva that plays one program."""

    async def play() -> None:
        async with Played(Renderer(tiny_tokenizer())).session() as endpoint:
            await program(folder, number).run(TASK, endpoint)

    asyncio.run(play())


def program(folder: str, number: int) -> CommandProgram:
    return CommandProgram([sys.executable, "-S", "-c", PROGRAM, f"{folder}/{number}"])


async def kills(played: Played, count: int) -> list[Row]:
    rng, slowest, left = random.Random(2), 0.0, 0
    with tempfile.TemporaryDirectory() as folder:
        for number in range(count):
            how = killed_silva if number % 3 == 2 else killed_here
            pids, began = await how(played, folder, number, rng)
            alive = [Path(f"/proc/{pid}") for pid in pids]
            await seconds_until(partial(all_gone, played, alive))
            slowest = max(slowest, time.monotonic() - began)
            left += sum(map(Path.exists, alive)) + played.left
        shifted = len(list(Path(folder).glob("*.shifted")))
        left += len(list(Path(tempfile.gettempdir()).glob("silva-program-*")))
    return rows("kills", count, shifted, left, slowest)


def all_gone(played: Played, alive: list[Path]) -> bool:
    return played.left == 0 and not any(map(Path.exists, alive))


async def killed_here(
    played: Played, folder: str, number: int, rng: random.Random
) -> tuple[list[int], float]:
    """The program is killed, or its episode is cancelled."""
    async with played.session() as endpoint:
        task = asyncio.ensure_future(program(folder, number).run(TASK, endpoint))
        pids = await begun(folder, number, rng)
        if number % 3:
            task.cancel()
        else:
            os.kill(pids[0], signal.SIGKILL)
        began = time.monotonic()
        await asyncio.gather(task, return_exceptions=True)
    return pids, began


async def killed_silva(
    played: Played, folder: str, number: int, rng: random.Random
) -> tuple[list[int], float]:
    """The process of Silva that plays the program is killed."""
    silva = multiprocessing.get_context("fork").Process(target=episode, args=(folder, number))
    silva.start()
    pids = await begun(folder, number, rng)
    silva.kill()
    began = time.monotonic()
    await asyncio.to_thread(silva.join)
    return pids, began


async def begun(folder: str, number: int, rng: random.Random) -> list[int]:
    """The processes of a program that has been asking for a moment."""
    file = Path(folder, str(number))
    while not file.exists():
        await asyncio.sleep(0.005)
    await asyncio.sleep(rng.random() * 0.1)
    return [int(each) for each in file.read_text().split()]


def rows(case: str, count: int, shifted: int, left: int, seconds: float) -> list[Row]:
    return [
        Row(case, "answers, connections or kills", count, ""),
        Row(case, "answers to another call", shifted, "", target="0"),
        Row(case, "left behind", left, "", target="0"),
        Row(case, "until all is gone, at most", seconds, "s", target=f"<= {PATIENCE:g}"),
    ]


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--kills", type=int, default=100, help="programs that are killed (default 100)")
    given = options.parse_args()
    played = Played(Renderer(tiny_tokenizer()))

    async def all_of_it() -> list[Row]:
        return [
            *await storm(played, 2 * given.kills),
            *await half_open(played, given.kills),
            *await kills(played, given.kills),
        ]

    found = asyncio.run(all_of_it())
    print(results(found))
    write(found, given.json)
    missed = [row for row in found if row.metric in ("answers to another call", "left behind") and row.value]
    return 1 if missed or any(row.unit == "s" and row.value > PATIENCE for row in found) else 0


if __name__ == "__main__":
    sys.exit(main())
