"""Episodes that wait for slow tools: each calls one of 1 s four times, and in one of ten a call hangs.

    .venv/bin/python benchmarks/tools.py --json tools.json          about a minute

200 are live at once. Ideal: each lasts as long as it waits, 4 s, or 6 s with a hung call up to its limit, and
the next one begins when one ends.
A tool is a coroutine or a function that blocks a thread.
"""

from __future__ import annotations

import asyncio
import heapq
import threading
import time
from collections.abc import Callable
from typing import Any

from common import Row, machine, parser, results, write

from silva.environments.bases.tool_qa import Question, ToolQA
from silva.types import Message, ToolCall

SECONDS = 1.0
LIMIT = 2.0
CALLS = 4
HANGS = 10  # every tenth episode
ENDED = threading.Event()


async def look_up(word: str) -> str:
    """A slow service."""
    await asyncio.sleep(SECONDS)
    return word


async def hang(word: str) -> str:
    """A service that never answers."""
    await asyncio.Event().wait()
    return word


def look_up_blocking(word: str) -> str:
    """A slow service."""
    time.sleep(SECONDS)
    return word


def hang_blocking(word: str) -> str:
    """A service that never answers."""
    ENDED.wait()
    return word


class Words(ToolQA):
    type: str = "words"
    blocking: bool = False
    tool_timeout: float = LIMIT
    max_tool_calls: int = CALLS + 1

    def questions(self) -> list[Question]:
        return [Question(f"What is word {i}?", f"w{i}") for i in range(2000)]

    def tools(self) -> list[Callable[..., Any]]:
        return [look_up_blocking, hang_blocking] if self.blocking else [look_up, hang]


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--live", type=int, default=200, help="episodes at once (default 200)")
    options.add_argument("--episodes", type=int, default=600, help="episodes in all (default 600)")
    given = options.parse_args()
    speed, words = machine()
    rows = [speed]
    for blocking in (False, True):
        settings = Words(blocking=blocking, train_size=given.episodes, eval_size=8)
        seconds, ended, late = asyncio.run(measure(settings, given.live, given.episodes))
        ideal = schedule(given.live, given.episodes)
        case = f"{given.live} live, {'threads' if blocking else 'coroutines'}"
        rows += [
            Row(
                case, "episodes", ended / seconds, "/s", "all waiting side by side", ideal / seconds, ">= 0.9"
            ),
            Row(case, "episodes without an end", given.episodes - ended, "", target="0"),
            Row(case, "longest over the limit of a hung call", late * 1000, "ms"),
        ]
    ENDED.set()
    write(rows, given.json)
    print(words, "", results(rows[1:]), sep="\n")
    return 0


def schedule(live: int, episodes: int) -> float:
    """Seconds until all have ended, if nothing but waiting takes time."""
    free = [0.0] * live  # when each slot is
    for index in range(episodes):
        heapq.heapreplace(free, free[0] + CALLS * SECONDS + LIMIT * (index % HANGS == 0))
    return max(free)


async def measure(settings: Words, live: int, episodes: int) -> tuple[float, int, float]:
    """Seconds, episodes that ended, the longest time (s) that a hung call took beyond its limit."""
    taskset, slots = settings.taskset(), asyncio.Semaphore(live)
    tasks = taskset.tasks("train")
    names = [tool.__name__ for tool in settings.tools()]
    late: list[float] = []

    async def play(index: int) -> bool:
        async with slots:
            environment = taskset.environment(tasks[index])
            await environment.reset()
            for turn in range(CALLS):
                await environment.step(_call(names[0], turn))
            if index % HANGS == 0:
                began = time.perf_counter()
                await environment.step(_call(names[1], CALLS))
                late.append(time.perf_counter() - began - LIMIT)
            step = await environment.step(Message("assistant", tasks[index].answer[0]))
            await environment.close()
            return step.terminated and step.rewards == {"correct": 1.0}

    began = time.perf_counter()
    ended = await asyncio.gather(*(play(index) for index in range(episodes)))
    return time.perf_counter() - began, sum(ended), max(late)


def _call(name: str, turn: int) -> Message:
    return Message("assistant", "", tool_calls=(ToolCall(name, {"word": "w"}),), id=f"reply-{turn}")


if __name__ == "__main__":
    raise SystemExit(main())
