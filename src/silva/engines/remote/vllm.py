"""vLLM's stock server (0.32) as a dialect: see wire.py for what a dialect is."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from silva.engines.remote.vllm_adapters import LOAD, UNLOAD, FolderAdapters
from silva.engines.remote.wire import Facts, Pulse, ServedResult, read_answer, sampling_fields
from silva.errors import CapabilityError, EngineError
from silva.types import Completion, CompletionStop, SamplingParams, Snapshot, TokenScores
from silva.wire.transport import Peer, Refused, Unreachable

if TYPE_CHECKING:
    import numpy as np

IMPOSSIBLE = -9000.0  # vLLM writes -9999 for a log-probability of minus infinity
ROUNDING = 1e-4  # by which the likeliest probabilities of a row may add up to too much or too little
RESUME = 10.0  # seconds; nobody waits longer for a server that is gone, and `facts` resumes it later
LARGE_VOCABULARY = 1 << 18  # where the real size is unknown; it moves the estimate of an entropy little


class VllmDialect:
    """That of vLLM's stock server (0.32), started with --logprobs-mode processed_logprobs.

    Loading weights needs VLLM_SERVER_DEV_MODE=1. The version of a token is the one that the client knew the
    server to hold when the request went out: if weights were loaded meanwhile, that is too old for the last
    tokens, and never too new. Requests in flight are paused for a load of a whole model and computed again
    with the new weights, as those of the local engine are.

    Args:
        model: its name there; "" takes the first one.
        vocabulary: how many tokens the model has; 0: unknown.
        top_logprobs: of how many of the likeliest tokens to ask for log-probabilities, from which entropies
            are estimated; at least 2.
        reload: what its workers call the loading of weights: `silva_reload` if Silva has launched it.
        lora: the model has adapters. A server that loads such gets each version under a name of its own, and
            requests name the version: those in flight end with the one that they began with. (What is loaded
            in place of another, with `load_inplace`, vLLM 0.32 reads again from its file at every step.)
        sent: the trainer sends weights to its workers (trainer/broadcast.py). Meanwhile a server is paused,
            and its core answers nobody.
    """

    folders = True

    def __init__(
        self,
        model: str = "",
        *,
        vocabulary: int = 0,
        top_logprobs: int = 20,
        reload: str = "reload_weights",
        lora: bool = False,
        sent: bool = False,
    ) -> None:
        self._model, self._top, self._reload, self._lora = model, top_logprobs, reload, lora
        self._vocabulary, self._sent = vocabulary or LARGE_VOCABULARY, sent
        self._models: dict[str, str] = {}  # what requests name, by address
        self._adapters = FolderAdapters()
        self._tells: set[str] = set()  # addresses of servers that say whether their core answers

    async def facts(self, peer: Peer, timeout: float) -> Facts:
        """Also lets a server go on that was left paused by a client which died while it loaded weights."""

        def read(answer: Any) -> tuple[str, int]:
            data = answer["data"]  # adapters have no length
            models = {str(each["id"]): int(n) for each in data if (n := each["max_model_len"]) is not None}
            if self._model and self._model not in models:
                raise CapabilityError(
                    f"the {peer.name} at {peer.address} has no model {self._model!r}; it has "
                    f"{', '.join(models)}"
                )
            name = self._model or next(iter(models))
            return name, models[name]

        answer = await peer.get("/v1/models", timeout=timeout)
        self._models[peer.address], context = read_answer(peer, "/v1/models", answer, read)
        self._adapters.forget(peer)
        number = (await peer.get("/version", timeout=timeout))["version"]
        notes = ["vLLM: entropies are estimates, and the last bits of log-probabilities do not repeat"]
        try:
            if (await peer.get("/is_paused", timeout=timeout))["is_paused"]:
                await self._go_on(peer, timeout)
            loads = frozenset({"folder", "sent"} if self._sent else {"folder"})
            self._tells.add(peer.address)
        except Refused as refused:
            if refused.status != 404:
                raise
            loads = frozenset()
            notes.append("vLLM: it cannot load weights; VLLM_SERVER_DEV_MODE=1 in its environment allows it")
        if self._lora and await self._loads_adapters(peer, timeout):
            loads |= {"adapter"}
        routes, name = await self._check_mode(peer, timeout), self._models[peer.address]
        machine = {"server": f"vLLM {number}"}
        return Facts(context, 0, name, loads=loads, machine=machine, notes=tuple(notes), routes=routes)

    async def alive(self, peer: Peer, timeout: float, core: float) -> Pulse:
        """`/ping` answers as long as the process of the core exists, even if the core hangs. The core itself
        answers `/is_paused`, between two of its steps."""
        await peer.send("/ping", b"", timeout=timeout)
        asks = core > 0 and peer.address in self._tells and not self._sent
        if asks:
            await peer.get("/is_paused", timeout=core)
        return Pulse(computes=asks)

    async def sample(
        self,
        peer: Peer,
        tokens: Sequence[int],
        params: SamplingParams,
        version: int,
        adapter: Path | None = None,
    ) -> ServedResult[Completion]:
        asked = sampling_fields(tokens, params) | {"logprobs": self._top}
        answer = await self._complete(peer, asked, adapter=adapter)

        def read(answer: Any) -> ServedResult[Completion]:
            (choice,) = answer["choices"]
            found = tuple(choice["token_ids"])
            sampled = tuple(choice["logprobs"]["token_logprobs"])
            details = answer["usage"].get("prompt_tokens_details") or {}
            if params.temperature == 0:  # a greedy choice is certain; vLLM gives the model's own numbers
                logprobs, raw, entropies = (0.0,) * len(found), sampled, (0.0,) * len(found)
            else:
                logprobs, raw = sampled, sampled if _whole(params) else (math.nan,) * len(found)
                rows = [list(row.values()) for row in choice["logprobs"]["top_logprobs"]]
                entropies = estimated_entropies(rows, self._top, self._vocabulary)
            stop = _stop(choice["finish_reason"], choice.get("stop_reason"))
            cached = int(details.get("cached_tokens") or 0)
            own = (version,) * len(found)
            routes = _routes(choice, len(tokens) + len(found))
            parts = (None, None) if routes is None else (routes[len(tokens) :], routes[: len(tokens)])
            return ServedResult(Completion(found, logprobs, raw, entropies, own, stop, cached, *parts))

        return read_answer(peer, "/v1/completions", answer, read)

    async def score(
        self,
        peer: Peer,
        tokens: Sequence[int],
        start: int,
        version: int,
        adapter: Path | None = None,
        top: int = 0,
    ) -> ServedResult[TokenScores]:
        """vLLM samples a token more, so the text must be shorter than the context by one."""
        body = {"prompt": list(tokens), "max_tokens": 1, "temperature": 0.0,
                "prompt_logprobs": max(top, 1)}  # fmt: skip
        answer = await self._complete(peer, body, adapter=adapter)

        def read(answer: Any) -> ServedResult[TokenScores]:
            rows = answer["choices"][0]["prompt_logprobs"][start:]
            own = tuple(row[str(token)]["logprob"] for row, token in zip(rows, tokens[start:], strict=True))
            pairs = [[(int(token), float(each["logprob"])) for token, each in row.items()] for row in rows]
            best = [tuple(sorted(row, key=lambda pair: -pair[1])[: max(top, 1)]) for row in pairs]
            likeliest = tuple(row[0][0] for row in best), tuple(row[0][1] for row in best)
            return ServedResult(TokenScores(own, *likeliest, version, tuple(best) if top else ()))

        return read_answer(peer, "/v1/completions", answer, read)

    async def load(self, peer: Peer, snapshot: Snapshot, timeout: float) -> None:
        if snapshot.sent:
            await self._check_sent(peer, snapshot.sent, timeout)
            return
        if snapshot.folder is None:
            raise CapabilityError("vLLM loads weights from a folder; got a snapshot without one")
        path = os.path.abspath(snapshot.folder.path)
        if snapshot.folder.adapter:
            await self._load_adapter(
                peer, f"version-{snapshot.version}-{snapshot.folder.digest}", path, timeout
            )
            return
        await peer.post("/pause?mode=keep", timeout=timeout)
        try:
            body = {"method": self._reload, "kwargs": {"weights_path": path}}
            await peer.post("/collective_rpc", body, timeout=timeout)
            route = "/reset_prefix_cache?reset_running_requests=true"
            done = read_answer(peer, route, await peer.post(route, timeout=timeout), lambda a: a["success"])
            if not done:
                raise EngineError(
                    f"the {peer.name} at {peer.address} did not drop the keys and values of earlier weights"
                )
        finally:  # whatever happened, cancellation included: paused, it would never answer again
            resumed = peer.post("/resume", timeout=min(timeout, RESUME))
            await asyncio.shield(asyncio.ensure_future(resumed))

    async def _go_on(self, peer: Peer, timeout: float) -> None:
        """After a client, or a trainer in the middle of an update, that was lost."""
        if self._sent:
            if peer.address in self._tells:
                raise Unreachable(f"the {peer.name} at {peer.address} is paused: weights are sent to it")
            with suppress(Refused):  # there is no such update
                await peer.post("/finish_weight_update", timeout=timeout)
        await peer.post("/resume", timeout=timeout)

    async def _check_sent(self, peer: Peer, expected: str, timeout: float) -> None:
        answer = await peer.get("/weight_info", timeout=timeout)
        found = read_answer(peer, "/weight_info", answer, lambda a: a["weight_version"])
        if found != expected:
            raise Unreachable(
                f"the {peer.name} at {peer.address} holds the weights {found!r}, expected {expected!r}: it "
                "gets the next version when that is published"
            )

    async def _loads_adapters(self, peer: Peer, timeout: float) -> bool:
        """Whether there is the route; a request without a name is refused there."""
        try:
            await peer.tell(LOAD, {"lora_name": "", "lora_path": ""}, timeout=timeout)
        except Refused as refused:
            return refused.status not in (404, 405)
        return True

    async def _load_adapter(self, peer: Peer, name: str, path: str, timeout: float) -> None:
        """Nobody has to wait: keys and values are kept by the adapter's name."""
        answer = await peer.get("/v1/models", timeout=timeout)
        known = read_answer(peer, "/v1/models", answer, lambda a: [str(each["id"]) for each in a["data"]])
        if name not in known:
            await peer.tell(LOAD, {"lora_name": name, "lora_path": path}, timeout=timeout)
        before, self._models[peer.address] = self._models[peer.address], name
        for each in known:  # but the one before, which requests on their way may name
            if each.startswith("version-") and each not in (name, before):
                await peer.tell(UNLOAD, {"lora_name": each}, timeout=timeout)

    async def sleep(self, peer: Peer, timeout: float) -> None:
        """vLLM keeps its memory: waking it up would need weights, which sleep mode keeps on GPUs only."""

    async def _complete(
        self,
        peer: Peer,
        body: Mapping[str, Any],
        timeout: float | None = None,
        adapter: Path | None = None,
    ) -> Any:
        more = {
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,  # as text, two tokens may be the same
            "ignore_eos": True,  # `stop_token_ids` say all
            "skip_special_tokens": False,  # stop strings see them, as those of the local engine do
        }
        name = await self._adapters.named(peer, adapter) if adapter else self._models[peer.address]
        try:
            return await peer.post("/v1/completions", {"model": name, **body, **more}, timeout=timeout)
        except Refused as refused:
            if adapter is None or refused.status != 404:
                raise
            self._adapters.forget(peer, name)  # it has been started again
            raise Unreachable(f"the {peer.name} at {peer.address} has lost the adapter {name}") from refused

    async def _check_mode(self, peer: Peer, timeout: float) -> bool:
        """The only token that top_k = 1 leaves is certain, unless these are the model's own numbers.

        Returns:
            Whether the server says which experts tokens go to.
        """
        prompt = [40, 41, 42]
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 1.0, "top_k": 1, "logprobs": 1}
        answer = await self._complete(peer, body, timeout)

        def read(answer: Any) -> tuple[float, bool]:
            (choice,) = answer["choices"]
            (logprob,) = choice["logprobs"]["token_logprobs"]
            return logprob, _routes(choice, len(prompt) + 1) is not None

        found, routes = read_answer(peer, "/v1/completions", answer, read)
        if found < -1e-3:
            raise CapabilityError(
                f"the {peer.name} at {peer.address} gives log-probabilities of the model, and not of the "
                "distribution sampled from: start vLLM with --logprobs-mode processed_logprobs"
            )
        return routes


def estimated_entropies(rows: Sequence[Sequence[float]], top: int, vocabulary: int) -> tuple[float, ...]:
    """Entropies in nats, each from the log-probabilities of the likeliest tokens.

    Args:
        rows: `top` of each place and, if it was none of them, the token that was sampled. Fewer possible
            ones are all there are: sampling was limited to them.
    """
    import numpy as np

    from silva.engines.top_entropy import top_entropy

    possible = [
        sorted((logprob for logprob in row if logprob > IMPOSSIBLE), reverse=True)[:top] for row in rows
    ]
    found = np.zeros(len(rows))
    for k in {len(row) for row in possible}:
        places = [i for i, row in enumerate(possible) if len(row) == k]
        known = np.exp(np.array([possible[i] for i in places], np.float64))
        size = k if k < top else vocabulary  # as many as there can be
        # Rounding leaves sums above 1, or a rest that is too large for tokens below the least of these.
        rest = np.clip(1 - known.sum(1), 0, (size - k) * known.min(1))
        if (np.abs(1 - known.sum(1) - rest) > ROUNDING).any():
            raise ValueError("log-probabilities of the likeliest tokens that do not belong to a distribution")
        known *= ((1 - rest) / known.sum(1))[:, None]
        found[places] = top_entropy(np.log(known), size)[0]
    return tuple(float(each) for each in np.maximum(found, 0))


def _routes(choice: Mapping[str, Any], count: int) -> np.ndarray | None:
    """[count, layers, k] of prompt and answer; None of a server without --enable-return-routed-experts.

    Of all layers of the model, with zeros in layers without experts.
    """
    from silva.routes import after, of_text

    if (text := choice.get("routed_experts")) is None:
        return None
    found = after(of_text(text))  # the last token has not been through the model
    if len(found) != count:
        raise ValueError(f"routed_experts of {len(found) - 1} tokens, expected {count - 1}")
    return found


def _whole(params: SamplingParams) -> bool:
    """The distribution sampled from is the model's own."""
    return (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)


def _stop(finish: str, reason: int | str | None) -> CompletionStop:
    if finish == "length":
        return "length"
    if finish == "stop":
        return "stop_string" if isinstance(reason, str) else "stop_token"
    raise ValueError(f"finish_reason {finish!r}")  # aborted
