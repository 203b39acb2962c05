"""PostgreSQL as the database of tables.py: one connection, with the statements and the rows of SQLite.

The connection is made again when it is lost; what was asked for meanwhile fails and is asked again by
clients, as if the server had ended in between. It holds a lock of its database, so that one server at a time
has it. The lock is free while the connection is lost: if another server had the database then, models that
this one has in memory are not those of the tables, and it asks for nothing more.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from silva.errors import CapabilityError, ConfigError, one_line

SCHEMES = ("postgresql", "postgres")
EXTRA = "pip install 'silva[postgres]'"
TYPES = {" INTEGER": " BIGINT", " REAL": " DOUBLE PRECISION", " BLOB": " BYTEA"}
"""Of SQLite, whose numbers have 64 bits."""
CONNECT = 10  # seconds
LOCK = 0x73696C7661  # "silva"
PATIENCE = 5000  # milliseconds until the lock of a server that has just ended is free


class RowByName(tuple[Any, ...]):
    """A row whose columns are found by their names, too."""

    names: Sequence[str]

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(self.names.index(key) if isinstance(key, str) else key)


def check_url(url: str) -> None:
    """Refuse what is no address of a database, or holds a password, which everybody on a machine could read.

    Raises:
        ConfigError: with the form that is expected.
    """
    form = "expected postgresql://USER@HOST:PORT/NAME, the password in PGPASSWORD or ~/.pgpass"
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ConfigError(f"--database: {error}; {form}") from error
    if parts.password is not None or "password" in parts.query:
        raise ConfigError(f"--database: got a password; {form}")
    if parts.scheme not in SCHEMES:
        raise ConfigError(f"--database: got {url[:200]!r}; {form}")


class Postgres:
    """A connection to a database.

    Args:
        schema: statements for SQLite that make the tables.
        version: of the tables.

    Raises:
        CapabilityError: psycopg is not installed.
        ConfigError: there is no such database, another server uses it, or its tables are of another version.
    """

    def __init__(self, url: str, schema: str, version: int) -> None:
        check_url(url)
        try:
            import psycopg
        except ImportError as error:
            raise CapabilityError(f"--database needs {error.name}: {EXTRA}") from error
        self._psycopg: Any = psycopg
        self._url, self._holder = url, secrets.token_hex(16)
        for name, other in TYPES.items():
            schema = schema.replace(name, other)
        try:
            self._connection: Any = self._connected()
            for table in ("about (version BIGINT NOT NULL)", "holder (id TEXT NOT NULL)"):
                self._connection.execute(f"CREATE TABLE IF NOT EXISTS {table}")
            found = self._connection.execute("SELECT version FROM about").fetchone()
            if found is not None and found["version"] != version:
                raise ConfigError(
                    f"--database: got version {found['version']} of the tables, expected {version}"
                )
            with self._connection.transaction():
                for statement in filter(str.strip, schema.split(";")):
                    self._connection.execute(statement)
                if found is None:
                    self._connection.execute("INSERT INTO about (version) VALUES (%s)", (version,))
                self._connection.execute("DELETE FROM holder")
                self._connection.execute("INSERT INTO holder (id) VALUES (%s)", (self._holder,))
        except psycopg.Error as error:
            raise ConfigError(f"--database: {one_line(str(error), 500)}") from error

    @property
    def in_transaction(self) -> bool:
        status = self._psycopg.pq.TransactionStatus
        return self._connection.info.transaction_status not in (status.IDLE, status.UNKNOWN)

    def execute(self, query: str, values: Sequence[Any] = ()) -> Any:
        if query.startswith("BEGIN"):
            query = "BEGIN"
            if self._connection.closed:
                self._connection = self._connected_again()
        # No text here has a NUL but one in a request that is wrong, and PostgreSQL has no place for it.
        safe = [each.replace("\0", "\ufffd") if isinstance(each, str) else each for each in values]
        return self._connection.execute(query.replace("?", "%s"), safe or None)

    def close(self) -> None:
        self._connection.close()

    def _connected_again(self) -> Any:
        connection = self._connected()
        holder = connection.execute("SELECT id FROM holder").fetchone()
        if holder["id"] != self._holder:
            connection.close()
            raise self._psycopg.OperationalError(
                "another server has used this database since the connection was lost: start this one again"
            )
        return connection

    def _connected(self) -> Any:
        psycopg = self._psycopg
        connection = psycopg.connect(
            self._url, autocommit=True, connect_timeout=CONNECT, row_factory=_rows, application_name="silva",
            keepalives_idle=CONNECT, keepalives_interval=CONNECT, keepalives_count=3,
            tcp_user_timeout=3000 * CONNECT,
        )  # fmt: skip
        try:
            connection.execute(f"SET lock_timeout = {PATIENCE}")
            connection.execute("SELECT pg_advisory_lock(%s)", (LOCK,))
            connection.execute("SET lock_timeout = 0")
            # What a commit has answered for must be there after a fault, whatever the cluster's settings say.
            connection.execute("SET synchronous_commit = on")
        except psycopg.errors.LockNotAvailable:
            connection.close()
            raise psycopg.OperationalError("another server uses this database") from None
        return connection


def _rows(cursor: Any) -> Any:
    names = [column.name for column in cursor.description or ()]
    kind = type("Row", (RowByName,), {"names": names})
    return kind
