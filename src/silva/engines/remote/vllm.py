"""vLLM's stock server (0.32) as a dialect: see wire.py for what a dialect is."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from silva.engines.remote.wire import Facts, Pulse, ServedResult, read_answer, sampling_fields
from silva.errors import CapabilityError, EngineError
from silva.types import Completion, CompletionStop, SamplingParams, Snapshot, TokenScores
from silva.wire.transport import Peer, Refused

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
    tokens, and never too new. Requests in flight are paused for a load and computed again with the new
    weights, as those of the local engine are.

    Args:
        model: its name there; "" takes the first one.
        vocabulary: how many tokens the model has; 0: unknown.
        top_logprobs: of how many of the likeliest tokens to ask for log-probabilities, from which entropies
            are estimated; at least 2.
        reload: what its workers call the loading of weights: `silva_reload` if Silva has launched it.
    """

    def __init__(
        self,
        model: str = "",
        *,
        vocabulary: int = 0,
        top_logprobs: int = 20,
        reload: str = "reload_weights",
    ) -> None:
        self._model, self._top, self._reload = model, top_logprobs, reload
        self._vocabulary = vocabulary or LARGE_VOCABULARY
        self._models: dict[str, str] = {}
        self._tells: set[str] = set()  # addresses of servers that say whether their core answers

    async def facts(self, peer: Peer, timeout: float) -> Facts:
        """Also lets a server go on that was left paused by a client which died while it loaded weights."""

        def read(answer: Any) -> tuple[str, int]:
            models = {str(each["id"]): int(each["max_model_len"]) for each in answer["data"]}
            if self._model and self._model not in models:
                raise CapabilityError(
                    f"the {peer.name} at {peer.address} has no model {self._model!r}; it has "
                    f"{', '.join(models)}"
                )
            name = self._model or next(iter(models))
            return name, models[name]

        answer = await peer.get("/v1/models", timeout=timeout)
        self._models[peer.address], context = read_answer(peer, "/v1/models", answer, read)
        number = (await peer.get("/version", timeout=timeout))["version"]
        notes = ["vLLM: entropies are estimates, and the last bits of log-probabilities do not repeat"]
        try:
            if (await peer.get("/is_paused", timeout=timeout))["is_paused"]:
                await peer.post("/resume", timeout=timeout)
            loads = frozenset({"folder"})
            self._tells.add(peer.address)
        except Refused as refused:
            if refused.status != 404:
                raise
            loads = frozenset()
            notes.append("vLLM: it cannot load weights; VLLM_SERVER_DEV_MODE=1 in its environment allows it")
        routes, name = await self._check_mode(peer, timeout), self._models[peer.address]
        machine = {"server": f"vLLM {number}"}
        return Facts(context, 0, name, loads=loads, machine=machine, notes=tuple(notes), routes=routes)

    async def alive(self, peer: Peer, timeout: float, core: float) -> Pulse:
        """`/ping` answers as long as the process of the core exists, even if the core hangs. The core itself
        answers `/is_paused`, between two of its steps."""
        await peer.send("/ping", b"", timeout=timeout)
        asks = core > 0 and peer.address in self._tells
        if asks:
            await peer.get("/is_paused", timeout=core)
        return Pulse(computes=asks)

    async def sample(
        self, peer: Peer, tokens: Sequence[int], params: SamplingParams, version: int
    ) -> ServedResult[Completion]:
        answer = await self._complete(peer, sampling_fields(tokens, params) | {"logprobs": self._top})

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
        self, peer: Peer, tokens: Sequence[int], start: int, version: int
    ) -> ServedResult[TokenScores]:
        """vLLM samples a token more, so the text must be shorter than the context by one."""
        body = {"prompt": list(tokens), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 1}
        answer = await self._complete(peer, body)

        def read(answer: Any) -> ServedResult[TokenScores]:
            rows = answer["choices"][0]["prompt_logprobs"][start:]
            own = tuple(row[str(token)]["logprob"] for row, token in zip(rows, tokens[start:], strict=True))
            best = [max(row.items(), key=lambda each: each[1]["logprob"]) for row in rows]
            likeliest = tuple(int(token) for token, _ in best), tuple(e["logprob"] for _, e in best)
            return ServedResult(TokenScores(own, *likeliest, version))

        return read_answer(peer, "/v1/completions", answer, read)

    async def load(self, peer: Peer, snapshot: Snapshot, timeout: float) -> None:
        if snapshot.folder is None:
            raise CapabilityError("vLLM loads weights from a folder; got a snapshot without one")
        path = os.path.abspath(snapshot.folder.path)
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

    async def sleep(self, peer: Peer, timeout: float) -> None:
        """vLLM keeps its memory: waking it up would need weights, which sleep mode keeps on GPUs only."""

    async def _complete(self, peer: Peer, body: Mapping[str, Any], timeout: float | None = None) -> Any:
        more = {
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,  # as text, two tokens may be the same
            "ignore_eos": True,  # `stop_token_ids` say all
            "skip_special_tokens": False,  # stop strings see them, as those of the local engine do
        }
        asked = {"model": self._models[peer.address], **body, **more}
        return await peer.post("/v1/completions", asked, timeout=timeout)

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
