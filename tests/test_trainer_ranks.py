"""A trainer of two processes: a rank that dies or is stopped changes nothing, and both raise the same."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.runs import ROOT, differences, end_state, write_config
from tests.trainer.conftest import make_samples

from silva.config.load import load
from silva.errors import CheckpointError
from silva.registries import REGISTRIES
from silva.trainer.remote import Open, RemoteTrainer, plain_config
from silva.types import LossSpec, OptimParams, Sample
from silva.wire.transport import Peer

from supervised_run import SERVICES, Supervised, supervised, wait_for  # isort: skip (on the path by tests.runs)

LIMIT = 1200.0  # seconds, on a machine with ten times as much work as it can do
SHORT = ("--steps=2", "--eval.every=2", "--eval.tasks=4", "--checkpoint.every=1", *SERVICES)
RANKS = "--trainer.ranks=2"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc"),
]
__all__ = ["make_samples"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("ranks")
    write_config(made)
    return made


def argv(folder: Path, name: str, *options: str, command: str = "rl") -> list[str]:
    config = folder / "run.toml"
    return [command, f"@{config}", "--name", name, "--output_dir", str(folder), *SHORT, RANKS, *options]


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> dict[str, Any]:
    with supervised(argv(folder, "plain")) as process:
        assert process.wait(LIMIT) == 0 and process.left() == [], process.output
    return end_state(folder / "plain")


def second(process: Supervised) -> int | None:
    """The process of the trainer's second rank."""
    for pid in process.alive():
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"RANK=1" in environment:
            return pid
    return None


def test_each_rank_writes_its_part(folder: Path, undisturbed: dict[str, Any]) -> None:
    sizes = {
        path.name: path.stat().st_size
        for path in (folder / "plain" / "checkpoints" / "step_2" / "trainer").iterdir()
    }
    assert {"weights.safetensors", "weights.1.safetensors", "optimizer.1.safetensors"} <= sizes.keys()
    assert sizes["weights.1.safetensors"] == pytest.approx(sizes["weights.safetensors"], rel=0.2)


@pytest.mark.same_bits
def test_ranks_that_are_lost_change_nothing(folder: Path, undisturbed: dict[str, Any]) -> None:
    """One is killed in the first step and another one stopped in the second."""
    slow = ("--environments.0.delay=200", "--environments.1.delay=200")  # changes no number
    ledger = folder / "lost" / "ledger.jsonl"
    with supervised(argv(folder, "lost", *slow)) as process:
        for event, number in (("sealed", signal.SIGKILL), ("trained", signal.SIGSTOP)):
            assert wait_for(lambda e=event: ledger.exists() and f'"{e}"' in ledger.read_text(), LIMIT)  # type: ignore[misc]
            rank = wait_for(lambda: second(process), LIMIT)
            assert rank, process.output
            os.kill(rank, number)
        assert process.wait(LIMIT) == 0 and process.left() == [], process.output
    lost = [line for _, line in process.lines if line.startswith("silva: ")]
    assert lost == ["silva: trainer ended with exit code 1: it is started again"] * 2
    log = (folder / "lost" / "services.log").read_text()
    assert (
        "rank 1 ended with exit code -9: all ranks end" in log and "rank 1 was stopped: all ranks end" in log
    )
    assert differences(folder / "lost", undisturbed) == []


SCRIPT = ROOT / "examples" / "cluster" / "torchrun_nodes.sh"


def test_ranks_of_torchrun_on_two_nodes_raise_the_same_and_go_on(
    folder: Path, make_samples: Any, tmp_path: Path
) -> None:
    """Both nodes are this machine."""
    samples: list[Sample] = make_samples([9, 14])
    config = load([f"@{folder / 'run.toml'}"], REGISTRIES, env={}).config
    run = folder / "alone"

    async def use(address: str) -> list[Any]:
        asked = Open(plain_config(config.model_dump(mode="json")), False, str(run), "parameters")
        trainer = RemoteTrainer(Peer(address, name="trainer", key="secret"), asked, patience=LIMIT)
        try:
            await trainer.connect()
            with pytest.raises(CheckpointError, match="nothing"):
                await trainer.load(run / "nothing")
            found = await trainer.forward_backward(samples, LossSpec("reinforce", {}))
            found |= await trainer.optim_step(OptimParams(lr=1e-3))
            (logprobs, *_) = (await trainer.score(samples, frozenset({"logprobs"}))).logprobs or ()
            await trainer.export(run / "plain")
            return [found["grad_norm"], np.nansum(logprobs)]
        finally:
            await trainer.close()

    base, output = (json.dumps(str(path)) for path in (folder / "run.toml", folder))
    placement = 'placement = { type = "services", threads = 1 }'
    (tmp_path / "torchrun.toml").write_text(f"extends = {base}\noutput_dir = {output}\n{placement}\n")
    script = [str(shutil.copy(SCRIPT, tmp_path))]
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        meeting, port = (str(each.getsockname()[1]) for each in (one, two))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    told = {"MASTER": "127.0.0.1", "MASTER_PORT": meeting, "LISTEN_HOST": "127.0.0.1", "LISTEN_PORT": port,
            "SILVA_API_KEY": "secret", "PATH": path}  # fmt: skip
    with supervised(["0"], told, by=script) as node, supervised(["1"], told, by=script) as other:
        found = asyncio.run(use(f"http://127.0.0.1:{port}"))
    assert found == pytest.approx(alone(config, samples), rel=1e-5), [node.output, other.output]
    assert (run / "plain" / "model.safetensors").exists()


def alone(config: Any, samples: list[Sample]) -> list[Any]:
    """What one process says."""
    from silva.models.loading import load_model
    from silva.trainer.learner import Learner

    learner = Learner(load_model(config.model, seed=config.seed), config.trainer, seed=config.seed)
    learner.forward_backward(samples, LossSpec("reinforce", {}))
    norm = learner.optim_step(OptimParams(lr=1e-3))["grad_norm"]
    logprobs = learner.score(samples, frozenset({"logprobs"})).logprobs or ()
    return [norm, np.nansum(logprobs[0])]
