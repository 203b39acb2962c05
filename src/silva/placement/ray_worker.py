"""A worker of environments as a Ray actor: the process that would be here, on a node of the cluster.

    Workers ──> RayWorker ──call──> CarriedWorker ──socket──> environments/process/worker.py
                         <──status, answer──

The orchestrator starts these actors, in bundles that `silva rl` has reserved. They end with it and with the
group. The process below an actor has neither the cluster's token nor other variables of the actor. Not here:
when a worker is started or ended, and what becomes of its episodes (environments/process/workers.py).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from silva.aio import first
from silva.environments.process.channel import WorkerProcess
from silva.placement.carrier import asked, die_with_parent, words
from silva.placement.ray import PART, STARTING, actor_in, end_stopped, first_silence, mark
from silva.placement.settings import worker_name
from silva.placement.supervisor import DEAD_AFTER
from silva.protocols import WorkerSpec
from silva.wire.codec import decode, encode

if TYPE_CHECKING:
    from silva.placement.settings import RayPlacementSettings


class CarriedWorker:
    """What runs in the actor. Answers begin with a line: how the process ended; empty if it lives."""

    def __init__(self) -> None:
        die_with_parent()  # and the process dies with this one

    async def open(self, folder: bytes, spec: bytes) -> bytes:
        """Its first words. `folder`: to work in; empty: Ray's."""
        return await _told(self._opened(folder, spec))

    async def ask(self, call: bytes) -> bytes:
        return await _told(self._process.ask(call))

    async def well(self) -> bytes:
        """A sign of life, also while it is asked for something."""
        return b""

    async def _opened(self, folder: bytes, spec: bytes) -> bytes:
        if folder:
            os.chdir(folder.decode())
        self._process = WorkerProcess(decode(WorkerSpec, spec))
        return await self._process.ready()


async def _told(answer: Awaitable[bytes]) -> bytes:
    try:
        return b"\n" + await answer
    except (EOFError, OSError) as error:
        return str(error).encode() + b"\n"


class RayWorker:
    """Implements `WorkerChannel`.

    Args:
        room: where it belongs, `Actors.room`.
    """

    def __init__(self, settings: RayPlacementSettings, room: Mapping[str, Any], spec: WorkerSpec) -> None:
        self._settings, self._room, self._spec = settings, room, spec
        self._actor: Any = None

    async def ready(self) -> bytes:
        self._actor = await asyncio.to_thread(self._started)
        spec = replace(self._spec, variables={**self._settings.env_vars, **self._spec.variables})
        folder = "" if self._room["working_dir"] else os.getcwd()
        return await self._asked(STARTING, self._actor.open, folder.encode(), encode(spec))

    async def ask(self, call: bytes) -> bytes:
        return await self._asked(DEAD_AFTER, self._actor.ask, call)

    def stop(self) -> None:
        import ray

        if self._actor is not None:
            ray.kill(self._actor)

    def _started(self) -> Any:
        name, room = worker_name(self._spec.number), self._room
        environment: dict[str, Any] = {"env_vars": {**self._settings.env_vars, PART: mark(self._group, name)}}
        if room["working_dir"]:
            environment["working_dir"] = room["working_dir"]
        needs, bundle = self._settings.worker_needs, room["bundles"].index(name)
        return actor_in(self._group, bundle, needs, CarriedWorker, runtime_env=environment)

    @property
    def _group(self) -> Any:
        import ray
        from ray.util.placement_group import PlacementGroup

        return PlacementGroup(ray.PlacementGroupID.from_hex(self._room["group"]))

    async def _asked(self, patience: float, method: Any, *arguments: bytes) -> bytes:
        import ray

        try:
            done = await first(asked(method, *arguments), first_silence([self._actor], patience))
            if done is None:  # Ray never notices SIGSTOP
                ray.kill(self._actor)
                name = worker_name(self._spec.number)
                await asyncio.to_thread(end_stopped, self._group, [name])
                raise EOFError(f"no sign of life for {patience:g} s")
            answer = done.result()
        except ray.exceptions.RayError as error:
            raise EOFError(words(error)) from error
        ended, _, found = answer.partition(b"\n")
        if ended:
            raise EOFError(ended.decode())
        return found
