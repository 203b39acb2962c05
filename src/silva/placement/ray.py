"""Parts of a run as Ray actors: who starts, watches and ends them.

    silva rl ──> cluster, its own or a given one ──> placement group, a bundle for each part and each worker
             └─> Actors.keep: a part is lost if its process or node has died, or if it has not answered for
                 DEAD_AFTER (Ray never notices SIGSTOP); it is killed and started again in its bundle

Whoever has the cluster's token may run code there. Actors end with the process that started them, whatever
ends it. Not here: what crosses (carrier.py), what the parts do, and the actors of workers, which the
orchestrator starts (ray_worker.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import logging
import math
import os
import secrets
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from silva.aio import cancelled, first, gather
from silva.errors import CapabilityError, ConfigError, SilvaError, error_named
from silva.placement.carrier import MODE, TOKEN, TOKEN_PATH, CarriedPart, part_of, peer, words
from silva.placement.supervisor import CHECK, DEAD_AFTER, MOST_FAILURES, MOST_LOSSES
from silva.ports import CLOCK
from silva.scratch import private_folder
from silva.wire.transport import silence

if TYPE_CHECKING:
    from silva.placement.settings import RayPlacementSettings

PART = "SILVA_PART"
"""Environment variable of an actor: which part it is, for whoever looks at processes."""
STORE = 256 << 20  # bytes of the object store of our own cluster: what does not fit goes to the disk
SOON = 5.0  # seconds in which a group is there if there is room
STARTING = 30.0  # seconds without an answer while it imports and loads, which others may have to wait for
AT_ONCE = 4096  # calls of an actor
OWN_CLUSTER = {  # no idle workers, and none that gives way to whatever else runs, as by default
    "enable_worker_prestart": False, "prestart_worker_first_driver": False, "worker_niceness": 0,
}  # fmt: skip
LONGEST_FOLDER = 40  # bytes: 65 come after it in the path of a socket, which has at most 107
LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # 0, as is usual there: all ports of Ray on loopback
Say = Callable[[str], None]


def join(address: str) -> None:
    """Make this process one of the cluster's, once."""
    import ray

    if not ray.is_initialized():
        _init(address=address)


@contextlib.contextmanager
def cluster(settings: RayPlacementSettings, say: Say, cpus: float = 0.0) -> Iterator[str]:
    """The address of the cluster, which this process belongs to until the end of the block.

    Call it on the main thread: a new cluster dies with the thread that started it.

    Args:
        cpus: a new one has so many at least: its parts share this machine's, as those of services do.

    Raises:
        CapabilityError: Ray is not installed.
        ConfigError: there is no such cluster, or everybody may use it.
    """
    if importlib.util.find_spec("ray") is None:
        raise CapabilityError("placement.type = \"ray\" needs the package ray: pip install 'silva[ray]'")
    options: dict[str, Any] = {}
    if settings.working_dir:
        if not Path(settings.working_dir).is_dir():
            raise ConfigError(f"placement.working_dir = {settings.working_dir!r}: no such folder")
        options["runtime_env"] = {"working_dir": settings.working_dir}
    with contextlib.ExitStack() as stack:
        if settings.address:
            _use_token(settings.address, say)
            options["address"] = settings.address
        else:
            # Everybody may write to the folder that Ray is given: it lies in one that nobody else can enter.
            folder = stack.enter_context(private_folder("ray", longest=LONGEST_FOLDER))
            _make_token(folder / "token")
            os.environ[LOOPBACK] = "0"
            options |= {"address": "local", "include_dashboard": False, "object_store_memory": STORE,
                        "num_cpus": max(os.cpu_count() or 1, math.ceil(cpus)),
                        "_temp_dir": str(folder / "r"), "_system_config": OWN_CLUSTER}  # fmt: skip
        import ray

        stack.callback(ray.shutdown)
        yield _init(**options)


def _init(**options: Any) -> str:
    import ray

    before = signal.getsignal(signal.SIGTERM)
    try:
        found = ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        if options["address"] == "local":
            raise SilvaError(f"Ray did not start here: {words(error)}") from error
        raise ConfigError(
            f"placement.address = {options['address']!r}: {words(error)}; expected a running cluster whose "
            f"token this process has ({TOKEN_PATH}, or ~/.ray/auth_token)"
        ) from error
    finally:
        with contextlib.suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGTERM, before)
    return str(found.address_info["gcs_address"])


def _make_token(path: Path) -> None:
    """Ray's own file could be read by everybody on the machine."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    os.environ.pop(TOKEN, None)
    os.environ.update({MODE: "token", TOKEN_PATH: str(path)})


def _use_token(address: str, say: Say) -> None:
    """Ray asks for a token, and nobody else can read the file that it makes.

    Raises:
        ConfigError: there is no token.
    """
    if os.environ.get(MODE):
        return
    file = Path(os.environ.get(TOKEN_PATH) or Path.home() / ".ray" / "auth_token")
    if not os.environ.get(TOKEN) and not file.is_file():
        raise ConfigError(
            f"placement.address = {address!r}: got no token for it, expected {TOKEN_PATH} or {file}. Without "
            f"one everybody who reaches the cluster can run code there; {MODE}=disabled allows that"
        )
    if not os.environ.get(TOKEN_PATH) and file.is_file() and file.stat().st_mode & 0o077:
        file.chmod(0o600)
        say(f"{file} could be read by others: its mode is 600 now")
    os.environ[MODE] = "token"


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
        variables = {**self._settings.env_vars, **env, PART: name}
        return actor_in(
            self._group, [*self._needs].index(name), self._needs[name], CarriedPart,
            name=name, namespace=self.namespace, max_concurrency=AT_ONCE, runtime_env={"env_vars": variables},
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
    if host == "127.0.0.1":
        shared["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
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
