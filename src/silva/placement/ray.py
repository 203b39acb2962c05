"""Parts of a run as Ray actors: who starts, watches and ends them.

    silva rl ──> cluster, its own or a given one ──> placement group, a bundle for each part and each worker
             └─> Actors.keep: a part is lost if its process or node has died, or if it has not answered for
                 DEAD_AFTER (Ray never notices SIGSTOP); it is killed and started again in its bundle

Actors end with the process that started them, whatever ends it. Not here: the cluster (ray_cluster.py), what
crosses (carrier.py), what the parts do, and the actors of workers, which the orchestrator starts
(ray_worker.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from silva.aio import cancelled, first, gather
from silva.errors import ConfigError, SilvaError, error_named
from silva.placement.carrier import CarriedPart, part_of, peer, words
from silva.placement.ray_cluster import Say
from silva.placement.supervisor import CHECK, DEAD_AFTER, MOST_FAILURES, MOST_LOSSES
from silva.ports import CLOCK
from silva.signals import is_stopped
from silva.wire.transport import silence

if TYPE_CHECKING:
    from silva.placement.settings import RayPlacementSettings

PART = "SILVA_PART"
"""Environment variable of an actor, for whoever looks at processes: "trainer1@" and its group."""
SOON = 5.0  # seconds in which a group is there if there is room
STARTING = 30.0  # seconds without an answer while it imports and loads, which others may have to wait for
AT_ONCE = 4096  # calls of an actor


class Actors:
    """The parts of a run on a cluster that this process has joined.

    Args:
        make: what builds the app in an actor, of `CarriedPart.open`.
        values: the run's configuration as plain data.
        once: environment variables of the first start of a part only.
        checkpoints: what there are; any value that changes with the next one.
        say, log: take what people should know, and every line of a part.
    """

    def __init__(
        self,
        settings: RayPlacementSettings,
        make: str,
        values: Mapping[str, Any],
        *,
        once: Callable[[str], Mapping[str, str]],
        checkpoints: Callable[[], object],
        say: Say,
        log: Say,
    ) -> None:
        self.namespace = f"silva-{secrets.token_hex(4)}"
        self._settings, self._make, self._once = settings, make, once
        self._checkpoints, self._say, self._log = checkpoints, say, log
        folder = "" if settings.working_dir else os.getcwd()
        self._spec = {"values": values, "folder": folder}
        workers = sum(each["workers"] for each in values["environments"])
        self._needs = settings.needs(values["trainer"]["ranks"], workers)
        self._group: Any = None
        self._alive: dict[str, Any] = {}

    def __enter__(self) -> Actors:
        self._group = _reserved(self._needs, self._settings.patience if self._settings.address else 0.0)
        return self

    def __exit__(self, *raised: object) -> None:
        import ray
        from ray.util import remove_placement_group

        for actor in self._alive.values():
            ray.kill(actor)
        remove_placement_group(self._group)

    @property
    def room(self) -> dict[str, Any]:
        """What `RayWorker` needs: the group, the names of its bundles, and the copy of `working_dir`."""
        import ray

        copied = ray.get_runtime_context().runtime_env.get("working_dir", "")
        return {"group": self._group.id.hex(), "bundles": [*self._needs], "working_dir": copied}

    async def keep(self) -> None:
        """Start every part, and again whenever it is lost; workers are the orchestrator's.

        Raises:
            SilvaError: what building a part raised; one that fails at every start, or is lost again and again
                before the next checkpoint.
        """
        ranks = [name for name in self._needs if part_of(name) == "trainer"]
        servers = ([name] for name in self._needs if part_of(name) == "inference")
        await gather(self._keep(names) for names in (ranks, *servers))

    async def _keep(self, names: Sequence[str]) -> None:
        """`names`: of actors that work together, so all are started again if one is lost."""
        failures, losses, checkpoints, env = 0, 0, self._checkpoints(), self._once(names[0])
        while True:
            why, opened = await self._life(names, env)
            failures, env = 0 if opened else failures + 1, dict.fromkeys(env, "")
            before, checkpoints = checkpoints, self._checkpoints()
            losses = losses + 1 if checkpoints == before else 1
            if losses >= MOST_LOSSES:
                why += f", lost {losses} times without a new checkpoint"
            if failures >= MOST_FAILURES or losses >= MOST_LOSSES:
                raise SilvaError(f"{names[0]} {why}")
            self._say(f"{names[0]} {why}: it is started again")
            await asyncio.to_thread(end_stopped, self._group, names)

    async def _life(self, names: Sequence[str], env: Mapping[str, str]) -> tuple[str, bool]:
        """Why they were lost, in words, and whether they had come so far as to work."""
        import ray

        opened, patience, actors = False, self._settings.patience, list[Any]()
        limit = patience / 2  # one that is stopped before it can answer leaves time for another
        try:
            for name in names:
                actors.append(await asyncio.to_thread(self._started, name, env))
                self._alive[name] = actors[-1]
            async with asyncio.timeout(limit):
                await gather(actor.well.remote() for actor in actors)  # Ray takes its time to start them
                places = await _places(actors)
            limit = patience
            async with asyncio.timeout(limit):
                opening = gather(
                    actor.open.remote(
                        self._make, part_of(name), json.dumps({**self._spec, "env": place}).encode()
                    )
                    for name, actor, place in zip(names, actors, places, strict=True)
                )
                done = await first(opening, first_silence(actors, STARTING))
            if done is None:
                return f"has not answered for {STARTING:g} s at its start", opened
            for fault in filter(None, done.result()):
                kind, text = json.loads(fault)
                raise error_named(kind, text) or SilvaError(f"{names[0]}: {text}")
            opened = True
            await self._silence(names, actors)
            return f"has not answered for {DEAD_AFTER:g} s", opened
        except TimeoutError:
            return f"did not start within {limit:g} s (placement.patience = {patience:g})", opened
        except ray.exceptions.RayError as error:
            return f"has died ({words(error)})", opened
        finally:
            for actor in actors:
                ray.kill(actor)

    async def _silence(self, names: Sequence[str], actors: Sequence[Any]) -> None:
        """Returns when one of them does not answer; raises what Ray says of one that has died."""
        reads = [asyncio.ensure_future(self._read(*each)) for each in zip(names, actors, strict=True)]
        quiet = [
            asyncio.ensure_future(silence(peer(name, self.namespace), patience=DEAD_AFTER, every=CHECK))
            for name in names
        ]
        try:
            await asyncio.wait([*reads, *quiet], return_when=asyncio.FIRST_COMPLETED)
            for read in reads:
                if read.done():
                    read.result()
        finally:
            await cancelled([*reads, *quiet])

    async def _read(self, name: str, actor: Any) -> None:
        while True:
            for line in (await actor.lines.remote()).decode().splitlines():
                self._log(f"{name}: {line}")

    def _started(self, name: str, env: Mapping[str, str]) -> Any:
        runs = {"env_vars": {**self._settings.env_vars, **env, PART: mark(self._group, name)}}
        return actor_in(
            self._group, [*self._needs].index(name), self._needs[name], CarriedPart,
            name=name, namespace=self.namespace, max_concurrency=AT_ONCE, runtime_env=runs,
        )  # fmt: skip


def actor_in(group: Any, bundle: int, needs: Mapping[str, float], kind: type, **options: Any) -> Any:
    """An actor of the class `kind` in a bundle of a placement group, all of which it takes."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    others = dict(needs)
    return ray.remote(kind).options(
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle), num_cpus=others.pop("CPU", 0),
        num_gpus=others.pop("GPU", 0), memory=others.pop("memory", None), resources=others, **options,
    ).remote()  # fmt: skip


def mark(group: Any, name: str) -> str:
    """The value of PART: no other run's."""
    return f"{name}@{group.id.hex()}"


def end_stopped(group: Any, names: Sequence[str]) -> None:
    """Have the processes of killed actors ended on all nodes, if they are stopped.

    `ray.kill` does not always end an actor that is stopped in the moments in which it starts or opens, and
    then its bundle stays taken.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    marks = [f"{PART}={mark(group, name)}".encode() for name in names]
    for node in ray.nodes():
        if node["Alive"]:
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=True)
            ray.remote(_end_stopped).options(num_cpus=0, scheduling_strategy=there).remote(marks)


def _end_stopped(marks: Sequence[bytes]) -> None:
    """On this node, where it is Linux."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            of = (process / "environ").read_bytes().split(b"\0")
            if any(each in of for each in marks) and is_stopped(int(process.name)):
                os.kill(int(process.name), signal.SIGKILL)


async def first_silence(actors: Sequence[Any], patience: float) -> None:
    """Returns when one of them, which are asked for something, has given no sign of life for so many seconds.

    That one has died is said by what it is asked for.
    """
    import ray

    async def silent(actor: Any) -> None:
        with contextlib.suppress(TimeoutError):
            while True:
                try:
                    await CLOCK.sleep(CHECK)
                    await asyncio.wait_for(actor.well.remote(), patience)
                except ray.exceptions.RayError:
                    await asyncio.Event().wait()

    quiet = [asyncio.ensure_future(silent(actor)) for actor in actors]
    try:
        await asyncio.wait(quiet, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancelled(quiet)


async def _places(actors: Sequence[Any]) -> list[dict[str, str]]:
    """What torchrun would tell each of them: who it is, and where they meet."""
    if len(actors) == 1:
        return [{}]
    host, port = (await actors[0].place.remote()).decode().split()
    shared = {"WORLD_SIZE": str(len(actors)), "MASTER_ADDR": host, "MASTER_PORT": port, "LOCAL_RANK": "0"}
    return [{**shared, "RANK": str(rank)} for rank in range(len(actors))]


def _reserved(needs: Mapping[str, Mapping[str, float]], patience: float) -> Any:
    """A placement group with a bundle for each part.

    Raises:
        ConfigError: it does not fit within `patience` seconds; Ray would wait for ever.
    """
    import ray
    from ray.util import placement_group, remove_placement_group

    group = placement_group([dict(each) for each in needs.values()], strategy="PACK")
    end = CLOCK.monotonic() + max(patience, SOON)
    while CLOCK.monotonic() < end:
        if group.wait(1.0):  # a signal is heard only between two calls
            return group
    remove_placement_group(group)
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    raise ConfigError(missing(needs, nodes, ray.available_resources()))


def missing(
    needs: Mapping[str, Mapping[str, float]], nodes: Sequence[Mapping[str, float]], free: Mapping[str, float]
) -> str:
    """In words: what is asked, what is there, what is missing."""
    total, short = dict[str, float](), list[str]()
    for name, asked in needs.items():
        for key, amount in asked.items():
            total[key] = total.get(key, 0.0) + amount
            if (most := max((node.get(key, 0.0) for node in nodes), default=0.0)) < amount:
                short.append(f"{name} needs {key} {amount:g} on one node, and no node has more than {most:g}")
    kinds = sorted(total)
    there = {key: sum(node.get(key, 0.0) for node in nodes) for key in kinds}
    left = {key: free.get(key, 0.0) for key in kinds}
    short += [f"{key}: {total[key] - left[key]:g} missing" for key in kinds if left[key] < total[key]]
    return (
        f"the parts do not fit on the Ray cluster. Asked: {_amounts(total)} "
        f"({'; '.join(f'{name} {_amounts(each)}' for name, each in needs.items())}); there: "
        f"{_amounts(there)} on {len(nodes)} node{'s' * (len(nodes) != 1)}, of which free: {_amounts(left)}. "
        f"{'; '.join(short) or 'no node has enough of all together'}. Lower placement.trainer_needs, "
        "placement.server_needs, placement.worker_needs, placement.servers or workers of environments, or "
        "add nodes"
    )


def _amounts(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{key} {amount:g}" for key, amount in sorted(resources.items())) or "nothing"
