"""The runs of a Tinker server on several ranks: the first one answers clients, and all make every call.

    TrainQueue ──> LeadingRuns ──call──> rank 1: following ──> its Tenants ─┐
                        └──> its own Tenants <── what each has found ───────┘

Each rank has the model and all runs. What a call needs to be the same everywhere is in its arguments, so the
ranks stay equal; one that fails alone ends all of them (server/ranks.py), and the server goes on from its
folder when it is started again.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

from silva.errors import SilvaError
from silva.server.ranks import Answer, SharedCalls
from silva.server.tinker.live_models import Runs
from silva.trainer.tenants import AdamParams, Pass, Passed
from silva.wire import codec


class LeadingRuns:
    """Implements `Runs`: every call is made on all ranks. Like theirs, its methods block."""

    def __init__(self, inner: Runs, calls: SharedCalls) -> None:
        self._inner, self._calls = inner, calls

    def create(
        self, run: str, *, rank: int, alpha: float, seed: int, attn: bool, mlp: bool, unembed: bool
    ) -> None:
        self._call("create", run, rank, alpha, seed, attn, mlp, unembed)

    def passes(self, passes: Sequence[Pass]) -> Sequence[Passed | SilvaError]:
        return self._call("passes", passes)  # type: ignore[no-any-return]

    def optim_step(self, run: str, params: AdamParams) -> Mapping[str, float]:
        return self._call("optim_step", run, params)  # type: ignore[no-any-return]

    def save(self, run: str, folder: Path, *, optimizer: bool = True) -> None:
        self._call("save", run, folder, optimizer)

    def load(self, run: str, folder: Path, *, optimizer: bool) -> None:
        self._call("load", run, folder, optimizer)

    def drop(self, run: str) -> None:
        self._call("drop", run)

    def _call(self, method: str, *given: Any) -> Any:
        call = method.encode() + b"\n" + codec.encode(given, _arguments(method))

        async def work() -> Any:
            return _called(self._inner, method, given)

        return asyncio.run(self._calls.make(call, work))  # this thread has no other loop


def following(inner: Runs, compute: Executor) -> Answer:
    """Makes the calls of `LeadingRuns` here, on `compute`."""

    async def answer(call: bytes) -> None:
        name, _, rest = call.partition(b"\n")
        method = name.decode()
        given = codec.decode(_arguments(method), rest)
        await asyncio.get_running_loop().run_in_executor(compute, partial(_called, inner, method, given))

    return answer


def _called(runs: Runs, method: str, given: Sequence[Any]) -> Any:
    _, *parameters = inspect.signature(getattr(Runs, method)).parameters.values()
    named = {
        each.name: value
        for each, value in zip(parameters, given, strict=True)
        if each.kind is inspect.Parameter.KEYWORD_ONLY
    }
    return getattr(runs, method)(*given[: len(given) - len(named)], **named)


def _arguments(method: str) -> Any:
    """The type of a call's arguments, in the order of the signature."""
    hints = get_type_hints(getattr(Runs, method))
    del hints["return"]
    return tuple[tuple(hints.values())]  # type: ignore[misc]
