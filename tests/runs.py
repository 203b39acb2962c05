"""Whole runs for tests: a small configuration, a server that starts them fast, what they left behind."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from runs import CONFIG, WORLDS, differences, end_state

ROOT = Path(__file__).resolve().parents[1]

LIMIT = 1000.0  # seconds for one run, on a machine with a hundred times as much to do as it can
__all__ = [
    "LIMIT",
    "WORLDS",
    "Ended",
    "Server",
    "differences",
    "end_state",
    "metrics",
    "rollouts",
    "small",
    "write_config",
]


def write_config(folder: Path) -> Path:
    path = folder / "run.toml"
    path.write_text(CONFIG)
    return path


def small(folder: Path, **more: Any) -> dict[str, Any]:
    """The keys of a run of two seconds in this process."""
    return {
        "name": "run", "steps": 1, "output_dir": str(folder), "eval.tasks": 2,
        "environments": [{"type": f"{WORLDS}:Parity", "eval_size": 4}],
        "model": {"type": "tiny", "layers": 1, "width": 32, "heads": 2, "kv_heads": 1},
        "rollout.groups_per_step": 2, "rollout.group_size": 3, "rollout.limits.max_turn_tokens": 4,
        "algorithm.drop_zero_variance": False, "trainer.self_check": False,
        "monitoring": {"terminal": "off", "tensorboard": False, "report": False},
    } | more  # fmt: skip


@dataclass(frozen=True)
class Ended:
    """A run that has ended: its exit status (negative: a signal), its output, its folder."""

    status: int
    proof: str
    output: str
    path: Path

    def resumable(self) -> bool:
        """It said so, in words and not in a traceback."""
        return "--resume" in self.output and "Traceback" not in self.output


class Server:
    """Runs `silva rl` in forks of one process that has loaded torch."""

    def __init__(self, folder: Path):
        self.folder, self.config = folder, write_config(folder)
        self._process = subprocess.Popen(
            [sys.executable, ROOT / "benchmarks" / "runs.py"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def rl(
        self, name: str, *options: str, into: Path | None = None, command: str = "rl", **job: Any
    ) -> Ended:
        """`silva rl @run.toml --name name ...` in the folder `into`; `job`: see `Job` in benchmarks."""
        into = into or self.folder
        log, proof = into / f"{name}.log", into / f"{name}.proof"
        for file in (log, proof):
            file.unlink(missing_ok=True)
        argv = [command, f"@{self.config}", "--name", name, "--output_dir", str(into), *options]
        assert self._process.stdin is not None and self._process.stdout is not None
        order = {"argv": argv, "output": str(log), "proof": str(proof), **job}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], LIMIT)[0]:
            self._kill()
            raise TimeoutError(f"silva {argv} has not ended within {LIMIT:g} s:\n{log.read_text()}")
        status, proved = json.loads(self._process.stdout.readline())
        return Ended(status, proved, log.read_text(), into / name)

    def close(self) -> None:
        try:
            self._process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            self._kill()
            raise

    def _kill(self) -> None:
        """With the run that it has forked."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def rollouts(run: Path, step: int) -> list[dict[str, Any]]:
    columns = ["group", "trajectory", "status", "reason", "failure", "reward_raw", "advantage"]
    return pq.read_table(run / "rollouts" / f"step_{step}.parquet", columns=columns).to_pylist()
