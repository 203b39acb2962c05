"""What is said to an inference server: the dialects of Silva's own server and of vLLM's stock one.

                    silva                               vllm
    sample          /v1/completions, field "silva"      /v1/completions, `logprobs` of the likeliest tokens
    score           /score                              /v1/completions with `prompt_logprobs`
    load            /load                               /pause, reload_weights, /reset_prefix_cache, /resume
    alive           /alive: weights, process, counts    /ping, which is its /health; /is_paused asks its core
    versions        one per token, as it was sampled    that of the client when the request went out
    weights         digests in every answer             not told
    entropies       exact                               estimated (top_entropy.py)

A dialect asks one server once. Not here: which server, and what happens after a fault (servers.py).
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar
from urllib.parse import quote

from silva.errors import CapabilityError, EngineError, shorten
from silva.routes import of_text
from silva.types import Completion, SamplingParams, Snapshot, TokenScores
from silva.wire.transport import Peer, Unreachable, check_version

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Facts:
    """What a server says of itself. `memory_per_token`: bytes of keys and values, 0 if unknown. `weights`: as
    in `Pulse`."""

    context: int
    version: int
    model: str = ""
    weights: str | None = None
    entropies: bool = True
    loads: frozenset[str] = frozenset()
    machine: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    memory_per_token: float = 0.0
    routes: bool = False


@dataclass(frozen=True, slots=True)
class Pulse:
    """The answer to "are you alive?", as far as the dialect gives one: another process has other weights.

    `weights`: the digest of the folder that was loaded last, or a name for those it began with.
    `computes`: not only the server answers, but also what computes behind it.
    """

    version: int | None = None
    weights: str | None = None
    process: Any = None
    counts: Mapping[str, float] = field(default_factory=dict)
    computes: bool = False


class ServedResult(NamedTuple, Generic[T]):
    """What was found, and with which weights: all that the server held meanwhile."""

    found: T
    weights: tuple[str, ...] = ()


class Dialect(Protocol):
    """`version` is what the client knows the server to hold; `timeout` in seconds. Sampling and scoring have
    none: how long they take depends on what else is asked. `core`: seconds that what computes may take to
    give a sign of life; 0: it is not asked. `adapter`: a folder of one, as PEFT stores it, whose name is its
    own for ever; the server must see it. `top`: how many of the likeliest tokens are told for each place.

    Attributes:
        folders: adapters may be given by their folders.

    Raises:
        Unreachable, Refused: from `Peer`; Unreachable also for an answer that makes no sense.
    """

    folders: bool

    async def facts(self, peer: Peer, timeout: float) -> Facts: ...
    async def alive(self, peer: Peer, timeout: float, core: float) -> Pulse: ...
    async def sample(
        self,
        peer: Peer,
        tokens: Sequence[int],
        params: SamplingParams,
        version: int,
        adapter: Path | None = None,
    ) -> ServedResult[Completion]: ...
    async def score(
        self,
        peer: Peer,
        tokens: Sequence[int],
        start: int,
        version: int,
        adapter: Path | None = None,
        top: int = 0,
    ) -> ServedResult[TokenScores]: ...
    async def load(self, peer: Peer, snapshot: Snapshot, timeout: float) -> None: ...
    async def sleep(self, peer: Peer, timeout: float) -> None: ...


class SilvaDialect:
    """That of `silva inference`.

    Args:
        model: its name there; "" takes what a server calls it.
        owner: for whom weights are loaded, such as the folder of a run. While an owner gives signs of life,
            a server loads nothing for another one.
    """

    folders = False

    def __init__(self, model: str = "", owner: str = "") -> None:
        self._model, self._owner = model, owner or secrets.token_hex(8)
        self._models: dict[str, str] = {}

    async def facts(self, peer: Peer, timeout: float) -> Facts:
        def read(answer: Any) -> Facts:
            check_version(peer, answer)
            self._models[peer.address] = self._model or str(answer["model"])
            return Facts(
                context=int(answer["context"]),
                version=int(answer["version"]),
                model=str(answer["model"]),
                weights=str(answer["weights"]),
                entropies=bool(answer["entropies"]),
                loads=frozenset(answer["loads"]) - {"shared"},  # another process shares no parameters
                machine=dict(answer["machine"]),
                notes=tuple(answer["notes"]),
                memory_per_token=float(answer["memory_per_token"]),
                routes=bool(answer["routes"]),
            )

        return read_answer(peer, "/capabilities", await peer.get("/capabilities", timeout=timeout), read)

    async def alive(self, peer: Peer, timeout: float, core: float) -> Pulse:
        answer = await peer.get(f"/alive?owner={quote(self._owner, safe='')}", timeout=timeout)

        def read(a: Any) -> Pulse:
            counts = {str(name): float(count) for name, count in a["counts"].items()}
            return Pulse(int(a["version"]), str(a["weights"]), int(a["pid"]), counts)

        return read_answer(peer, "/alive", answer, read)

    async def sample(
        self,
        peer: Peer,
        tokens: Sequence[int],
        params: SamplingParams,
        version: int,
        adapter: Path | None = None,
    ) -> ServedResult[Completion]:
        _refuse(adapter)
        body = sampling_fields(tokens, params) | {"model": self._models[peer.address], "logprobs": 0}
        answer = await peer.post("/v1/completions", body)

        def read(answer: Any) -> ServedResult[Completion]:
            (choice,) = answer["choices"]
            own = choice["silva"]
            logprobs, raw = tuple(choice["logprobs"]["token_logprobs"]), tuple(own["raw_logprobs"])
            found = Completion(
                tuple(choice["token_ids"]),
                logprobs,
                logprobs if raw == logprobs else raw,  # at temperature 1: 32 bytes a token are not kept twice
                tuple(own["entropies"]),
                tuple(own["versions"]),
                own["stop_reason"],
                own["cached_tokens"],
                *(of_text(own[name]) if name in own else None for name in ("routes", "prompt_routes")),
            )
            return ServedResult(found, tuple(answer["weights"]))

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
        _refuse(adapter or top)
        answer = await peer.post("/score", {"tokens": list(tokens), "start": start})

        def read(a: Any) -> ServedResult[TokenScores]:
            likeliest = tuple(a["likeliest"]), tuple(a["likeliest_logprobs"])
            found = TokenScores(tuple(a["logprobs"]), *likeliest, int(a["version"]))
            return ServedResult(found, tuple(a["weights"]))

        return read_answer(peer, "/score", answer, read)

    async def load(self, peer: Peer, snapshot: Snapshot, timeout: float) -> None:
        folder = snapshot.folder and {
            "path": os.path.abspath(snapshot.folder.path),
            "digest": snapshot.folder.digest,
        }
        body = {"version": snapshot.version, "folder": folder, "owner": self._owner}
        answer = await peer.post("/load", body, timeout=timeout)
        version = read_answer(peer, "/load", answer, lambda a: int(a["version"]))
        if version != snapshot.version:
            raise EngineError(
                f"the {peer.name} at {peer.address} holds version {version} after a load, expected "
                f"{snapshot.version}: does something else load weights there?"
            )

    async def sleep(self, peer: Peer, timeout: float) -> None:
        await peer.post("/sleep", timeout=timeout)


def _refuse(given: object) -> None:
    if given:
        raise CapabilityError(
            "silva inference has one model: got an adapter, or a number of likeliest tokens; expected "
            'engine.dialect = "vllm"'
        )


def sampling_fields(tokens: Sequence[int], params: SamplingParams) -> dict[str, Any]:
    """Every parameter: a server's defaults are no part of a run."""
    return {
        "prompt": list(tokens),
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "stop": list(params.stop),
        "stop_token_ids": list(params.stop_token_ids),
        "seed": params.seed,
        "n": 1,
        "return_token_ids": True,
    }


def read_answer(peer: Peer, path: str, answer: Any, read: Callable[[Any], T]) -> T:
    try:
        return read(answer)
    except CapabilityError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, StopIteration) as error:
        shown = shorten(repr(answer), 300)
        raise Unreachable(
            f"the {peer.name} at {peer.address}: got {shown} from {path}, which makes no sense ({error!r})"
        ) from error
