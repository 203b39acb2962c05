"""What the servers of a simulation run: a policy that is a function of its weights, and their trainer.

Weights are a digest of all that they were trained on. So what was trained, how often and in which order can
be read from the trainer's own state at the end, whatever the ledger says.
"""

from __future__ import annotations

import asyncio
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
from tests.simulation.network import Answer, Node, refusal

from silva import __version__
from silva.ports import FILES
from silva.protocols import TrainerCapabilities
from silva.server.trainer import TrainerServer
from silva.storage.checkpoints import disk_faults
from silva.trainer.remote import Open
from silva.types import LossSpec, OptimParams, Sample, Signals, Snapshot, WeightFolder
from silva.wire.guard import error_of, fault_of

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


class Inference:
    """Speaks the dialect of `silva inference`, see engines/remote/wire.py."""

    shielded = False

    def __init__(self, node: Node, rng: Random, lies: Callable[[str], bool]) -> None:
        self.node, self.rng, self.lies = node, rng, lies
        self.version, self.weights, self.computed = 0, BEGIN, 0
        self.held = [f"start-{node.process}"]

    async def answer(self, method: str, path: str, body: bytes) -> Answer:
        where = urlsplit(path).path
        asked = json.loads(body) if body else {}
        handler = {
            "/alive": self._alive, "/capabilities": self._capabilities, "/v1/completions": self._complete,
            "/score": self._score, "/load": self._load, "/sleep": self._sleep,
        }[where]  # fmt: skip
        found = await handler(asked)
        return found if isinstance(found, Answer) else Answer(200, json.dumps(found).encode())

    async def _alive(self, asked: Any) -> Any:
        return {"role": "inference", "version": self.version, "weights": self.held[-1], "silva": __version__,
                "pid": self.node.number, "counts": {"tokens": float(self.computed)}}  # fmt: skip

    async def _capabilities(self, asked: Any) -> Any:
        return {
            "context": CONTEXT, "entropies": True, "loads": ["folder", "parameters"], "machine": {},
            "notes": [], "version": self.version, "weights": self.held[-1], "model": "tiny",
            "silva": __version__, "memory_per_token": 1.0,
        }  # fmt: skip

    async def _complete(self, asked: Any) -> Any:
        began = len(self.held) - 1
        await self.node.works(self.rng.expovariate(20))
        prompt, seed = asked["prompt"], asked["seed"]
        text = REPLIES[int(number(self.weights, array("q", prompt).tobytes(), seed) * len(REPLIES))]
        tokens = [*text.encode(), *asked["stop_token_ids"][:1]][: asked["max_tokens"]]
        ended = len(tokens) > len(text.encode())
        logprobs = scores(self.weights, [0, *tokens])
        self.computed += len(tokens)
        own = {"raw_logprobs": logprobs, "entropies": [0.5] * len(tokens), "cached_tokens": 0,
               "versions": [self.version] * len(tokens),
               "stop_reason": "stop_token" if ended else "length"}  # fmt: skip
        choice = {"token_ids": tokens, "logprobs": {"token_logprobs": logprobs}, "silva": own}
        return {"choices": [choice], "weights": self.held[began:]}

    async def _score(self, asked: Any) -> Any:
        began = len(self.held) - 1
        await self.node.works(0.01)
        tokens, start = asked["tokens"], asked["start"]
        found = scores(self.weights, tokens)[start - 1 :]
        return {"logprobs": found, "likeliest": tokens[start:], "likeliest_logprobs": found,
                "version": self.version, "weights": self.held[began:]}  # fmt: skip

    async def _load(self, asked: Any) -> Any:
        await self.node.works(self.rng.uniform(0.01, 0.1))
        path, expected = Path(asked["folder"]["path"]), asked["folder"]["digest"]
        try:
            weights = (path / "model.safetensors").read_text()
        except OSError:
            return refusal(409, f"{path} holds no weights", "ModelError")
        if digest(weights) != expected:
            return refusal(409, f"the weights in {path} are not those of the digest", "ModelError")
        self.held.append(expected)
        await self.node.works(0.001)
        if not self.lies("load"):
            self.weights = weights
        self.version = asked["version"]
        return {"version": self.version}

    async def _sleep(self, asked: Any) -> Any:
        return {}


class Trained:
    """A trainer whose weights are a digest of what it was trained on.

    Attributes:
        updates: the groups of each optimizer step so far; part of what is saved.
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
        self.updates.append({"groups": groups, "tokens": sum(n for *_, n in self._pending)})
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


class Training:
    """The real server of a trainer, asked as Starlette is asked."""

    shielded = True

    def __init__(self, build: Callable[[Open], Trained], runs: Path) -> None:
        async def built(asked: Open, say: Callable[[str], None]) -> Any:
            return build(asked)

        self._app = TrainerServer(built, runs).app()

    async def answer(self, method: str, path: str, body: bytes) -> Answer:
        url = urlsplit(path)
        scope = {"type": "http", "method": method, "path": url.path, "headers": [], "root_path": "",
                 "query_string": url.query.encode(), "http_version": "1.1", "scheme": "http"}  # fmt: skip
        sent: dict[str, Any] = {"body": b""}

        async def receive() -> Any:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            sent["status"] = message.get("status", sent.get("status"))
            sent["body"] += message.get("body", b"")

        try:
            await self._app(scope, receive, send)  # type: ignore[arg-type]
        except asyncio.CancelledError:
            raise
        except Exception as error:
            return Answer(fault_of(error).status, json.dumps(error_of(error)).encode())
        return Answer(sent["status"], sent["body"])


__all__ = ["CONTEXT", "Inference", "Trained", "Training", "digest", "number"]
