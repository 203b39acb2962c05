"""What a call of the sandbox costs, and whether many leave anything behind.

    .venv/bin/python benchmarks/sandbox.py --json sandbox.json           about a minute
    .venv/bin/python benchmarks/sandbox.py --calls 100000                the leak check, about 10 minutes

Warm: a call of `1 + 1` in a sandbox that has run before. Cold: a new sandbox and its first call, 0.1 s after
the last one. Beside them, in the same minute, what they cannot be cheaper than: a fork of a bare Python that
ends at once, and the start of one.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
from common import Row, machine, parser, results, write

from silva.sandbox.process import Sandbox
from silva.sandbox.settings import SandboxSettings
from silva.sandbox.walls import Walls, _problem, describe

FORKS = """
import os, sys, time
for _ in range(int(sys.argv[1])):
    began = time.perf_counter()
    if os.fork() == 0:
        os._exit(0)
    os.wait()
    print(time.perf_counter() - began)
"""


def main() -> int:
    options = parser(__doc__)
    options.add_argument(
        "--repeats", type=int, default=200, help="warm calls; a tenth as many cold (default 200)"
    )
    options.add_argument("--calls", type=int, default=2000, help="of the leak check (default 2,000)")
    given = options.parse_args()
    speed, words = machine()
    rows = [speed]
    bare = [sys.executable, "-I", "-S", "-c"]
    start = _seconds(given.repeats // 10, lambda: subprocess.run([*bare, "1"], check=True))
    forked = subprocess.run([*bare, FORKS, str(given.repeats)], capture_output=True, text=True, check=True)
    fork = [float(line) for line in forked.stdout.split()]
    rows += [*_rows("bare Python", "start", start), *_rows("bare Python", "fork", fork)]
    for walls in (Walls("bubblewrap"), Walls("userns"), Walls("none")):
        if walls.kind != "none" and (problem := _problem(walls)):
            print(f"{walls.kind}: {problem}", file=sys.stderr)
            continue
        for keep_state in (False, True):
            warm, cold = asyncio.run(measure(SandboxSettings(keep_state=keep_state), walls, given.repeats))
            case = f"{walls.kind}{', state kept' if keep_state else ''}"
            targets = ("<= 1", "<= 10") if walls.kind == "bubblewrap" and not keep_state else ("", "")
            rows += _rows(case, "warm call", warm, "a fork", fork, targets[0])
            rows += _rows(case, "cold call", cold, "a start", start, targets[1])
    rows.append(Row("1,000 at once", "all have answered", asyncio.run(at_once(1000)), "s", target="<= 5"))
    before = _children()
    seconds = asyncio.run(many(given.calls))
    rows += [
        Row("leak check", f"{given.calls:,} calls", given.calls / seconds, "/s"),
        Row("leak check", "processes left", len(_children() - before), "", target="0"),
    ]
    write(rows, given.json)
    print(words, f"walls: {describe()}", "", results(rows[1:]), sep="\n")
    return 0


async def measure(settings: SandboxSettings, walls: Walls, repeats: int) -> tuple[list[float], list[float]]:
    """Seconds of warm and of cold calls."""
    warm: list[float] = []
    cold: list[float] = []
    sandbox = Sandbox(settings, walls)
    await sandbox.run("1")
    for _ in range(repeats):
        warm.append(await _timed(lambda: sandbox.run("1 + 1")))
    await sandbox.close()
    for _ in range(repeats // 10):
        await asyncio.sleep(0.1)  # meanwhile the next one is started
        sandbox = Sandbox(settings, walls)
        cold.append(await _timed(lambda: sandbox.run("1 + 1")))  # noqa: B023
        await sandbox.close()
    return warm, cold


async def at_once(count: int) -> float:
    """Seconds until so many new sandboxes have each answered a call."""
    sandboxes = [Sandbox(SandboxSettings()) for _ in range(count)]
    began = time.perf_counter()
    results = await asyncio.gather(*(sandbox.run("1 + 1") for sandbox in sandboxes))
    seconds = time.perf_counter() - began
    await asyncio.gather(*(sandbox.close() for sandbox in sandboxes))
    assert all(result.output == "2\n" for result in results)
    return seconds


async def many(calls: int) -> float:
    """Seconds for so many calls that start processes of their own, 50 in a sandbox, 4 sandboxes at once."""
    code = "import os\nif os.fork() == 0:\n    os.setsid()\n    while True: pass"

    async def some(number: int) -> None:
        for _ in range(number // 50):
            sandbox = Sandbox(SandboxSettings())
            for _ in range(50):
                assert (await sandbox.run(code)).how == "ok"
            await sandbox.close()

    began = time.perf_counter()
    await asyncio.gather(*(some(calls // 4) for _ in range(4)))
    return time.perf_counter() - began


async def _timed(call: Callable[[], Awaitable[object]]) -> float:
    began = time.perf_counter()
    await call()
    return time.perf_counter() - began


def _seconds(repeats: int, call: Callable[[], object]) -> list[float]:
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return found


def _rows(
    case: str,
    metric: str,
    seconds: list[float],
    against: str = "",
    limit: list[float] | None = None,
    target: str = "",
) -> list[Row]:
    middle, most = (float(np.percentile(seconds, q)) * 1000 for q in (50, 99))
    ratio = float(np.median(limit)) * 1000 / middle if limit else None
    return [
        Row(case, f"{metric}, median", middle, "ms", against, ratio, target),
        Row(case, f"{metric}, p99", most, "ms"),
    ]


def _children() -> set[str]:
    """Processes below this one."""
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and f"PPid:\t{os.getpid()}\n" in (entry / "status").read_text():
                found.add(entry.name)
        except OSError:
            pass
    return found


if __name__ == "__main__":
    raise SystemExit(main())
