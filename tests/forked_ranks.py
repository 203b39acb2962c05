"""Tests that processes make together, as ranks: forks of a process that has imported what all of them need.

An interpreter that imports torch and transformers takes eight seconds of a core, and a fork of one almost
none. `python tests/forked_ranks.py` serves: one JSON object of `TestedRanks` a line on standard input, and a
line with their exit statuses back. It computes nothing, as a fork of a process with busy threads may hang.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

LIMIT = 600.0
"""Seconds for ranks, all of which are killed then."""
DIVIDED = "SILVA_TEST_PARALLEL"
"""Tells a rank `trainer.parallel`, in JSON."""
IMPORTED = (
    "hypothesis",
    "silva.trainer.learner",
    "silva.trainer.sharding.ranks",
    "silva.trainer.transfer",
    "tests.moe",
    "tests.test_families",
    "torch.optim",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
)


@dataclass(frozen=True)
class TestedRanks:
    """`size` processes that divide a model as `parallel` says, in tests of `file` that `-k tests` chooses.

    Their files are in `folder`; what each says is in `{rank}.log` there.
    """

    __test__ = False

    size: int
    parallel: dict[str, Any]
    file: str
    tests: str
    folder: str
    port: int


class Starter:
    """Asks the process that forks."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def check(self, size: int, parallel: dict[str, Any], file: str, tests: str, folder: Path) -> None:
        """Every rank passes all tests; see `TestedRanks`."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            ranks = TestedRanks(size, parallel, file, tests, str(folder), free.getsockname()[1])
        given, taken = self._process.stdin, self._process.stdout
        assert given and taken
        print(json.dumps(dataclasses.asdict(ranks)), file=given, flush=True)
        for rank, status in enumerate(json.loads(taken.readline())):
            said = _log(ranks, rank).read_text()
            assert status == 0 and " passed" in said and " skipped" not in said, said[-4000:]


@contextlib.contextmanager
def starting() -> Iterator[Starter]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            yield Starter(process)
        finally:
            process.kill()


def _log(ranks: TestedRanks, rank: int) -> Path:
    return Path(ranks.folder) / f"{rank}.log"


def serve() -> None:
    for module in IMPORTED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        ranks = TestedRanks(**json.loads(line))
        print(json.dumps(_ended([_forked(ranks, rank) for rank in range(ranks.size)])), flush=True)


def _forked(ranks: TestedRanks, rank: int) -> int:
    if pid := os.fork():
        return pid
    status = 70
    with contextlib.suppress(BaseException), _log(ranks, rank).open("w") as log:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
        told: dict[str, Any] = {"WORLD_SIZE": ranks.size, "RANK": rank, "MASTER_ADDR": "127.0.0.1",
                                "MASTER_PORT": ranks.port, "GLOO_SOCKET_IFNAME": "lo",
                                "PYTEST_ADDOPTS": "", DIVIDED: json.dumps(ranks.parallel)}  # fmt: skip
        os.environ |= {name: str(value) for name, value in told.items()}
        status = int(
            pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-p", "no:anyio", "-k", ranks.tests,
                         f"--basetemp={ranks.folder}/{rank}", ranks.file])
        )  # fmt: skip
        sys.stdout.flush()
    os._exit(status)


def _ended(pids: list[int]) -> list[int]:
    statuses, end = dict[int, int](), time.monotonic() + LIMIT
    while len(statuses) < len(pids):
        for pid in pids:
            if pid not in statuses and (found := os.waitpid(pid, os.WNOHANG))[0]:
                statuses[pid] = os.waitstatus_to_exitcode(found[1])
            elif pid not in statuses and time.monotonic() > end:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return [statuses[pid] for pid in pids]


if __name__ == "__main__":
    serve()
