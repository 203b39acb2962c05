"""What the service knows, in one database: sessions, models, requests with their results, checkpoints.

    do(change) ──┐
    do(change) ──┼──> one transaction on a thread, durable ──> each gets its result
    do(query)  ──┘

What is asked for while a transaction runs goes into the next one, so that many requests share one fsync.
It is a file of SQLite, or PostgreSQL (postgres.py); statements are such that both read them. Not here: what
rows mean (training.py, checkpoints.py, sampling.py), and weights, which are folders.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from silva.errors import ConfigError, one_line
from silva.server.tinker.postgres import Postgres

T = TypeVar("T")
Row = sqlite3.Row
VERSION = 2
SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, name TEXT, metadata TEXT, created REAL NOT NULL,
    heard REAL NOT NULL, finished INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS models (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, session TEXT NOT NULL, rank INTEGER NOT NULL,
    seed INTEGER NOT NULL, attn INTEGER NOT NULL, mlp INTEGER NOT NULL, unembed INTEGER NOT NULL,
    metadata TEXT, created REAL NOT NULL, used REAL NOT NULL,
    done INTEGER NOT NULL DEFAULT -1, kept INTEGER NOT NULL DEFAULT -1, folder TEXT);
CREATE TABLE IF NOT EXISTS requests (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, line TEXT NOT NULL, seq INTEGER NOT NULL, kind TEXT NOT NULL,
    digest BLOB NOT NULL, body BLOB, form TEXT, result BLOB, undone INTEGER NOT NULL DEFAULT 0,
    finished REAL, UNIQUE (line, seq));
CREATE INDEX IF NOT EXISTS unfinished ON requests (line, seq) WHERE finished IS NULL;
CREATE INDEX IF NOT EXISTS waiting ON requests (owner) WHERE finished IS NULL;
CREATE INDEX IF NOT EXISTS ended ON requests (finished) WHERE finished IS NOT NULL;
CREATE TABLE IF NOT EXISTS checkpoints (
    model TEXT NOT NULL, name TEXT NOT NULL, owner TEXT NOT NULL, folder TEXT NOT NULL, size INTEGER NOT NULL,
    metadata TEXT, created REAL NOT NULL, expires REAL, public INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (model, name));
CREATE TABLE IF NOT EXISTS samplers (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, session TEXT NOT NULL, folder TEXT, path TEXT,
    size INTEGER NOT NULL DEFAULT 0, created REAL NOT NULL);
"""
"""sessions.finished: 0, 1 if it was heard of no more, and from 2 on what its client said of the end
(bodies.REASONS). models.done: the last request whose result is recorded; models.kept: the last one whose
effect is in models.folder. requests.line: what their `seq` counts in, a model or a sampling session.
requests.body: NULL if it need not be done again. requests.form: of the result, "json" or "proto".
requests.undone: it has failed and changed nothing. samplers.size: of a folder of its own; a checkpoint's
counts there."""


class DatabaseFault(RuntimeError):
    """The database has ended, cannot be reached, or is full: nothing of a transaction is recorded, or all of
    it, if the answer alone was lost. Whoever asked reads again what is there."""


class Tables:
    """The database, opened by one process.

    Args:
        where: a file, made if it is missing, or the address of a database in PostgreSQL.

    Raises:
        ConfigError: another process has it open, or it is of another version, damaged, or cannot be written.
    """

    def __init__(self, where: Path | str) -> None:
        self._db: Any = Postgres(where, SCHEMA, VERSION) if isinstance(where, str) else _opened(where)
        self._waiting: list[tuple[Callable[[sqlite3.Connection], Any], asyncio.Future[Any]]] = []
        self._writing: asyncio.Task[None] | None = None

    async def do(self, change: Callable[[sqlite3.Connection], T]) -> T:
        """Its result, once it is durable. A change that raises is undone alone.

        Raises:
            DatabaseFault: the transaction has failed as a whole.
        """
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append((change, future))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.ensure_future(self._write())
        return await asyncio.shield(future)

    async def change(self, query: str, *values: Any) -> int:
        """How many rows it has changed."""
        return await self.do(lambda db: db.execute(query, values).rowcount)

    async def rows(self, query: str, *values: Any) -> list[Row]:
        return await self.do(lambda db: db.execute(query, values).fetchall())

    async def row(self, query: str, *values: Any) -> Row | None:
        """The first one."""
        found = await self.rows(query, *values)
        return found[0] if found else None

    async def close(self) -> None:
        if self._writing is not None:
            await asyncio.wait([self._writing])
        self._db.close()

    async def _write(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            try:
                results = await asyncio.to_thread(self._transaction, [change for change, _ in batch])
            except Exception as error:
                fault = DatabaseFault(one_line(f"{type(error).__name__}: {error}", 500))
                fault.__cause__ = error
                results = [fault] * len(batch)
            for (_, future), result in zip(batch, results, strict=True):
                if future.cancelled():
                    continue
                if isinstance(result, Exception):
                    future.set_exception(result)
                else:
                    future.set_result(result)

    def _transaction(self, changes: list[Callable[[sqlite3.Connection], Any]]) -> list[Any]:
        db, results = self._db, list[Any]()
        db.execute("BEGIN IMMEDIATE")
        try:
            for change in changes:
                db.execute("SAVEPOINT one")
                try:
                    results.append(change(db))
                except Exception as error:
                    if (
                        not db.in_transaction
                    ):  # all of it is undone: the disk is full, or the connection is lost
                        raise
                    db.execute("ROLLBACK TO one")
                    results.append(error)
                db.execute("RELEASE one")
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise
        return results


def _opened(path: Path) -> sqlite3.Connection:
    try:
        db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=0.1)
    except sqlite3.Error as error:
        raise ConfigError(f"{path}: {error}; expected a file that can be written") from error
    db.row_factory = sqlite3.Row
    try:
        db.execute("PRAGMA locking_mode = EXCLUSIVE")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        db.execute("BEGIN EXCLUSIVE")
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, VERSION):
            raise ConfigError(f"{path}: got version {version} of the tables, expected {VERSION}")
        if (found := db.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise sqlite3.DatabaseError(one_line(str(found), 200))
        for statement in SCHEMA.split(";"):
            db.execute(statement)
        db.execute(f"PRAGMA user_version = {VERSION}")
        db.execute("COMMIT")
    except sqlite3.OperationalError as error:
        db.close()
        raise ConfigError(f"{path}: {error}; perhaps another server uses it") from error
    except sqlite3.Error as error:
        db.close()
        raise ConfigError(f"{path}: {error}; it is damaged, or was not made by this server") from error
    return db
