"""What the servers of a simulation run: a policy that is a function of its weights, and their trainer.

Weights are a digest of all that they were trained on. So what was trained, how often and in which order can
be read from the trainer's own state at the end, whatever the ledger says.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from tests.simulation.network import Answer, Node

from silva.errors import ModelError
from silva.models.tiny import tiny_tokenizer
from silva.ports import FILES
from silva.protocols import EngineCapabilities, TrainerCapabilities
from silva.rendering.renderer import Renderer
from silva.server.engine import ServerLimits
from silva.server.inference import inference_app
from silva.server.trainer import TrainerServer
from silva.storage.checkpoints import disk_faults
from silva.trainer.remote import Open
from silva.types import (
    Completion,
    CompletionStop,
    LossSpec,
    OptimParams,
    Sample,
    SamplingParams,
    Signals,
    Snapshot,
    TokenScores,
    WeightFolder,
)
from silva.wire.guard import Application, error_of, fault_of

BEGIN = "begin"
CONTEXT = 2048
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
REPLIES = (*"abab", "ab", "ba", CALL, CALL[:-3])
Check = Callable[[Sequence[Sample], int], None]


def digest(*parts: Any) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


def number(*parts: Any) -> float:
    """In [0, 1)."""
    return int(digest(*parts), 16) / 2**64


def scores(weights: str, tokens: Sequence[int]) -> list[float]:
    """Log-probabilities of all tokens but the first: those of other weights differ."""
    base = 1 + 0.5 * number(weights)
    return [-base - 0.001 * (token % 7) - 0.01 * (place % 5) for place, token in enumerate(tokens[1:])]


class Sampler:
    """An engine whose replies are a function of its weights and of a request's seed.

    Args:
        lies: whether it says that it has loaded weights, and keeps the old ones.
    """

    machine: Mapping[str, Any] = {}
    notes: Sequence[str] = ()
    capabilities = EngineCapabilities(CONTEXT, loads=frozenset({"folder", "parameters"}))

    def __init__(self, node: Node, rng: Random, lies: Callable[[], bool]) -> None:
        self.node, self.rng, self.lies = node, rng, lies
        self.version, self.weights, self.computed = 0, BEGIN, 0

    async def sample(self, tokens: Sequence[int], params: SamplingParams, *, session: str = "") -> Completion:
        await self.node.works(self.rng.expovariate(20))
        place = number(self.weights, array("q", tokens).tobytes(), params.seed)
        text = REPLIES[int(place * len(REPLIES))].encode()
        found = (*text, *params.stop_token_ids[:1])[: params.max_tokens]
        logprobs = tuple(scores(self.weights, [0, *found]))
        self.computed += len(found)
        entropies, versions = (0.5,) * len(found), (self.version,) * len(found)
        stop: CompletionStop = "stop_token" if len(found) > len(text) else "length"
        return Completion(found, logprobs, logprobs, entropies, versions, stop)

    async def score(self, tokens: Sequence[int], start: int) -> TokenScores:
        await self.node.works(0.01)
        found = tuple(scores(self.weights, tokens)[start - 1 :])
        return TokenScores(found, tuple(tokens[start:]), found, self.version)

    async def load(self, snapshot: Snapshot) -> None:
        await self.node.works(self.rng.uniform(0.01, 0.1))
        assert snapshot.folder is not None
        path = Path(snapshot.folder.path)
        try:
            weights = (path / "model.safetensors").read_text()
        except OSError as error:
            raise ModelError(f"{path} holds no weights") from error
        if digest(weights) != snapshot.folder.digest:
            raise ModelError(f"the weights in {path} are not those of the digest")
        if not self.lies():
            self.weights = weights
        self.version = snapshot.version

    async def sleep(self) -> None:
        pass

    def memory(self, sequences: int, length: int) -> float:
        return 1.0 * sequences * length

    def counts(self) -> Mapping[str, float]:
        return {"tokens": float(self.computed)}


class Trained:
    """A trainer whose weights are a digest of what it was trained on.

    Attributes:
        updates: groups and contents of the rows of each optimizer step so far; part of what is saved.
    """

    def __init__(
        self, node: Node, asked: Open, rng: Random, check: Check, fails: Callable[[str], bool]
    ) -> None:
        self.node, self.rng, self.check, self.fails = node, rng, check, fails
        self.folder = Path(asked.folder)
        self.capabilities = TrainerCapabilities(publishes=asked.publishes)
        self.version, self.weights = 0, BEGIN
        self.updates: list[dict[str, Any]] = []
        self._pending: list[tuple[str, str, int]] = []  # group, digest and trained tokens of each row
        self._published: list[Path] = []
        FILES.remove_tree(self.folder / "broadcast")

    async def _works(self, call: str) -> None:
        await self.node.works(self.rng.uniform(0.01, 0.15))
        if self.fails(call):
            raise RuntimeError(f"CUDA error in {call}")

    async def score(self, samples: Sequence[Sample], needs: frozenset[str]) -> Signals:
        await self._works("score")
        rows = tuple(np.array([math.nan, *scores(self.weights, s.tokens.tolist())]) for s in samples)
        given = {name: rows for name in ("logprobs", "reference_logprobs") if name in needs}
        return Signals(**given)

    async def forward_backward(self, samples: Sequence[Sample], loss: LossSpec) -> Mapping[str, float]:
        self.check(samples, self.version)
        await self._works("forward_backward")
        new = [(s.group, _content(s), int((s.loss_weights > 0).sum())) for s in samples]
        self._pending += new
        return {"loss": number(new), "trained_tokens": float(sum(n for *_, n in new))}

    async def optim_step(self, policy: OptimParams, critic: OptimParams | None = None) -> Mapping[str, float]:
        await self._works("optim_step")
        groups = list(dict.fromkeys(group for group, *_ in self._pending))
        rows = sorted(content for _, content, _ in self._pending)
        tokens = sum(n for *_, n in self._pending)
        self.updates.append({"groups": groups, "rows": rows, "tokens": tokens})
        self.weights = digest(self.weights, sorted(self._pending), policy.lr)
        self._pending = []
        return {"lr": policy.lr, "grad_norm": number(self.weights), "nonfinite": 0.0}

    async def publish(self) -> Snapshot:
        await self._works("publish")
        self.version += 1
        return await self.snapshot()

    async def snapshot(self) -> Snapshot:
        path = self.folder / "broadcast" / f"version_{self.version}"
        with disk_faults(f"cannot write version {self.version}"):
            self._write(path, {"model.safetensors": self.weights})
        self._published = [*(each for each in self._published if each != path), path]
        while len(self._published) > 2:
            FILES.remove_tree(self._published.pop(0))
        return Snapshot(self.version, WeightFolder(str(path), digest(self.weights)))

    def _write(self, path: Path, files: Mapping[str, str]) -> None:
        temporary = path.with_name(f".{path.name}.tmp")
        FILES.remove_tree(temporary)
        temporary.mkdir(parents=True)
        for name, text in files.items():
            FILES.write(temporary / name, text.encode())
        FILES.remove_tree(path)
        FILES.rename(temporary, path)

    async def refresh_reference(self) -> None:
        await self._works("refresh_reference")

    async def restart(self) -> None:
        self._pending = []

    async def save(self, path: Path) -> None:
        path.mkdir()
        state = {"version": self.version, "weights": self.weights, "updates": self.updates}
        FILES.write(path / "state.json", json.dumps(state).encode())
        await self._works("save")
        FILES.write(path / "more.bin", b"optimizer" * 20)

    async def load(self, path: Path) -> None:
        await self._works("load")
        state = json.loads((path / "state.json").read_bytes())
        assert (path / "more.bin").read_bytes() == b"optimizer" * 20
        self.version, self.weights, self.updates = state["version"], state["weights"], state["updates"]

    async def export(self, path: Path) -> None:
        await self._works("export")
        path.mkdir(parents=True)
        state = {"version": self.version, "weights": self.weights, "updates": self.updates}
        FILES.write(path / "model.safetensors", json.dumps(state).encode())

    async def close(self) -> None:
        self._pending = []


def _content(sample: Sample) -> str:
    advantages = sample.advantages
    return digest(sample.tokens.tobytes(), b"" if advantages is None else advantages.tobytes())


class Served:
    """A real server of Silva's, asked as Starlette is asked.

    Attributes:
        shielded: what it does goes on if its client goes away; otherwise it is told.
    """

    def __init__(self, app: Application, *, shielded: bool) -> None:
        self._app, self.shielded = app, shielded

    async def answer(self, method: str, path: str, body: bytes) -> Answer:
        url = urlsplit(path)
        scope = {"type": "http", "method": method, "path": url.path, "headers": [], "root_path": "",
                 "query_string": url.query.encode(), "http_version": "1.1", "scheme": "http"}  # fmt: skip
        status, parts, bodies = 500, list[bytes](), [body]

        async def receive() -> Any:
            if not bodies:
                await asyncio.Event().wait()  # whoever goes away cancels all of this
            return {"type": "http.request", "body": bodies.pop(), "more_body": False}

        async def send(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            parts.append(message.get("body", b""))

        try:
            await self._app(scope, receive, send)  # type: ignore[arg-type]
        except Exception as error:
            return Answer(fault_of(error).status, json.dumps(error_of(error)).encode())
        return Answer(status, b"".join(parts))


def inference(engine: Sampler, runs: Path) -> Served:
    """`silva inference`."""
    return Served(
        inference_app(engine, _renderer(), model="tiny", limits=ServerLimits(folders=(runs,))), shielded=False
    )


def training(build: Callable[[Open], Trained], runs: Path) -> Served:
    """`silva trainer`."""

    async def built(asked: Open, say: Callable[[str], None]) -> Any:
        return build(asked)

    return Served(TrainerServer(built, runs).app(), shielded=True)


@functools.cache
def _renderer() -> Renderer:
    return Renderer(tiny_tokenizer())  # type: ignore[arg-type]


__all__ = ["Sampler", "Trained", "digest", "inference", "number", "training"]
