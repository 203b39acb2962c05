"""Models in memory, and how each comes back from disk.

A model lives in memory as long as there is room, of which one whose weights are all trained takes much. What
it is made of is on disk: a folder, and the rows of requests since then, which are done again (`revive`)
after a restart, a fault or a long pause. They give the same weights, so a step whose result was recorded is
neither lost nor made twice: its result stays as it was.
"""

from __future__ import annotations

import asyncio
import functools
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

from silva.errors import ConfigError, SilvaError
from silva.server.parsing import parse, read
from silva.server.tinker.bodies import ALPHA, OptimBody
from silva.server.tinker.checkpoints import durable
from silva.server.tinker.futures import Change
from silva.server.tinker.messages import parse_pass, pass_of
from silva.server.tinker.tables import Row, Tables
from silva.trainer.tenants import AdamParams, Pass, Passed

LIVE = 64  # models in memory
KEEP_EVERY = 16  # requests that may have to be done again

T = TypeVar("T")


class Runs(Protocol):
    """What computes: the runs of many tenants on one base model. Every method blocks."""

    def create(
        self, run: str, *, rank: int, alpha: float, seed: int, attn: bool, mlp: bool, unembed: bool
    ) -> None: ...
    def passes(self, passes: Sequence[Pass]) -> Sequence[Passed | SilvaError]: ...
    def optim_step(self, run: str, params: AdamParams) -> Mapping[str, float]: ...
    def save(self, run: str, folder: Path, *, optimizer: bool = True) -> None: ...
    def load(self, run: str, folder: Path, *, optimizer: bool) -> None: ...
    def drop(self, run: str) -> None: ...


class LiveModels:
    """The models in memory.

    Args:
        compute: where `runs` are called.
        folder: of folders of weights.
        full: runs of all weights in memory.
        log: gets a line for each fault that is not a client's.
    """

    def __init__(
        self,
        tables: Tables,
        runs: Runs,
        compute: Executor,
        folder: Path,
        full: int,
        log: Callable[[str], None],
    ) -> None:
        self._tables, self._runs, self._compute, self._folder = tables, runs, compute, folder
        self._full, self._log = full, log
        self._since: dict[str, int] = {}  # requests since the folder of each, the last used one at the end

    def goes_on(self, name: str) -> bool:
        """Whether it has requests since its folder, which is soon due; without it they would be repeated."""
        return 0 < self._since.get(name, 0) < 2 * KEEP_EVERY

    def passes_only(self, name: str) -> bool:
        """Whether no step has come for long, after which its folder would be written."""
        return self._since.get(name, 0) >= 4 * KEEP_EVERY

    def changed(self, name: str) -> None:
        """A request has changed it."""
        self._since[name] += 1

    async def passed(self, asked: Sequence[Pass]) -> Sequence[Passed | Exception]:
        """What each pass has found."""
        try:
            return await self.call(self._runs.passes, asked) if asked else []
        except Exception as error:
            return [error] * len(asked)

    async def load(self, name: str, folder: str, *, optimizer: bool) -> None:
        """Give it the weights of a checkpoint."""
        await self.call(self._runs.load, name, self._folder / folder, optimizer=optimizer)

    async def step(self, run: str, body: bytes) -> Mapping[str, float]:
        """Do a request for an optimizer step; its metrics."""
        given = read(OptimBody, parse(body)).adam_params
        params = AdamParams(
            lr=given.learning_rate, beta1=given.beta1, beta2=given.beta2, eps=given.eps,
            weight_decay=given.weight_decay, grad_clip_norm=given.grad_clip_norm,
        )  # fmt: skip
        return await self.call(self._runs.optim_step, run, params)

    async def written(self, model: Row, head: Row, *, optimizer: bool) -> Path:
        """A folder of its weights, named after the request."""
        folder = self._folder / head["id"]
        write = functools.partial(self._runs.save, model["id"], optimizer=optimizer)
        await self.call(durable, folder, write)
        return folder

    async def kept(self, model: Row, head: Row, *, now: bool = False) -> Change:
        """Write the folder of a model if too much would have to be done again without it.

        Where that cannot be written, on a full disk for one, a step stays made, and the next one tries again.
        """
        self._since[model["id"]] += 1
        if not now and self._since[model["id"]] < KEEP_EVERY:
            return nothing
        try:
            folder = await self.written(model, head, optimizer=True)
        except (SilvaError, OSError) as error:
            if now:
                self.forget(model["id"])  # it is not as it was
                raise
            self._log(f"tinker: {head['kind']} {head['seq']} of {head['line']}: not kept on disk: {error}")
            return nothing
        self._since[model["id"]] = 0

        def change(db: sqlite3.Connection) -> None:
            values = (head["seq"], folder.name, model["id"])
            db.execute("UPDATE models SET kept = ?, folder = ? WHERE id = ?", values)
            line = "UPDATE requests SET body = NULL WHERE line = ? AND seq <= ?"
            db.execute(line, (model["id"], head["seq"]))

        return change

    async def revive(self, name: str) -> Row:
        """The model's row; the model is in memory, with all that has been done."""
        model = await self._tables.row("SELECT * FROM models WHERE id = ?", name)
        assert model is not None
        if name in self._since:
            self._since[name] = self._since.pop(name)
            return model
        if model["rank"] == 0:
            await self._make_room_for_all_weights()
        how = {key: bool(model[key]) for key in ("attn", "mlp", "unembed")}
        create = functools.partial(self._runs.create, rank=model["rank"], alpha=ALPHA, seed=model["seed"])
        await self.call(create, name, **how)
        self._since[name] = 0
        try:
            if model["folder"] is not None:
                await self.call(self._runs.load, name, self._folder / model["folder"], optimizer=True)
            for row in await self._tables.rows(
                "SELECT kind, body FROM requests WHERE line = ? AND seq > ? AND seq <= ? AND undone = 0 "
                "AND kind IN ('forward_backward', 'optim_step') ORDER BY seq",
                name, model["kept"], model["done"],
            ):  # fmt: skip
                if row["kind"] == "optim_step":
                    with suppress(SilvaError):  # as the first time
                        await self.step(name, row["body"])
                else:
                    (again,) = await self.call(self._runs.passes, [pass_of(parse_pass(row["body"]))])
                    if isinstance(again, Exception):
                        raise again
                self._since[name] += 1
        except Exception:
            self.forget(name)
            raise
        return model

    async def make_room(self) -> None:
        """Those that were not used for longest leave memory if there are too many."""
        while len(self._since) > LIVE:
            await self._drop(next(iter(self._since)))

    async def _make_room_for_all_weights(self) -> None:
        if not self._full:
            raise ConfigError("rank 0: this server trains adapters alone, expected a rank of 1 or more")
        names = [row["id"] for row in await self._tables.rows("SELECT id FROM models WHERE rank = 0")]
        full = [name for name in self._since if name in names]
        for name in full[: max(0, len(full) + 1 - self._full)]:
            await self._drop(name)

    async def _drop(self, name: str) -> None:
        del self._since[name]
        await self.call(self._runs.drop, name)

    def forget_all(self) -> None:
        """As `forget`, of each."""
        for name in list(self._since):
            self.forget(name)

    def forget(self, name: str) -> None:
        """What is in memory of it is not as it should be."""
        if self._since.pop(name, None) is not None:
            self._compute.submit(self._runs.drop, name)

    async def call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Compute something, one after the other."""
        call = functools.partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._compute, call)


def nothing(db: sqlite3.Connection) -> None:
    """Beside the result."""
