"""`silva rl` with parts elsewhere: starts what the placement says, here or on a cluster, and watches it."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from silva.aio import cancelled
from silva.commands.checks import check
from silva.config.load import Resolved
from silva.config.schema import RunConfig
from silva.monitoring.printable import put
from silva.placement.settings import ADDRESSES, ServicesPlacementSettings
from silva.placement.supervisor import Part, Supervisor, line_writer
from silva.scratch import private_folder
from silva.storage import replaced
from silva.storage.layout import Layout, steps_in
from silva.storage.run_folder import owner

NO_CRASH = {"SILVA_CRASH": "", "SILVA_CRASH_PROOF": ""}
"""What is in the environment of this process is for first starts only (`once`)."""
LONGEST = 103  # bytes of a socket's path, on every system
SOCKET = "/inference9999.sock"
CORE = "/is_paused"
"""What vLLM's core answers (engines/remote/vllm.py). Half of `engine.patience` is left for another start."""


def supervise(resolved: Resolved, argv: Sequence[str], flags: Sequence[str]) -> int:
    """Run the parts until the orchestrator ends; returns its exit code.

    Args:
        argv: files and keys of the configuration, as on the command line.
        flags: of `silva rl`, such as --resume.
    """
    config, placement = resolved.config, resolved.config.placement
    check(config)
    run = Layout(Path(config.output_dir) / config.name)
    own = OwnRun(run, flags)

    def writes() -> bool:  # another `silva rl` may have the folder
        return own.exists() and owner(run.path) == watched[0].pid("orchestrator")

    watched: list[Supervisor] = []
    told: dict[str, Any] = {
        "log": line_writer(run.services, writes),
        "say": lambda text: put(f"silva: {text}", error=True),
        "checkpoints": lambda: list(steps_in(run.checkpoints)),
    }

    def supervised(parts: Sequence[Part], key: str) -> Coroutine[Any, Any, int]:
        watched.append(Supervisor(parts, key=key, **told))
        return watched[0].run()

    if placement.clustered:
        from silva.placement.ray import Actors
        from silva.placement.ray_cluster import cluster

        values = {**config.model_dump(mode="json"), "output_dir": str(Path(config.output_dir).absolute())}
        needs = placement.needs(config.ranks, config.workers).values()
        cpus = sum(each.get("CPU", 0.0) for each in needs)
        with (
            cluster(placement, told["say"], cpus) as address,
            Actors(placement, "silva.commands.serve:carried", values, once=_crash, **told) as actors,
        ):
            given = {"cluster": address, "namespace": actors.namespace, "room": actors.room}
            alone = _orchestrator(argv, own.flags, {**NO_CRASH, ADDRESSES: json.dumps(given)})
            return asyncio.run(_both(supervised([alone], ""), actors.keep()))
    # Parts that run already have the user's key, and all have the same.
    key = placement.key or secrets.token_urlsafe(24)
    with private_folder("sockets", longest=LONGEST - len(SOCKET)) as folder:
        return asyncio.run(supervised(parts_of(config, folder, argv, own.flags, key), key))


async def _both(orchestrator: Coroutine[Any, Any, int], parts: Coroutine[Any, Any, None]) -> int:
    """The exit code of the orchestrator, while others keep its parts alive; what they raise ends it."""
    running, keeping = asyncio.ensure_future(orchestrator), asyncio.ensure_future(parts)
    try:
        await asyncio.wait({running, keeping}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            keeping.result()
        return await running
    finally:
        await cancelled([running, keeping])


class OwnRun:
    """Tells the run of this command from an earlier one, which lay in its folder before.

    Args:
        flags: of the command.
    """

    def __init__(self, run: Layout, flags: Sequence[str]) -> None:
        self._run, self._flags = run, flags
        self._earlier = self._ledger()

    def exists(self) -> bool:
        return "--resume" in self._flags or self._ledger() not in (None, self._earlier)

    def flags(self) -> Sequence[str]:
        """Of the orchestrator's next start: a run that nobody asked to resume is not resumed."""
        goes_on = self.exists() and not replaced.returns(self._run.path)
        accepts = [flag for flag in self._flags if flag == "--accept-files"]
        return ["--resume", *accepts] if goes_on else self._flags

    def _ledger(self) -> tuple[int, int] | None:
        try:
            found = self._run.ledger.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns


def parts_of(
    config: RunConfig, folder: Path, argv: Sequence[str], flags: Callable[[], Sequence[str]], key: str
) -> list[Part]:
    """The processes to start: those services that have no address, then the orchestrator.

    Args:
        flags: says those of the orchestrator, at each of its starts.
    """
    placement: ServicesPlacementSettings = config.placement
    silva = [sys.executable, "-m", "silva"]
    shared = {**NO_CRASH, placement.key_variable or "SILVA_API_KEY": key}
    parts, trainer, inference = list[Part](), placement.trainer, placement.inference

    def service(command: str, name: str) -> str:
        address, where = _free_address(config, command, folder / f"{name}.sock")
        line = [*silva, command, *argv, *where]
        own: dict[str, Any] = {}
        if _is_launched(config, command):  # it knows no signal of Silva's, and its server outlives its core
            own = {"told": signal.SIGINT, "core": CORE, "core_patience": config.engine.patience / 2}
        parts.append(Part(name, line, address=address, env=shared, once=_crash(command), **own))
        return address

    if not inference:
        names = [f"inference{i or ''}" for i in range(placement.servers)]
        inference = tuple(service("inference", name) for name in names)
    if not trainer:
        trainer = service("trainer", "trainer")
    addresses = json.dumps({"trainer": trainer, "inference": inference})
    return [*parts, _orchestrator(argv, flags, {**shared, ADDRESSES: addresses})]


def _orchestrator(argv: Sequence[str], flags: Callable[[], Sequence[str]], env: Mapping[str, str]) -> Part:
    def line() -> Sequence[str]:
        return [sys.executable, "-m", "silva", "orchestrator", *argv, *flags()]

    first = line()
    lasting = not any(word.startswith("--probe") for word in first)
    return Part("orchestrator", first, line, env=env, once=_crash("orchestrator"), lasting=lasting)


def _free_address(config: RunConfig, command: str, path: Path) -> tuple[str, list[str]]:
    """Where a part listens, and the flags that tell it: a Unix socket, or a port for what is launched."""
    if not _is_launched(config, command):
        return f"unix:{path}", ["--unix", str(path)]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return f"http://127.0.0.1:{port}", ["--host", "127.0.0.1", "--port", str(port)]


def _is_launched(config: RunConfig, command: str) -> bool:
    return command == "inference" and config.engine.launched


def _crash(command: str) -> dict[str, str]:
    """What SILVA_CRASH_TRAINER and so on ask of that part; SILVA_CRASH itself is the orchestrator's."""
    found = os.environ.get(f"SILVA_CRASH_{command.upper()}", "")
    if command == "orchestrator":
        found = found or os.environ.get("SILVA_CRASH", "")
    return {"SILVA_CRASH": found, "SILVA_CRASH_PROOF": os.environ.get("SILVA_CRASH_PROOF", "")}
