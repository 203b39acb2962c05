"""Requests whose answers come later: each is a row before it is answered, and its result is one too.

    accept ──> id          the same (line, seq) again gives the same id: whatever was sent twice is done once
    finish ──> result      in one transaction with what it changes
    answer <── id          waits for the result for a while
    tidy                   an hour later the row goes, unless a model may have to do it again; what waits for
                           a request that cannot come any more ends

Not here: doing the work (training.py, sampling.py).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from safetensors import SafetensorError

from silva.errors import SilvaError
from silva.ports import CLOCK
from silva.server.tinker.checkpoints import ENDED
from silva.server.tinker.quotas import Quotas
from silva.server.tinker.tables import Row, Tables
from silva.wire.guard import HttpError, fault_of

LONGEST = 20.0  # seconds of one poll; the SDK gives up after 45
KEPT = 3600.0  # seconds that a result can be fetched
GONE = f"its result was kept for {KEPT:g} s and is gone"
OF_DISK = (OSError, SafetensorError)  # causes that are no client's fault
AHEAD = 4096  # requests of one line that may wait
BATCH = 200  # rows that are removed in one transaction, which others wait for

Change = Callable[[sqlite3.Connection], object]


@dataclass(frozen=True, slots=True)
class FutureWork:
    """A request that is accepted: `line` and `seq` name it, `body` is what `kind` needs."""

    owner: str
    line: str
    seq: int
    kind: str
    body: bytes


@dataclass(frozen=True, slots=True)
class FutureResult:
    """`content`: of JSON, or bytes of a protobuf message. `undone`: the request has changed nothing."""

    content: Mapping[str, Any] | bytes
    undone: bool = False


def failure(error: Exception) -> FutureResult:
    """What a client is told of a request that could not be done."""
    fault = fault_of(error)
    gone = isinstance(error, HttpError) and error.status == 410
    user = isinstance(error, SilvaError) and not gone and not isinstance(error.__cause__, OF_DISK)
    return FutureResult({"error": fault.message, "category": "user" if user else "server"}, undone=True)


class Futures:
    """All requests of the service."""

    def __init__(self, tables: Tables, quotas: Quotas) -> None:
        self._tables, self._quotas = tables, quotas
        self._finished: dict[str, asyncio.Event] = {}

    async def accept(self, asked: FutureWork, also: Change = lambda db: None) -> str:
        """The request's id, the same each time that it comes. `also`: is done with the first one.

        Raises:
            HttpError: another request has its number, it was done and is forgotten, or too many wait.
        """
        digest = hashlib.blake2b(asked.kind.encode() + b"\0" + asked.body, digest_size=16).digest()

        def insert(db: sqlite3.Connection) -> str:
            query = "SELECT id, digest FROM requests WHERE line = ? AND seq = ?"
            found = db.execute(query, (asked.line, asked.seq)).fetchone()
            if found is not None:
                if found["digest"] != digest:
                    raise HttpError(400, f"seq_id: {asked.seq} of {asked.line} was another request")
                return str(found["id"])
            model = db.execute("SELECT done FROM models WHERE id = ?", (asked.line,)).fetchone()
            if model is not None and asked.seq <= model["done"]:
                raise HttpError(410, f"seq_id: {asked.seq} of {asked.line} was done, and {GONE}")
            self._check_waiting(db, asked, None if model is None else model["done"] + 1)
            name = secrets.token_hex(16)
            also(db)
            db.execute(
                "INSERT INTO requests (id, owner, line, seq, kind, digest, body) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                (name, asked.owner, asked.line, asked.seq, asked.kind, digest, asked.body),
            )
            return name

        return await self._tables.do(insert)

    def _check_waiting(self, db: sqlite3.Connection, asked: FutureWork, following: int | None) -> None:
        """`following`: the next request of a model. What others wait for always comes in, and so does what
        waits for it: the SDK sends the first part of a call after the rest."""
        if asked.seq == following:
            return
        query = "SELECT COUNT(*) AS n FROM requests WHERE line = ? AND finished IS NULL"
        if db.execute(query, (asked.line,)).fetchone()["n"] >= AHEAD:
            raise HttpError(429, f"{asked.line}: {AHEAD} requests wait", headers={"retry-after": "1"})
        query = "SELECT 1 FROM requests WHERE line = ? AND seq = ?"
        if following is None or db.execute(query, (asked.line, following)).fetchone() is not None:
            self._quotas.check_waiting(db, asked.owner)

    async def finish(self, results: Mapping[str, FutureResult], also: Change = lambda db: None) -> None:
        """Record results, and with them what `also` does. A result that is there stays."""

        def record(db: sqlite3.Connection) -> None:
            for name, result in results.items():
                proto = isinstance(result.content, bytes)
                content = result.content if proto else json.dumps(result.content).encode()
                db.execute(
                    "UPDATE requests SET form = ?, result = ?, undone = ?, finished = ? "
                    "WHERE id = ? AND finished IS NULL",
                    ("proto" if proto else "json", content, int(result.undone), CLOCK.time(), name),
                )
            also(db)

        await self._tables.do(record)
        for name in results:
            if name in self._finished:
                self._finished.pop(name).set()

    async def answer(self, name: str, owner: str, seconds: float = LONGEST) -> Row | None:
        """The request with its result; None if there is none yet.

        Raises:
            HttpError: there is no such request of this owner, or there was one.
        """
        event = self._finished.setdefault(name, asyncio.Event())
        row = await self._row(name, owner)
        if row["finished"] is None:
            try:
                async with asyncio.timeout(seconds):
                    await event.wait()
            except TimeoutError:
                return None
            row = await self._row(name, owner)
        if row["result"] is None:
            raise _gone(name)
        return row

    async def _row(self, name: str, owner: str) -> Row:
        query = "SELECT form, result, finished FROM requests WHERE id = ? AND owner = ?"
        row = await self._tables.row(query, name, owner)
        if row is None or row["finished"] is not None:
            self._finished.pop(name, None)
        if row is None:
            raise _gone(name)
        return row

    async def tidy(self) -> None:
        """Remove what was done an hour ago. A request that a model may have to do again stays, without its
        result. One that waits for another ends with its session, after which that one cannot come."""
        lost = await self._tables.rows(
            "SELECT r.id FROM requests r JOIN models m ON m.id = r.line "
            f"WHERE r.finished IS NULL AND m.{ENDED} "
            "AND NOT EXISTS (SELECT 1 FROM requests n WHERE n.line = r.line AND n.seq = m.done + 1)"
        )
        if lost:
            error = failure(HttpError(410, "the session has ended before a request that this one waits for"))
            await self.finish({row["id"]: error for row in lost})
        before = CLOCK.time() - KEPT
        old = "(SELECT id FROM requests WHERE finished < ? AND {} LIMIT ?)"
        for change in (
            f"DELETE FROM requests WHERE id IN {old.format('body IS NULL')}",
            f"UPDATE requests SET result = NULL WHERE id IN {old.format('result IS NOT NULL')}",
        ):
            while await self._tables.change(change, before, BATCH) == BATCH:
                pass


def _gone(name: str) -> HttpError:
    """The same whether there was one or not: the SDK sends a request again whose result is gone."""
    return HttpError(410, f"request {name}: not found, or {GONE}")
