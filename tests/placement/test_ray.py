"""What is asked of a Ray cluster before anything starts there; runs are in test_ray_runs.py."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from silva.aio import first
from silva.environments.process.worker import NUMBER, WorkerEpisode
from silva.errors import ConfigError
from silva.placement import ray as placement
from silva.placement.carrier import MODE, TOKEN, TOKEN_PATH, CarriedPart
from silva.placement.ray import PART, Actors, _end_stopped, missing
from silva.placement.ray_cluster import _use_token
from silva.placement.ray_worker import CarriedWorker
from silva.placement.settings import RayPlacementSettings
from silva.protocols import WorkerSpec
from silva.signals import is_stopped
from silva.types import Task
from silva.wire import rpc
from silva.wire.codec import encode


@pytest.mark.parametrize("address", ["head", "head:", "ray://head:1", "head:port", "a b:1", "user@head:1"])
def test_an_address_is_a_host_with_a_port(address: str) -> None:
    with pytest.raises(ValidationError, match="HOST:PORT"):
        RayPlacementSettings(address=address)


def test_a_part_needs_something() -> None:
    """Ray has no empty bundles."""
    with pytest.raises(ValidationError, match="at least 1 item"):
        RayPlacementSettings(server_needs={})


def test_what_is_missing_is_counted() -> None:
    nodes = [{"CPU": 4.0, "GPU": 1.0, "node:a": 1.0}, {"CPU": 8.0}]
    needs = {"trainer": {"CPU": 4, "GPU": 2}, "inference": {"CPU": 4}, "inference1": {"CPU": 4}}
    told = missing(needs, nodes, {"CPU": 10.0, "GPU": 1.0})
    assert "Asked: CPU 12, GPU 2 (trainer CPU 4, GPU 2; inference CPU 4; inference1 CPU 4)" in told
    assert "there: CPU 12, GPU 1 on 2 nodes, of which free: CPU 10, GPU 1. " in told
    assert (
        "trainer needs GPU 2 on one node, and no node has more than 1; CPU: 2 missing; GPU: 1 missing" in told
    )
    told = missing(
        {"trainer": {"CPU": 3}, "inference": {"CPU": 3}}, [{"CPU": 4.0}, {"CPU": 2.0}], {"CPU": 6.0}
    )
    assert "no node has enough of all together" in told


def test_a_token_is_asked_for_and_closed_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (MODE, TOKEN, TOKEN_PATH):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    said: list[str] = []
    with pytest.raises(ConfigError, match="got no token for it, expected RAY_AUTH_TOKEN_PATH"):
        _use_token("head:6379", said.append)
    file = tmp_path / ".ray" / "auth_token"
    file.parent.mkdir()
    file.write_text("secret")
    file.chmod(0o644)  # as Ray writes it
    _use_token("head:6379", said.append)
    assert os.environ[MODE] == "token" and file.stat().st_mode & 0o777 == 0o600
    assert said == [f"{file} could be read by others: its mode is 600 now"]


TELLING = """
import os
from silva.environments.settings import EnvironmentSettings

class Telling(EnvironmentSettings):
    def taskset(self):
        return self
    def environment(self, task):
        with open("told", "w") as file:
            file.write(f"{os.environ.get('GIVEN')} {os.environ.get('RAY_AUTH_TOKEN')}")
        os._exit(5)
"""
ASKS = """
import asyncio, json, sys
from silva.engines import ENGINES
from silva.placement.carrier import CarriedPart

sys.path.append(sys.argv[1])
ENGINES["echo"] = "echo_engine:EchoEngine"

async def main():
    part = CarriedPart()
    values = {"engine": {"type": "echo"}, "model": {"name": sys.argv[2]}, "output_dir": sys.argv[2]}
    spec = json.dumps({"env": {}, "folder": sys.argv[2], "values": values}).encode()
    assert not await part.open("silva.commands.serve:carried", "inference", spec)
    print(await part.ask(b"GET /a?b=%20c ", b""), await part.lines(), flush=True)
    await part.ask(b"GET /end ", b"")
    await asyncio.sleep(60)
asyncio.run(main())
"""


@pytest.mark.slow
def test_a_server_of_others_is_launched_in_the_actor_and_ends_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    argv = [sys.executable, "-c", ASKS, str(Path(__file__).parent), str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == ["b'418\\n/a?b=%20c True' b'asked'"], done.stderr
    assert done.returncode == 1


def test_an_error_of_a_part_is_told_by_name(tmp_path: Path) -> None:
    values = {"model": {"name": str(tmp_path / "nothing")}, "output_dir": str(tmp_path)}
    spec = json.dumps({"env": {}, "folder": "", "values": values}).encode()
    told = asyncio.run(CarriedPart().open("silva.commands.serve:carried", "inference", spec))
    kind, words = json.loads(told)
    assert kind == "ModelError" and str(tmp_path / "nothing") in words


@pytest.mark.slow
def test_a_worker_in_an_actor_has_what_it_is_given_and_says_how_it_ended(tmp_path: Path) -> None:
    """And no variable of the actor's that is not the machine's, such as the cluster's token."""
    (tmp_path / "telling.py").write_text(TELLING)
    spec = WorkerSpec(3, "telling.py:Telling", '{"type": "telling.py:Telling"}', {"GIVEN": "a"})

    async def told() -> list[bytes]:
        worker = CarriedWorker()
        call = (7).to_bytes(NUMBER, "little") + rpc.encode(
            WorkerEpisode, "make", [Task("t", "telling", 1, {})]
        )
        return [await worker.open(str(tmp_path).encode(), encode(spec)), await worker.ask(call)]

    here = os.getcwd()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TOKEN, "secret")
        try:
            ready, made = asyncio.run(told())
        finally:
            os.chdir(here)
    assert (ready, made) == (b"\n", b"exit status 5\n")
    assert (tmp_path / "told").read_text() == "a None"
    ready, _ = asyncio.run(CarriedWorker().open(b"/nothing", encode(spec))).split(b"\n")
    assert ready == b"[Errno 2] No such file or directory: '/nothing'"


class Answering:
    """An actor whose `well` answers so many times, and then nothing."""

    def __init__(self, answers: int) -> None:
        self.well, self.left = self, answers

    async def remote(self) -> bytes:
        self.left -= 1
        if self.left < 0:
            await asyncio.Event().wait()
        return b""


@pytest.mark.ray
def test_an_actor_that_stops_while_it_is_opened_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="needs Ray: pip install 'silva[ray]'")
    monkeypatch.setattr(placement, "CHECK", 0.001)

    async def noticed(seconds: float, *answers: int) -> bool:
        work = asyncio.sleep(seconds)  # opening
        return await first(work, placement.first_silence([Answering(n) for n in answers], 0.05)) is None

    assert asyncio.run(noticed(math.inf, 9, 3)) and asyncio.run(noticed(math.inf, 0))
    assert not asyncio.run(noticed(0.5, 10_000, 10_000))


@pytest.mark.slow
def test_a_part_that_is_stopped_before_it_answers_leaves_time_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray, killed = pytest.importorskip("ray"), list[Any]()

    class Stopped:
        class well:
            remote = staticmethod(lambda: asyncio.Event().wait())

    monkeypatch.setattr(ray, "kill", killed.append)
    monkeypatch.setattr(Actors, "_started", lambda *given: Stopped())
    nothing: Any = lambda *given: {}  # noqa: E731
    values = {"environments": [], "trainer": {"ranks": 1}}
    settings = RayPlacementSettings(patience=0.2)
    actors = Actors(settings, "", values, once=nothing, checkpoints=nothing, say=nothing, log=nothing)
    why, opened = asyncio.run(actors._life(["inference"], {}))
    assert (why, opened) == ("did not start within 0.1 s (placement.patience = 0.2)", False)
    assert len(killed) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_of_killed_actors_what_is_stopped_is_ended_and_nothing_else() -> None:
    """Ray's own kill leaves a process that was stopped while its actor was made."""
    wait = [sys.executable, "-c", "import time; print(flush=True); time.sleep(99)"]
    with contextlib.ExitStack() as stack:
        processes = []
        for name, stopped in (("a@1", True), ("a@2", True), ("b@1", True), ("a@1", False)):
            process = subprocess.Popen(wait, env={**os.environ, PART: name}, stdout=subprocess.PIPE)
            stack.callback(process.wait)
            stack.callback(process.kill)
            assert process.stdout is not None and process.stdout.readline() == b"\n"
            if stopped:
                process.send_signal(signal.SIGSTOP)
                while not is_stopped(process.pid):
                    time.sleep(0.001)
            processes.append(process)
        _end_stopped([f"{PART}=a@1".encode()])
        assert processes[0].wait() == -signal.SIGKILL
        assert [each.poll() for each in processes[1:]] == [None] * 3
        for process in processes:
            assert process.stdout is not None
            process.stdout.close()


JOINS = """
import os, subprocess, sys
from silva.placement.ray_cluster import cluster
from silva.placement.settings import RayPlacementSettings

def ask(**who):
    env = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_TOKEN_PATH"} if who else {}
    code = f"from ray._raylet import GcsClient; print(GcsClient(address={address!r}).check_alive([], 60))"
    done = subprocess.run([sys.executable, "-c", code], env=env | who or None, capture_output=True, text=True)
    print(done.returncode, "InvalidAuthToken" in done.stderr, flush=True)

with cluster(RayPlacementSettings(), print) as address:
    ask()
    ask(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="0" * 64)
    ask(RAY_AUTH_MODE="disabled")
"""


@pytest.mark.ray
@pytest.mark.slow
def test_nobody_joins_a_cluster_of_its_own_with_another_token_or_none() -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("needs Ray: pip install 'silva[ray]'")
    done = subprocess.run([sys.executable, "-c", JOINS], capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines() == ["0 False", "1 True", "1 True"], done.stderr
