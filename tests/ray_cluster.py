"""A Ray cluster for tests, as somebody else would have it: in a session of its own, small, with a token."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from silva.config.schema import RunConfig
from silva.placement.carrier import MODE, TOKEN, TOKEN_PATH
from silva.placement.ray import Actors
from silva.placement.ray_cluster import cluster as joined
from silva.placement.settings import ADDRESSES

NEEDS_RAY = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install 'silva[ray]'"),
    pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc"),
]
LIMIT = 120.0  # seconds within which it listens
CPUS, STORE = 6, 100 << 20
START = "from ray.scripts.scripts import main; main()"


@contextmanager
def cluster() -> Iterator[dict[str, str]]:
    """The environment of those who may use it, with its address under RAY_ADDRESS."""
    with tempfile.TemporaryDirectory(prefix="ray-") as name:
        folder = Path(name)
        token = folder / "token"
        with open(os.open(token, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
        access = {MODE: "token", TOKEN_PATH: str(token), TOKEN: "", "RAY_USAGE_STATS_ENABLED": "0"}
        argv = [
            sys.executable, "-c", START, "start", "--head", "--block", "--port=0", f"--num-cpus={CPUS}",
            "--num-gpus=0", f"--object-store-memory={STORE}", f"--temp-dir={folder / 'r'}",
            "--include-dashboard=false", "--disable-usage-stats",
        ]  # fmt: skip
        with open(folder / "log", "w") as log:
            head = subprocess.Popen(
                argv, stdout=log, stderr=log, start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", **access},
            )  # fmt: skip
        try:
            yield access | {"RAY_ADDRESS": _address(head, folder)}
        finally:  # its session is its own: nobody else's Ray ends with it
            head.send_signal(signal.SIGTERM)
            try:
                head.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(head.pid, signal.SIGKILL)
                head.wait()


@contextmanager
def node(access: dict[str, str], resources: dict[str, float]) -> Iterator[subprocess.Popen[bytes]]:
    """Another node of a cluster, on this machine."""
    argv = [
        sys.executable, "-c", START, "start", f"--address={access['RAY_ADDRESS']}", "--block", "--num-cpus=1",
        "--num-gpus=0", f"--object-store-memory={STORE}", f"--resources={json.dumps(resources)}",
        "--disable-usage-stats",
    ]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_raylet_start_wait_time_s": f"{LIMIT:.0f}", **access}
    with tempfile.TemporaryFile("w+") as log:
        made = subprocess.Popen(argv, env=env, stdout=log, stderr=log, start_new_session=True)
        try:
            end, said = time.monotonic() + LIMIT, ""
            while "Ray runtime started" not in said:
                assert time.monotonic() < end and made.poll() is None, said
                time.sleep(0.1)
                said = os.pread(log.fileno(), 1 << 20, 0).decode()
            yield made
        finally:
            kill(made.pid)
            made.wait()


def kill(pid: int) -> None:
    """A process and all that it has started."""
    for each in [*Path(f"/proc/{pid}/task/{pid}/children").read_text().split()] if _lives(pid) else []:
        kill(int(each))
    if _lives(pid):
        os.kill(pid, signal.SIGKILL)


def _lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _address(head: subprocess.Popen[bytes], folder: Path) -> str:
    end = time.monotonic() + LIMIT
    while time.monotonic() < end and head.poll() is None:
        log = (folder / "log").read_text()
        if "--address='" in log and "Ray runtime started" in log:
            return log.partition("--address='")[2].partition("'")[0]
        time.sleep(0.1)
    raise AssertionError(f"no Ray cluster: {(folder / 'log').read_text()}")


@contextmanager
def parts_of(config: RunConfig) -> Iterator[None]:
    """The actors of a configuration, kept from this process, which becomes their orchestrator."""
    values = config.model_dump(mode="json")
    with (
        pytest.MonkeyPatch.context() as patch,
        joined(config.placement, print) as address,
        Actors(
            config.placement, "silva.commands.serve:carried", values,
            once=lambda name: {}, checkpoints=lambda: None, say=print, log=print,
        ) as actors,
    ):  # fmt: skip
        given = {"cluster": address, "namespace": actors.namespace, "room": actors.room}
        patch.setenv(ADDRESSES, json.dumps(given))
        loop = asyncio.new_event_loop()
        keeping = loop.create_task(actors.keep())
        thread = threading.Thread(target=loop.run_until_complete, args=(asyncio.wait([keeping]),))
        thread.start()
        try:
            yield
        finally:
            loop.call_soon_threadsafe(keeping.cancel)
            thread.join()
            loop.close()
