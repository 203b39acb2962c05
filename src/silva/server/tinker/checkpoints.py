"""Checkpoints of tenants: folders named by chance, and rows that say whose they are and what they are called.

No part of a request ever becomes part of a path: `tinker://MODEL/weights/NAME` is looked up, and the folder
is the one in its row. So no name can lead elsewhere, and a checkpoint is replaced by changing a row.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from silva.ports import CLOCK, FILES
from silva.server.tinker.tables import Row, Tables
from silva.wire.guard import HttpError

KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
"""In names, and what the SDK calls them."""
TRAINING, SAMPLER, EXTERNAL = KINDS
SCHEME = "tinker://"
LIVE = "(expires IS NULL OR expires > ?)"
ENDED = "session IN (SELECT id FROM sessions WHERE finished > 0)"
SILENT = 86400.0  # seconds without a heartbeat, after which a session has ended


def uri(model: str, name: str) -> str:
    """`name`: with its kind, as in "weights/step_5"."""
    return f"{SCHEME}{model}/{name}"


def parted(path: str) -> tuple[str, str]:
    """Model and name in "tinker://MODEL/weights/NAME".

    Raises:
        HttpError: it is no such path.
    """
    model, _, name = path.removeprefix(SCHEME).partition("/")
    kind, _, rest = name.partition("/")
    if not path.startswith(SCHEME) or kind not in KINDS or not rest or "/" in rest:
        raise HttpError(400, f"path: got {path[:200]!r}, expected tinker://MODEL/weights/NAME")
    return model, name


async def found(tables: Tables, path: str, owner: str, *, kind: str = "") -> Row:
    """The row of a checkpoint that `owner` may read: its own, or a public one.

    Raises:
        HttpError: there is none, or it is of another kind.
    """
    model, name = parted(path)
    query = f"SELECT * FROM checkpoints WHERE model = ? AND name = ? AND (owner = ? OR public = 1) AND {LIVE}"
    row = await tables.row(query, model, name, owner, CLOCK.time())
    if row is None:
        raise HttpError(404, f"checkpoint {path}: not found")
    if kind and not name.startswith(f"{kind}/"):
        raise HttpError(400, f"checkpoint {path}: got weights alone, expected those of save_state")
    return row


def saved(
    model: Row, name: str, folder: Path, size: int, ttl: int | None, metadata: Mapping[str, str] | None
) -> Callable[[sqlite3.Connection], None]:
    """What records a checkpoint of a model; one of the same name before it is forgotten."""
    now = CLOCK.time()
    values = (
        model["id"], name, model["owner"], folder.name, size,
        None if metadata is None else json.dumps(metadata), now, None if ttl is None else now + ttl,
    )  # fmt: skip

    def insert(db: sqlite3.Connection) -> None:
        db.execute("DELETE FROM checkpoints WHERE model = ? AND name = ?", (model["id"], name))
        db.execute(
            "INSERT INTO checkpoints "
            "(model, name, owner, folder, size, metadata, created, expires) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            values,
        )

    return insert


def listed(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """As the SDK reads checkpoints."""
    return [
        {
            "checkpoint_id": row["name"],
            "checkpoint_type": KINDS[row["name"].partition("/")[0]],
            "time": when(row["created"]),
            "tinker_path": uri(row["model"], row["name"]),
            "size_bytes": row["size"],
            "public": bool(row["public"]),
            "user_metadata": None if row["metadata"] is None else json.loads(row["metadata"]),
            "expires_at": None if row["expires"] is None else when(row["expires"]),
        }
        for row in rows
    ]


def when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def durable(folder: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a folder that is there afterwards as a whole, or not at all."""
    temporary = folder.with_name(f"{folder.name}.tmp")
    FILES.remove_tree(temporary)
    FILES.remove_tree(folder)
    temporary.mkdir(parents=True)
    write(temporary)
    for file in temporary.iterdir():
        FILES.fsync(file)
    FILES.fsync_dir(temporary)
    FILES.rename(temporary, folder)
    FILES.fsync_dir(folder.parent)


async def tidy(tables: Tables, folder: Path) -> None:
    """Remove what has expired or was for sessions that have ended, and folders that no row names."""
    now = CLOCK.time()

    def forget(db: sqlite3.Connection) -> set[str]:
        db.execute("DELETE FROM checkpoints WHERE expires <= ?", (now,))
        db.execute("UPDATE sessions SET finished = 1 WHERE heard < ? AND finished = 0", (now - SILENT,))
        db.execute(f"DELETE FROM samplers WHERE {ENDED}")
        idle = "NOT EXISTS (SELECT 1 FROM requests r WHERE r.line = models.id AND r.finished IS NULL)"
        db.execute(f"UPDATE models SET folder = NULL WHERE {ENDED} AND {idle}")
        bodies = f"SELECT id FROM models WHERE {ENDED} AND {idle}"
        db.execute(f"UPDATE requests SET body = NULL WHERE body IS NOT NULL AND line IN ({bodies})")
        tables = ("checkpoints", "samplers", "models")
        named = " UNION ".join(f"SELECT folder FROM {each}" for each in tables)
        waiting = "SELECT id FROM requests WHERE finished IS NULL"  # folders are named after their requests
        return {row["folder"] for row in db.execute(f"{named} UNION {waiting}")}

    before = set(folder.iterdir())
    kept = await tables.do(forget)
    for path in before:
        if path.name.removesuffix(".tmp") not in kept:
            await asyncio.to_thread(FILES.remove_tree, path)
