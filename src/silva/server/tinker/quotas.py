"""What one API key may have at most, so that nobody fills a server that others use.

    a model too many            refused at once: waiting would not help
    a request too many          429 with Retry-After: the SDK asks again, for five minutes
    a byte of weights too many  the result of the save is an error, and nothing is kept of it

Not here: how much of one model may wait (futures.py), and the size of one request (server.py).
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

from silva.errors import ConfigError
from silva.wire.guard import HttpError

OF_LIVING = "session IN (SELECT id FROM sessions WHERE finished = 0)"


@dataclass(frozen=True, slots=True)
class Quotas:
    """Of each key; None: as much as it likes.

    Attributes:
        models: whose sessions have not ended.
        waiting: requests whose result is not there yet.
        bytes: of its checkpoints, and of what was saved for samplers without a name.

    Raises:
        ConfigError: a number below 1.
    """

    models: int | None = None
    waiting: int | None = None
    bytes: int | None = None

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"the most {name} of a key: got {value}, expected 1 or more")

    def check_model(self, db: sqlite3.Connection, owner: str) -> None:
        """Raise HttpError if the key may have no model more."""
        query = f"SELECT COUNT(*) AS n FROM models WHERE owner = ? AND {OF_LIVING}"
        if self.models is not None and _number(db, query, owner) >= self.models:
            raise HttpError(
                400, f"this key has {self.models} models, the most it may have: close a session that has some"
            )

    def check_waiting(self, db: sqlite3.Connection, owner: str) -> None:
        """Raise HttpError if the key may have no request more."""
        query = "SELECT COUNT(*) AS n FROM requests WHERE owner = ? AND finished IS NULL"
        if self.waiting is not None and _number(db, query, owner) >= self.waiting:
            words = f"{self.waiting} requests of this key wait, the most that may: again later"
            raise HttpError(429, words, headers={"retry-after": "1"})

    def check_bytes(self, db: sqlite3.Connection, owner: str, size: int, instead: tuple[str, str]) -> None:
        """Raise HttpError if the key may not keep so much more, `instead` of a checkpoint of that model and
        name."""
        query = (
            "SELECT (SELECT COALESCE(SUM(size), 0) FROM checkpoints WHERE owner = ? "
            "AND NOT (model = ? AND name = ?)) "
            "+ (SELECT COALESCE(SUM(size), 0) FROM samplers WHERE owner = ?) AS n"
        )
        if self.bytes is None or (found := _number(db, query, owner, *instead, owner)) + size <= self.bytes:
            return
        raise HttpError(
            400,
            f"this key has {found} bytes of weights and may have {self.bytes}, so {size} more are too many: "
            "delete checkpoints, or close sessions that saved for samplers without a name",
        )


def _number(db: sqlite3.Connection, query: str, *values: object) -> int:
    return int(db.execute(query, values).fetchone()["n"])
