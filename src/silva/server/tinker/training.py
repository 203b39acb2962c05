"""The order of training: requests of each model one after the other, those of many models together.

    accepted rows ──> heads: the next request of each model, if it has arrived
        optimizer steps, saves, loads ──> one after the other, at most TURNS of a model
        passes of all models ──────────> ONE call of Runs.passes ──> results, in one transaction

Keys take turns, and of each key the model that waited longest. Not here: which models are in memory
(live_models.py), what the passes compute (trainer/tenants/), sampling.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from silva.errors import OutOfMemory, SilvaError
from silva.models.memory import give_freed_memory_back
from silva.ports import CLOCK
from silva.server.parsing import parse, read
from silva.server.tinker import checkpoints
from silva.server.tinker.bodies import (
    CreateLoadedBody,
    ExternalBody,
    LoadWeightsBody,
    SamplerBody,
    SaveBody,
)
from silva.server.tinker.checkpoints import EXTERNAL, SAMPLER, TRAINING, found, uri
from silva.server.tinker.futures import OF_DISK, Change, FutureResult, Futures, failure
from silva.server.tinker.live_models import LiveModels, Runs, nothing
from silva.server.tinker.messages import finite, parse_pass, pass_of, passed_bytes
from silva.server.tinker.quotas import Quotas
from silva.server.tinker.tables import DatabaseFault, Row, Tables
from silva.trainer.tenants import Pass
from silva.wire.guard import HttpError

TURNS = 8  # requests of one model between passes
TOGETHER = 32  # models in one call
IDLE = 30.0  # seconds without a request
PASSES = ("forward_backward", "forward")
CHANGING = ("forward_backward", "optim_step", "load_weights")


def in_turns(heads: Sequence[Row]) -> list[Row]:
    """The first one of each key, then the second of each, and so on: many models make nobody else wait."""
    turns = Counter[str]()

    def turn(head: Row) -> int:
        turns[head["owner"]] += 1
        return turns[head["owner"]]

    return sorted(heads, key=turn)


class TrainQueue:
    """Does the requests of all models.

    Args:
        compute, folder, full, log: as of `LiveModels`.
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
        self._tables, self._futures, self._quotas = tables, futures, quotas
        self._full, self._log = full, log
        self._live = LiveModels(tables, runs, compute, folder, full, log)
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
            except Exception as error:  # what is not recorded is done again
                self._log(f"tinker: {type(error).__name__}: {error}")
                self._live.forget_all()
                await CLOCK.sleep(1.0)
                self._wake.set()

    async def _woken(self) -> None:
        """Memory that passes have used is kept for the next ones, but not while there are none."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), IDLE)
        if not self._wake.is_set():
            await self._live.call(give_freed_memory_back)
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
        await self._live.make_room()
        return worked or bool(heads)

    async def _heads(self) -> list[Row]:
        """The next request of each model: one of each key in turn, of the model that waited longest first.

        Of models whose weights are all trained only as many as memory holds. One with requests since its
        folder goes on till it has the next one: if it had to leave, these would be done again.
        """
        heads = await self._tables.rows(
            "SELECT r.id, r.line, r.seq, r.kind, r.owner, m.rank FROM requests r JOIN models m ON "
            "m.id = r.line WHERE r.finished IS NULL AND r.seq = m.done + 1 ORDER BY m.used"
        )
        heads = in_turns(heads)
        full = [head for head in heads if head["rank"] == 0]
        full.sort(key=lambda head: not self._live.goes_on(head["line"]))
        waiting = full[max(self._full, 1) :]
        return [head for head in heads if head not in waiting]

    async def _together(self, heads: Sequence[Row]) -> None:
        asked, results = dict[str, Pass](), dict[str, FutureResult]()
        for head in heads:
            try:
                await self._live.revive(head["line"])
                asked[head["id"]] = pass_of(parse_pass(await self._body(head)))
            except DatabaseFault:
                raise
            except Exception as error:
                results[head["id"]] = self._failed(head, error)
        answers = dict(zip(asked, await self._live.passed(list(asked.values())), strict=True))
        for head in (each for each in heads if each["id"] in answers):
            answer = answers[head["id"]]
            if isinstance(answer, Exception):
                results[head["id"]] = self._failed(head, answer)
                continue
            results[head["id"]] = FutureResult(passed_bytes(answer))
            if head["kind"] in CHANGING:
                self._live.changed(head["line"])
        await self._futures.finish(results, lambda db: _done(db, *heads))
        for head in heads:
            if self._live.passes_only(head["line"]):
                await self._tables.do(await self._live.kept(await self._live.revive(head["line"]), head))

    async def _alone(self, head: Row) -> None:
        try:
            model = await self._live.revive(head["line"])
            result, also = await self._DO[head["kind"]](self, model, head, await self._body(head))
        except DatabaseFault:  # no fault of the request, which is done again
            raise
        except Exception as error:
            result, also = self._failed(head, error), nothing

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
            self._live.forget(head["line"])  # it may be half-way
        return failure(error)

    # --- what each kind of request does: its result, and what is recorded with it

    async def _create(self, model: Row, head: Row, body: bytes) -> tuple[FutureResult, Change]:
        return FutureResult({"model_id": model["id"], "type": "create_model"}), nothing

    async def _optim(self, model: Row, head: Row, body: bytes) -> tuple[FutureResult, Change]:
        try:
            result = FutureResult({"metrics": finite(await self._live.step(model["id"], body))})
        except OutOfMemory:  # it may be half-way
            raise
        except SilvaError as error:  # such as a gradient that is not finite, which is dropped all the same
            result = replace(failure(error), undone=False)
        return result, await self._live.kept(model, head)

    async def _load(self, model: Row, head: Row, body: bytes) -> tuple[FutureResult, Change]:
        asked: Any = read(CreateLoadedBody if head["seq"] == 0 else LoadWeightsBody, parse(body))
        row = await found(self._tables, asked.path, model["owner"], kind=TRAINING)
        await self._live.load(model["id"], row["folder"], optimizer=asked.optimizer)
        # The checkpoint may be deleted before this is done again, so that it must not have to be.
        change = await self._live.kept(model, head, now=True)
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

    async def _check_new(self, model: Row, name: str) -> None:
        query = "SELECT 1 FROM checkpoints WHERE model = ? AND name = ?"
        if await self._tables.row(query, model["id"], name):
            raise HttpError(400, f"checkpoint {uri(model['id'], name)}: there is one of this name")

    async def _fitting(self, model: Row, head: Row, name: str, *, optimizer: bool) -> tuple[Path, int]:
        """A folder that its owner may keep, and its size. One that is too much goes with the next tidying."""
        folder = await self._live.written(model, head, optimizer=optimizer)
        size = sum(file.stat().st_size for file in folder.iterdir())
        instead = (model["id"], name)
        await self._tables.do(lambda db: self._quotas.check_bytes(db, model["owner"], size, instead))
        return folder, size

    async def _body(self, head: Row) -> bytes:
        row = await self._tables.row("SELECT body FROM requests WHERE id = ?", head["id"])
        assert row is not None
        return bytes(row["body"])


def _done(db: sqlite3.Connection, *heads: Row) -> None:
    for head in heads:
        now = (head["seq"], CLOCK.time(), head["line"])
        db.execute("UPDATE models SET done = ?, used = ? WHERE id = ?", now)
        if head["kind"] not in CHANGING:
            db.execute("UPDATE requests SET body = NULL WHERE id = ?", (head["id"],))
