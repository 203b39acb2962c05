"""Runs at Weights & Biases, or in the files that it writes offline, as `Followed`.

A file `run-ID.wandb` is a log of LevelDB's format: blocks of 32 KiB, whose chunks make records of W&B's own
protobuf. W&B has no reader for it in Python.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from silva.errors import ConfigError, RecordError
from silva.monitoring.followed import Followed, ListedRun

PREFIX = "wandb:"
BLOCK, HEADER = 32768, 7
WHOLE, LAST = 1, 4  # kinds of chunks that end a record
STEPS = ("step", "_step", "train/step")
"""Keys that hold the step of a row: Silva's own first."""


def offline_file(path: Path) -> Path | None:
    """The file of an offline run: itself, or the one in its folder (`wandb/offline-run-...`)."""
    found = [path] if path.suffix == ".wandb" else sorted(path.glob("*.wandb")) if path.is_dir() else []
    return found[0] if found and found[0].is_file() else None


def offline(path: Path) -> Followed:
    """Raises RecordError if the file is of another form, ConfigError if W&B is not installed."""
    rows, name = list[dict[str, Any]](), path.stem
    for record in records(path):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            name = record.run.display_name or record.run.run_id
        if kind == "history":
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            rows.append(_stepped({key: json.loads(value) for key, value in items.items()}))
    files = [path.parent / "files" / row["samples/path"] for row in reversed(rows) if "samples/path" in row]
    return Followed(name, rows, (row for file in files if file.is_file() for row in _table(file.read_text())))


def online(name: str, api: Any = None) -> Followed:
    """The run ENTITY/PROJECT/RUN at W&B. `api`: W&B's, or one like it."""
    run = (api or _wandb().Api()).run(name)
    rows = [_stepped(dict(row)) for row in run.scan_history()]

    def samples() -> Iterator[Mapping[str, Any]]:
        for file in reversed([each for each in run.files() if "/samples_" in each.name]):
            with TemporaryDirectory() as folder, file.download(root=folder) as opened:
                text = opened.read()
            yield from _table(text)

    return Followed(run.name, rows, samples(), run.state)


def runs_of(project: str, api: Any = None) -> Iterator[ListedRun]:
    """The runs of ENTITY/PROJECT at W&B, the newest first."""
    for run in (api or _wandb().Api()).runs(project, order="-created_at"):
        step = run.summary.get("step", run.summary.get("_step"))
        created = datetime.fromisoformat(run.created_at).timestamp()
        yield ListedRun(f"{run.id} {run.name}", run.state, step, run.config.get("steps"), created)


def records(path: Path) -> Iterator[Any]:
    """The records of an offline file, in order; one that is cut off at its end is left out."""
    _wandb()
    from wandb.proto import wandb_internal_pb2

    messages: Any = wandb_internal_pb2  # whose classes are made when it is imported
    data, at, whole = path.read_bytes(), HEADER, b""
    if data[:4] != b":W&B":
        raise RecordError(f"{path}: got {data[:4]!r} at its beginning, expected :W&B")
    while at + HEADER <= len(data):
        if (left := BLOCK - at % BLOCK) < HEADER:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        chunk = data[at + HEADER : at + HEADER + length]
        if len(chunk) < length:
            return
        whole, at = whole + chunk, at + HEADER + length
        if kind in (WHOLE, LAST):
            record = messages.Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def _stepped(row: dict[str, Any]) -> dict[str, Any]:
    step = next((row[key] for key in STEPS if isinstance(row.get(key), int | float)), 0)
    return {**row, "step": int(step)}


def _table(text: str) -> Iterator[Mapping[str, Any]]:
    found = json.loads(text)
    return (dict(zip(found["columns"], row, strict=True)) for row in found["data"])


def _wandb() -> Any:
    try:
        import wandb
    except ImportError as error:
        raise ConfigError(
            f"Weights & Biases is not installed ({error}): pip install 'silva[wandb]'"
        ) from error
    return wandb
