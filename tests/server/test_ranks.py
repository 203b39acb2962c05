"""Ranks of one machine meet where nobody else can come in. Runs with ranks: tests/test_trainer_ranks.py."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
from tests.runs import ROOT
from tests.sockets import LOOPBACK

from silva.errors import ConfigError
from silva.server.ranks import joined

RANKS = """
import os
import torch.distributed as dist
from silva.server.ranks import joined
from tests.sockets import listening

other = os.fork()
os.environ["RANK"] = "0" if other else "1"
with joined(1, "cpu", print):
    dist.barrier()
    os.write(1, " ".join([*listening([os.getpid()]), "\\n"]).encode())  # a whole line: two processes write
    dist.barrier()
if other:
    assert os.waitpid(other, 0)[1] == 0
"""


def told(port: int) -> dict[str, str]:
    return {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks for sockets in /proc")
def test_ranks_that_a_launcher_starts_on_one_machine_listen_on_loopback() -> None:
    """For what they meet at, and for what gloo sends."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        environment = {**os.environ, **told(free.getsockname()[1]), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", RANKS], env=environment, capture_output=True, text=True, timeout=300
    )
    found = done.stdout.split()
    assert done.returncode == 0 and {*found} <= LOOPBACK and len(found) == 2, (found, done.stderr)


def test_where_ranks_meet_is_said_and_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for name, value in {**told(taken.getsockname()[1]), "RANK": "0"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # so that it is put back
        with (
            pytest.raises(ConfigError, match=r"MASTER_PORT = \d+: Address"),
            joined(2, "cpu", print),
        ):
            pass
    monkeypatch.delenv("MASTER_ADDR")
    with pytest.raises(ConfigError, match="MASTER_ADDR and MASTER_PORT: got ''"), joined(2, "cpu", print):
        pass
