"""The order of training: requests of each model one after the other, those of many models together.

    accepted rows ──> heads: the next request of each model, if it has arrived
        optimizer steps, saves, loads ──> one after the other, at most TURNS of a model
        passes of all models ──────────> ONE call of Runs.passes ──> results, in one transaction

A model lives in memory as long as there is room, of which one whose weights are all trained takes much. What
it is made of is on disk: a folder, and the rows of requests since then, which are done again (`_revive`)
after a restart, a fault or a long pause. They give the same weights, so a step whose result was recorded is
neither lost nor made twice: its result stays as it was.
Not here: what the passes compute (trainer/tenants/), and sampling.
"""

from __future__ import annotations

import asyncio
import functools
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from silva.errors import ConfigError, OutOfMemory, SilvaError
from silva.models.memory import give_freed_memory_back
from silva.ports import CLOCK
from silva.server.parsing import parse, read
from silva.server.tinker import checkpoints
from silva.server.tinker.bodies import (
    ALPHA,
    CreateLoadedBody,
    ExternalBody,
    LoadWeightsBody,
    OptimBody,
    SamplerBody,
    SaveBody,
)
from silva.server.tinker.checkpoints import EXTERNAL, SAMPLER, TRAINING, durable, found, uri
from silva.server.tinker.futures import OF_DISK, Change, FutureResult, Futures, failure
from silva.server.tinker.messages import finite, parse_pass, pass_of, passed_bytes
from silva.server.tinker.quotas import Quotas
from silva.server.tinker.tables import Row, Tables
from silva.trainer.tenants import AdamParams, Pass, Passed
from silva.wire.guard import HttpError

TURNS = 8  # requests of one model between passes
TOGETHER = 32  # models in one call
LIVE = 64  # models in memory
KEEP_EVERY = 16  # requests that may have to be done again
IDLE = 30.0  # seconds without a request
PASSES = ("forward_backward", "forward")
CHANGING = ("forward_backward", "optim_step", "load_weights")

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


class TrainQueue:
    """Does the requests of all models.

    Args:
        compute: where `runs` are called.
        folder: of folders of weights.
        full: runs of all weights in memory.
        log: gets a line for each fault that is not a client's.
    """

    def __init__(
        self,
        tables: Tables,
        futures: Futures,
        runs: Runs,
        compute: Executor,
        folder: Path,
        full: int,
        log: Callable[[str], None],
        quotas: Quotas = Quotas(),
    ) -> None:
        self._tables, self._futures, self._runs, self._quotas = tables, futures, runs, quotas
        self._compute, self._folder, self._full, self._log = compute, folder, full, log
        self._live: dict[str, int] = {}  # requests since the folder of each, the last used one at the end
        self._wake = asyncio.Event()

    def wake(self) -> None:
        """There is something new to do."""
        self._wake.set()

    async def work(self) -> None:
        """Until cancelled."""
        self._wake.set()
        while True:
            await self._woken()
            self._wake.clear()
            try:
                while await self._round():
                    pass
            except Exception as error:  # of the disk: nothing has been recorded, and all is done again
                self._log(f"tinker: {type(error).__name__}: {error}")
                for name in list(self._live):
                    self._forget(name)
                await CLOCK.sleep(1.0)
                self._wake.set()

    async def _woken(self) -> None:
        """Memory that passes have used is kept for the next ones, but not while there are none."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), IDLE)
        if not self._wake.is_set():
            await self._call(give_freed_memory_back)
            await self._wake.wait()

    async def _round(self) -> bool:
        """Whether anything was done."""
        worked = False
        for _ in range(TURNS):
            heads = [head for head in await self._heads() if head["kind"] not in PASSES]
            for head in heads:
                await self._alone(head)
            worked |= bool(heads)
            if not heads:
                break
        heads = [head for head in await self._heads() if head["kind"] in PASSES][:TOGETHER]
        if heads:
            await self._together(heads)
        await self._make_room()
        return worked or bool(heads)

    async def _heads(self) -> list[Row]:
        """The next request of each model, those of the model that waited longest first.

        Of models whose weights are all trained only as many as memory holds. One with requests since its
        folder goes on till it has the next one: if it had to leave, these would be done again.
        """
        heads = await self._tables.rows(
            "SELECT r.id, r.line, r.seq, r.kind, m.rank FROM requests r JOIN models m ON m.id = r.line "
            "WHERE r.finished IS NULL AND r.seq = m.done + 1 ORDER BY m.used"
        )
        full = [head for head in heads if head["rank"] == 0]
        full.sort(key=lambda head: not 0 < self._live.get(head["line"], 0) < 2 * KEEP_EVERY)
        waiting = full[max(self._full, 1) :]
        return [head for head in heads if head not in waiting]

    async def _together(self, heads: Sequence[Row]) -> None:
        asked, results = dict[str, Pass](), dict[str, FutureResult]()
        for head in heads:
            try:
                await self._revive(head["line"])
                asked[head["id"]] = pass_of(parse_pass(await self._body(head)))
            except Exception as error:
                results[head["id"]] = self._failed(head, error)
        answers = dict(zip(asked, await self._passed(list(asked.values())), strict=True))
        for head in (each for each in heads if each["id"] in answers):
            answer = answers[head["id"]]
            if isinstance(answer, Exception):
                results[head["id"]] = self._failed(head, answer)
                continue
            results[head["id"]] = FutureResult(passed_bytes(answer))
            if head["kind"] in CHANGING:
                self._live[head["line"]] += 1
        await self._futures.finish(results, lambda db: _done(db, *heads))
        for head in heads:
            if self._live.get(head["line"], 0) >= 4 * KEEP_EVERY:  # passes without a step
                await self._tables.do(await self._kept(await self._revive(head["line"]), head))

    async def _passed(self, asked: Sequence[Pass]) -> Sequence[Passed | Exception]:
        try:
            return await self._call(self._runs.passes, asked) if asked else []
        except Exception as error:
            return [error] * len(asked)

    async def _alone(self, head: Row) -> None:
        try:
            model = await self._revive(head["line"])
            result, also = await self._DO[head["kind"]](self, model, head, await self._body(head))
        except Exception as error:
            result, also = self._failed(head, error), _nothing

        def record(db: sqlite3.Connection) -> None:
            _done(db, head)
            also(db)

        await self._futures.finish({head["id"]: result}, record)

    def _failed(self, head: Row, error: Exception) -> FutureResult:
        bug = not isinstance(error, SilvaError) or isinstance(error, OutOfMemory)
        if bug or isinstance(error.__cause__, OF_DISK):
            where = f"{head['kind']} {head['seq']} of {head['line']}"
            self._log(f"tinker: {where}: {type(error).__name__}: {error}")
        if bug:
            self._forget(head["line"])  # it may be half-way
        return failure(error)

    # --- what each kind of request does: its result, and what is recorded with it

    async def _create(self, model: Row, head: Row, body: bytes) -> tuple[FutureResult, Change]:
        return FutureResult({"model_id": model["id"], "type": "create_model"}), _nothing

    async def _optim(self, model: Row, head: Row, body: bytes) -> tuple[FutureResult, Change]:
        try:
            result = FutureResult({"metrics": finite(await self._step(model["id"], body))})
        except OutOfMemory:  # it may be half-way
            raise
        except SilvaError as error:  # such as a gradient that is not finite, which is dropped all the same
            result = replace(failure(error), undone=False)
        return result, await self._kept(model, head)

    async def _load(self, model: Row, head: Row, body: bytes) -> tuple[FutureResult, Change]:
        asked: Any = read(CreateLoadedBody if head["seq"] == 0 else LoadWeightsBody, parse(body))
        row = await found(self._tables, asked.path, model["owner"], kind=TRAINING)
        await self._call(
            self._runs.load, model["id"], self._folder / row["folder"], optimizer=asked.optimizer
        )
        # The checkpoint may be deleted before this is done again, so that it must not have to be.
        change = await self._kept(model, head, now=True)
        return FutureResult({"path": asked.path, "model_id": model["id"], "type": "load_weights"}), change

    async def _save(self, model: Row, head: Row, body: bytes) -> tuple[FutureResult, Change]:
        asked = read(SaveBody, parse(body))
        name = f"{TRAINING}/{asked.path or format(head['seq'], '08d')}"
        if not asked.overwrite:
            await self._check_new(model, name)
        folder, size = await self._fitting(model, head, name, optimizer=True)
        change = checkpoints.saved(model, name, folder, size, asked.ttl_seconds, asked.user_metadata)
        return FutureResult({"path": uri(model["id"], name), "type": "save_weights"}), change

    async def _sampler(self, model: Row, head: Row, body: bytes) -> tuple[FutureResult, Change]:
        asked = read(SamplerBody, parse(body))
        if (asked.path is None) == (asked.sampling_session_seq_id is None):
            raise HttpError(400, "save_weights_for_sampler: expected path or sampling_session_seq_id")
        if asked.path is not None:
            name = f"{SAMPLER}/{asked.path}"
            await self._check_new(model, name)
            folder, size = await self._fitting(model, head, name, optimizer=False)
            change = checkpoints.saved(model, name, folder, size, asked.ttl_seconds, asked.user_metadata)
            return FutureResult({"path": uri(model["id"], name), "type": "save_weights_for_sampler"}), change
        session = f"{model['session']}:sample:{asked.sampling_session_seq_id}"
        folder, size = await self._fitting(model, head, "", optimizer=False)
        values = (session, model["owner"], model["session"], folder.name, size, CLOCK.time())
        query = "INSERT INTO samplers (id, owner, session, folder, size, created) VALUES (?, ?, ?, ?, ?, ?)"

        def insert(db: sqlite3.Connection) -> None:
            db.execute(query, values)

        if await self._tables.row("SELECT id FROM samplers WHERE id = ?", session):
            raise HttpError(
                400, f"sampling_session_seq_id: got {asked.sampling_session_seq_id}, which is used"
            )
        return FutureResult({"sampling_session_id": session, "type": "save_weights_for_sampler"}), insert

    async def _external(self, model: Row, head: Row, body: bytes) -> tuple[FutureResult, Change]:
        asked = read(ExternalBody, parse(body))
        name = f"{EXTERNAL}/{asked.path}"
        await self._check_new(model, name)
        folder, size = await self._fitting(model, head, name, optimizer=False)
        change = checkpoints.saved(model, name, folder, size, asked.ttl_seconds, None)
        result = {"path": uri(model["id"], name), "size_bytes": size, "type": "save_weights_external"}
        return FutureResult(result), change

    async def _refuse(self, model: Row, head: Row, body: bytes) -> tuple[FutureResult, Change]:
        raise HttpError(400, body.decode())

    _DO: Mapping[str, Any] = {
        "create_model": _create, "optim_step": _optim, "load_weights": _load, "save_weights": _save,
        "save_weights_for_sampler": _sampler, "save_weights_external": _external, "refused": _refuse,
    }  # fmt: skip

    async def _step(self, run: str, body: bytes) -> Mapping[str, float]:
        given = read(OptimBody, parse(body)).adam_params
        params = AdamParams(
            lr=given.learning_rate, beta1=given.beta1, beta2=given.beta2, eps=given.eps,
            weight_decay=given.weight_decay, grad_clip_norm=given.grad_clip_norm,
        )  # fmt: skip
        return await self._call(self._runs.optim_step, run, params)

    async def _check_new(self, model: Row, name: str) -> None:
        query = "SELECT 1 FROM checkpoints WHERE model = ? AND name = ?"
        if await self._tables.row(query, model["id"], name):
            raise HttpError(400, f"checkpoint {uri(model['id'], name)}: there is one of this name")

    async def _written(self, model: Row, head: Row, *, optimizer: bool) -> Path:
        folder = self._folder / head["id"]
        write = functools.partial(self._runs.save, model["id"], optimizer=optimizer)
        await self._call(durable, folder, write)
        return folder

    async def _fitting(self, model: Row, head: Row, name: str, *, optimizer: bool) -> tuple[Path, int]:
        """A folder that its owner may keep, and its size. One that is too much goes with the next tidying."""
        folder = await self._written(model, head, optimizer=optimizer)
        size = sum(file.stat().st_size for file in folder.iterdir())
        instead = (model["id"], name)
        await self._tables.do(lambda db: self._quotas.check_bytes(db, model["owner"], size, instead))
        return folder, size

    # --- models in memory and on disk

    async def _kept(self, model: Row, head: Row, *, now: bool = False) -> Change:
        """Write the folder of a model if too much would have to be done again without it.

        Where that cannot be written, on a full disk for one, a step stays made, and the next one tries again.
        """
        self._live[model["id"]] += 1
        if not now and self._live[model["id"]] < KEEP_EVERY:
            return _nothing
        try:
            folder = await self._written(model, head, optimizer=True)
        except (SilvaError, OSError) as error:
            if now:
                self._forget(model["id"])  # it is not as it was
                raise
            self._log(f"tinker: {head['kind']} {head['seq']} of {head['line']}: not kept on disk: {error}")
            return _nothing
        self._live[model["id"]] = 0

        def change(db: sqlite3.Connection) -> None:
            values = (head["seq"], folder.name, model["id"])
            db.execute("UPDATE models SET kept = ?, folder = ? WHERE id = ?", values)
            line = "UPDATE requests SET body = NULL WHERE line = ? AND seq <= ?"
            db.execute(line, (model["id"], head["seq"]))

        return change

    async def _revive(self, name: str) -> Row:
        """The model's row; the model is in memory, with all that has been done."""
        model = await self._tables.row("SELECT * FROM models WHERE id = ?", name)
        assert model is not None
        if name in self._live:
            self._live[name] = self._live.pop(name)
            return model
        if model["rank"] == 0:
            await self._make_room_for_all_weights()
        how = {key: bool(model[key]) for key in ("attn", "mlp", "unembed")}
        create = functools.partial(self._runs.create, rank=model["rank"], alpha=ALPHA, seed=model["seed"])
        await self._call(create, name, **how)
        self._live[name] = 0
        try:
            if model["folder"] is not None:
                await self._call(self._runs.load, name, self._folder / model["folder"], optimizer=True)
            for row in await self._tables.rows(
                "SELECT kind, body FROM requests WHERE line = ? AND seq > ? AND seq <= ? AND undone = 0 "
                "AND kind IN ('forward_backward', 'optim_step') ORDER BY seq",
                name, model["kept"], model["done"],
            ):  # fmt: skip
                if row["kind"] == "optim_step":
                    with suppress(SilvaError):  # as the first time
                        await self._step(name, row["body"])
                else:
                    (again,) = await self._call(self._runs.passes, [pass_of(parse_pass(row["body"]))])
                    if isinstance(again, Exception):
                        raise again
                self._live[name] += 1
        except Exception:
            self._forget(name)
            raise
        return model

    async def _make_room(self) -> None:
        while len(self._live) > LIVE:
            await self._drop(next(iter(self._live)))

    async def _make_room_for_all_weights(self) -> None:
        if not self._full:
            raise ConfigError("rank 0: this server trains adapters alone, expected a rank of 1 or more")
        names = [row["id"] for row in await self._tables.rows("SELECT id FROM models WHERE rank = 0")]
        full = [name for name in self._live if name in names]
        for name in full[: max(0, len(full) + 1 - self._full)]:
            await self._drop(name)

    async def _drop(self, name: str) -> None:
        del self._live[name]
        await self._call(self._runs.drop, name)

    def _forget(self, name: str) -> None:
        if self._live.pop(name, None) is not None:
            self._compute.submit(self._runs.drop, name)

    async def _body(self, head: Row) -> bytes:
        row = await self._tables.row("SELECT body FROM requests WHERE id = ?", head["id"])
        assert row is not None
        return bytes(row["body"])

    async def _call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        call = functools.partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._compute, call)


def _nothing(db: sqlite3.Connection) -> None:
    """Beside the result."""


def _done(db: sqlite3.Connection, *heads: Row) -> None:
    for head in heads:
        now = (head["seq"], CLOCK.time(), head["line"])
        db.execute("UPDATE models SET done = ?, used = ? WHERE id = ?", now)
        if head["kind"] not in CHANGING:
            db.execute("UPDATE requests SET body = NULL WHERE id = ?", (head["id"],))
