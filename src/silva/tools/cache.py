"""Answers of services, kept in one SQLite file that threads and processes share.

    value = await cache.get_or_make(["serper", {"num": 10}, "the nile"], ask)

Equal requests at the same time are sent once: in one event loop the callers wait for the same task, and
others (threads, processes) wait for the one that has claimed the request. A claim is renewed while its
request is on its way, and lapses soon after its process dies. Failures are not kept. Keys and values are
JSON, never pickle; a key must hold no secret.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import re
import secrets
import sqlite3
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from silva.errors import ConfigError, SilvaError
from silva.ports import CLOCK

T = TypeVar("T")

VERSION = 1
LEASE = 15.0  # seconds after which the claim of a dead process lapses
POLL = 0.05  # seconds between looks at a request that another process has claimed
BUSY = 30.0  # seconds to wait for the file
_TABLES = """
CREATE TABLE IF NOT EXISTS answers (request TEXT PRIMARY KEY, answer TEXT NOT NULL, made REAL NOT NULL);
CREATE TABLE IF NOT EXISTS claims (request TEXT PRIMARY KEY, owner TEXT NOT NULL, until REAL NOT NULL);
CREATE TABLE IF NOT EXISTS counts (name TEXT PRIMARY KEY, n INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS imports (digest TEXT PRIMARY KEY);
"""
_MISSING = object()


class CacheFault(SilvaError, OSError):
    """The file cannot be read or written. Nothing is known about the request."""


@dataclass
class _Flight:
    task: asyncio.Task[Any]
    waiting: int = 0


class Cache:
    """Args: path of the file; without one it is in memory, and ends with this object."""

    def __init__(self, path: str | Path = "") -> None:
        self.path = Path(path).expanduser() if path else None
        self._lock = threading.Lock()
        self._opened: tuple[int, sqlite3.Connection] | None = None
        self._flights: dict[tuple[asyncio.AbstractEventLoop, str], _Flight] = {}
        self._run(lambda db: None)  # a file that cannot be used is found at once

    async def get(self, request: Any) -> Any | None:
        """The kept answer, or None."""
        found = await asyncio.to_thread(self._run, lambda db: _answer(db, _key(request)))
        return None if found is _MISSING else found

    @property
    def empty(self) -> bool:
        """Whether no answer is kept."""
        return self._run(lambda db: db.execute("SELECT 1 FROM answers").fetchone()) is None

    async def get_or_make(self, request: Any, make: Callable[[], Awaitable[Any]]) -> Any:
        """The kept answer; without one, what `make` returns, which is kept.

        Callers that wait together get the same answer or the same exception. `make` is cancelled if all of
        them are.
        """
        key, loop = _key(request), asyncio.get_running_loop()
        flight = self._flights.get((loop, key))
        if flight is None:
            task = loop.create_task(self._fly(key, make))
            flight = self._flights[loop, key] = _Flight(task)
            task.add_done_callback(lambda done: self._landed(loop, key, done))
        flight.waiting += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiting -= 1
            if not flight.waiting and not flight.task.done():
                self._flights.pop((loop, key), None)  # who comes now makes a new one
                flight.task.cancel()

    def spend(self, name: str, limit: int) -> int | None:
        """Adds 1 to a count that all users of the file share; None if it has reached `limit` already."""

        def add(db: sqlite3.Connection) -> int | None:
            row = db.execute("SELECT n FROM counts WHERE name = ?", (name,)).fetchone()
            spent = row[0] if row else 0
            if spent >= limit:
                return None
            db.execute("INSERT OR REPLACE INTO counts VALUES (?, ?)", (name, spent + 1))
            return spent + 1

        return self._run(add, write=True)

    def import_answers(self, digest: str, entries: Iterable[tuple[Any, Any]]) -> int:
        """Adds answers unless `digest` was imported before; kept ones stay. How many were new."""

        def add(db: sqlite3.Connection) -> int:
            if db.execute("SELECT 1 FROM imports WHERE digest = ?", (digest,)).fetchone():
                return 0
            before, now = db.total_changes, CLOCK.time()
            rows = ((_key(request), json.dumps(answer), now) for request, answer in entries)
            db.executemany("INSERT OR IGNORE INTO answers VALUES (?, ?, ?)", rows)
            added = db.total_changes - before
            db.execute("INSERT INTO imports VALUES (?)", (digest,))
            return added

        return self._run(add, write=True)

    def close(self) -> None:
        with self._lock:
            if self._opened is not None and self._opened[0] == os.getpid():
                self._opened[1].close()
            self._opened = None

    async def _fly(self, key: str, make: Callable[[], Awaitable[Any]]) -> Any:
        def keep(db: sqlite3.Connection) -> None:
            db.execute("INSERT OR REPLACE INTO answers VALUES (?, ?, ?)", (key, text, CLOCK.time()))
            _drop(db, key, owner)

        owner = secrets.token_hex(8)
        renewing: asyncio.Task[None] | None = None
        try:
            while (found := await asyncio.to_thread(self._claim, key, owner)) is not owner:
                if found is not _MISSING:
                    return found
                await CLOCK.sleep(POLL)
            renewing = asyncio.get_running_loop().create_task(self._renew(key, owner))
            text = json.dumps(await make())
            await asyncio.to_thread(self._run, keep, write=True)
            return json.loads(text)  # the same, kept or made: tuples become lists
        except BaseException:
            await asyncio.to_thread(self._run, lambda db: _drop(db, key, owner), write=True)
            raise
        finally:
            if renewing is not None:
                renewing.cancel()

    async def _renew(self, key: str, owner: str) -> None:
        def renew(db: sqlite3.Connection) -> None:
            values = (CLOCK.time() + LEASE, key, owner)
            db.execute("UPDATE claims SET until = ? WHERE request = ? AND owner = ?", values)

        while True:
            await CLOCK.sleep(LEASE / 3)
            with contextlib.suppress(CacheFault):  # the next one may succeed; otherwise it is sent twice
                await asyncio.to_thread(self._run, renew, write=True)

    def _claim(self, key: str, owner: str) -> Any:
        """The kept answer; `owner` if the request is now claimed for it; _MISSING if another has it."""

        def look(db: sqlite3.Connection) -> Any:
            return _answer(db, key)

        def claim(db: sqlite3.Connection) -> Any:
            if (found := _answer(db, key)) is not _MISSING:
                return found
            now = CLOCK.time()
            row = db.execute("SELECT until FROM claims WHERE request = ?", (key,)).fetchone()
            if row and row[0] > now:
                return _MISSING
            db.execute("INSERT OR REPLACE INTO claims VALUES (?, ?, ?)", (key, owner, now + LEASE))
            return owner

        found = self._run(look)
        return self._run(claim, write=True) if found is _MISSING else found

    def _landed(self, loop: asyncio.AbstractEventLoop, key: str, task: asyncio.Task[Any]) -> None:
        if (flight := self._flights.get((loop, key))) is not None and flight.task is task:
            del self._flights[loop, key]
        if not task.cancelled():
            task.exception()  # seen, even if nobody waits any more

    def _run(self, work: Callable[[sqlite3.Connection], T], *, write: bool = False) -> T:
        try:
            with self._lock:
                db = self._database()
                if not write:
                    return work(db)
                db.execute("BEGIN IMMEDIATE")
                try:
                    result = work(db)
                    db.execute("COMMIT")
                    return result
                except BaseException:
                    db.execute("ROLLBACK")
                    raise
        except sqlite3.Error as error:
            raise CacheFault(f"{self.path or 'cache in memory'}: {error}") from error

    def _database(self) -> sqlite3.Connection:
        """Opened again in a process that was forked: a connection must not cross that."""
        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = (os.getpid(), self._open())
        return self._opened[1]

    def _open(self) -> sqlite3.Connection:
        if self.path is None:
            db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
            db.executescript(_TABLES)
            return db
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path.with_name(f".{self.path.name}.lock"), "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # the change to WAL does not wait for others by itself
                db = sqlite3.connect(self.path, timeout=BUSY, isolation_level=None, check_same_thread=False)
                version = db.execute("PRAGMA user_version").fetchone()[0]
                if version not in (0, VERSION):
                    raise ConfigError(f"{self.path}: a cache of version {version}, expected {VERSION}")
                db.execute("PRAGMA journal_mode = WAL")
                db.execute("PRAGMA synchronous = NORMAL")
                db.executescript(_TABLES + f"PRAGMA user_version = {VERSION};")
        except (sqlite3.DatabaseError, OSError) as error:
            raise ConfigError(f"cache {self.path}: cannot be used: {error}") from error
        return db


def arpo_answers(path: str | Path) -> tuple[str, Iterator[tuple[str, list[str]]]]:
    """ARPO's cache of searches, one JSON object of query -> lines "Page 1: ...": its digest, and
    (query, snippets). Empty answers are left out: there they stand for failures.

    Raises:
        ConfigError: the file is something else.
    """
    path = Path(path).expanduser()
    try:
        data = path.read_bytes()
        entries = json.loads(data)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read as ARPO's cache: {error}") from error
    if not isinstance(entries, dict) or not all(isinstance(answer, str) for answer in entries.values()):
        raise ConfigError(f"{path}: expected one JSON object of query -> answer, both text (ARPO's cache)")
    return hashlib.sha256(data).hexdigest(), (
        (query, _pages(answer)) for query, answer in entries.items() if answer.strip()
    )


def arpo_query(query: str) -> str:
    """A query as ARPO's cache has it."""
    return query.replace('"', "")


def _pages(answer: str) -> list[str]:
    """The snippets; those of "No search results found." are none."""
    parts = re.split(r"^Page \d+: ", answer.strip(), flags=re.MULTILINE)
    if len(parts) == 1:
        return [] if answer.strip() == "No search results found." else [answer.strip()]
    return [part.strip() for part in parts if part.strip()]


def _key(request: Any) -> str:
    return json.dumps(request, sort_keys=True, separators=(",", ":"))


def _answer(db: sqlite3.Connection, key: str) -> Any:
    row = db.execute("SELECT answer FROM answers WHERE request = ?", (key,)).fetchone()
    return json.loads(row[0]) if row else _MISSING


def _drop(db: sqlite3.Connection, key: str, owner: str) -> None:
    db.execute("DELETE FROM claims WHERE request = ? AND owner = ?", (key, owner))
