"""`silva rl` with `placement.type = "services"`: starts what the placement says, and watches it."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from silva.config.load import Resolved
from silva.placement.settings import ADDRESSES, ServicesPlacementSettings
from silva.placement.supervisor import Part, Supervisor, line_writer
from silva.storage.layout import Layout

CRASH = ("SILVA_CRASH", "SILVA_CRASH_PROOF")


def supervise(resolved: Resolved, argv: Sequence[str], flags: Sequence[str]) -> int:
    """Run the parts until the orchestrator ends; returns its exit code.

    Args:
        argv: files and keys of the configuration, as on the command line.
        flags: of `silva rl`, such as --resume.
    """
    placement, run = (
        resolved.config.placement,
        Layout(Path(resolved.config.output_dir) / resolved.config.name),
    )
    key = secrets.token_urlsafe(24)
    folder = tempfile.mkdtemp(prefix="silva-")  # the path of a socket must be short
    try:
        parts = parts_of(placement, Path(folder), argv, flags, key)
        log = line_writer(run.services, run.ledger)
        return asyncio.run(Supervisor(parts, log=log, say=_say, key=key).run())
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def parts_of(
    placement: ServicesPlacementSettings, folder: Path, argv: Sequence[str], flags: Sequence[str], key: str
) -> list[Part]:
    """The processes to start: those services that have no address, then the orchestrator."""
    silva, shared = [sys.executable, "-m", "silva"], {placement.key_variable or "SILVA_API_KEY": key}
    parts, trainer, inference = list[Part](), placement.trainer, placement.inference

    def service(command: str, name: str) -> str:
        path = folder / f"{name}.sock"
        line = [*silva, command, *argv, "--unix", str(path)]
        parts.append(Part(name, line, address=f"unix:{path}", env=shared, once=_crash(command)))
        return f"unix:{path}"

    if not inference:
        names = [f"inference{i or ''}" for i in range(placement.servers)]
        inference = tuple(service("inference", name) for name in names)
    if not trainer:
        trainer = service("trainer", "trainer")
    addresses = json.dumps({"trainer": trainer, "inference": inference})
    line = [*silva, "orchestrator", *argv]
    again = [*line, "--resume"]
    parts.append(
        Part("orchestrator", [*line, *flags], again, env={**shared, ADDRESSES: addresses},
             once=_crash("orchestrator"))
    )  # fmt: skip
    return parts


def _crash(command: str) -> dict[str, str]:
    """What SILVA_CRASH_TRAINER and so on ask of that part; SILVA_CRASH itself is the orchestrator's."""
    found = os.environ.get(f"SILVA_CRASH_{command.upper()}", "")
    if command == "orchestrator":
        found = found or os.environ.get("SILVA_CRASH", "")
    return {"SILVA_CRASH": found, "SILVA_CRASH_PROOF": os.environ.get("SILVA_CRASH_PROOF", "")}


def _say(text: str) -> None:
    print(f"silva: {text}", file=sys.stderr, flush=True)
