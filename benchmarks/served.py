"""One part of a run as a process, for benchmarks that ask it themselves."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import numpy as np

from silva.config.load import load
from silva.registries import REGISTRIES
from silva.trainer.remote import Open, Opened, ServedTrainer, plain_config
from silva.types import LossSpec, OptimParams, Sample
from silva.wire import rpc
from silva.wire.codec import decode, encode

BINARY = "application/octet-stream"


class Server:
    """One part of a run as a process. `run` is the folder of its run, `ended` its exit code."""

    def __init__(self, folder: Path, key: str, process: subprocess.Popen[str], argv: Sequence[str]) -> None:
        self.folder, self.key, self.process, self.ended, self.argv = folder, key, process, -1, argv
        self.run = folder / "runs" / "smoke"
        assert process.stderr is not None
        line = next(line for line in process.stderr if "listening at" in line)
        self.address = line.rpartition(" ")[2].strip()
        headers = {"authorization": f"Bearer {key}"}
        self.client = httpx2.Client(base_url=self.address, headers=headers, timeout=600)

    def post(self, path: str, content: bytes) -> bytes:
        answer = self.client.post(path, content=content, headers={"content-type": BINARY})
        if answer.status_code != 200:
            raise RuntimeError(f"{path}: {answer.status_code} {answer.text}")
        return answer.content

    def opened(self) -> Opened:
        config = load(self.argv, REGISTRIES).config
        asked = Open(plain_config(config.model_dump(mode="json")), True, str(self.run), "folder")
        return decode(Opened, self.post("/open", encode(asked)))

    def trains(self) -> bool:
        """Whether it can be opened and makes an update that changes something."""
        try:
            session = self.opened().session
            self.call(session, "forward_backward", [row()], LossSpec("reinforce"))
            stepped = self.call(session, "optim_step", OptimParams(1e-3), None)
        except RuntimeError as error:
            print(error, file=sys.stderr)
            return False
        return bool(stepped["grad_norm"] > 0)

    def call(self, session: str, method: str, *arguments: Any) -> Any:
        answer = self.post(f"/sessions/{session}", rpc.encode(ServedTrainer, method, arguments))
        return rpc.decode(ServedTrainer, method, answer).result


def row() -> Sample:
    weights = np.array([0, 1, 1, 1], np.float32)
    return Sample(
        tokens=np.arange(65, 69), loss_weights=weights, logprobs=np.full(4, -1.0), temperatures=np.ones(4),
        versions=np.zeros(4, np.int64), trajectory="t", group="g", advantages=np.ones(4),
    )  # fmt: skip


@contextmanager
def served(part: str, config: Path, *options: str) -> Iterator[Server]:
    """`part`: the command, such as "trainer"."""
    key = f"tml-{secrets.token_urlsafe(16)}"  # of the form that a Tinker server wants too
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, "-m", "silva", *part.split(), f"@{config}", "--port", "0", *options],
            env=os.environ | {"SILVA_API_KEY": key}, cwd=folder, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            yield (server := Server(Path(folder), key, process, [f"@{config}", *options]))
        finally:
            process.terminate()
            server.ended = process.wait(30)
