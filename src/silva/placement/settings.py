"""Settings of the placements."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from silva.config.parts import PlacementSettings
from silva.config.sections import Above0, Natural, PartAddress, Positive
from silva.wire.requests import key_of
from silva.wire.transport import part_address

if TYPE_CHECKING:
    from silva.assembly import Assembly
    from silva.protocols import Host

ADDRESSES = "SILVA_SERVICES"
"""Environment variable in which `silva rl` tells the orchestrator where the parts are that it has started."""


class LocalPlacementSettings(PlacementSettings):
    """Everything in one process."""

    type: Literal["local"] = "local"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where it computes; `auto`: on a GPU if torch sees one."""
    threads: Natural = 0
    """Threads for torch; 0 takes all cores."""

    def build(self, context: Assembly) -> Host:
        from silva.placement.here import Here

        return Here(context)


class PlacedSettings(PlacementSettings):
    """Trainer and inference in processes of their own, which `silva rl` starts and watches."""

    processes: ClassVar[bool] = True
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Of each process."""
    threads: Natural = 0
    """Threads for torch in each process; 0 takes all cores."""
    servers: Positive = 1
    """How many inference servers `silva rl` starts."""
    patience: Above0 = 300.0
    """Seconds to wait for a part that does not answer, at the start or after it was lost."""
    timeout: Above0 = 600.0
    """Seconds that an inference server may take to load weights, or that it, or the trainer, may compute
    nothing while it is asked for something. A request may wait for its turn, and be computed, for as long as
    that takes."""

    @property
    def local(self) -> LocalPlacementSettings:
        return LocalPlacementSettings(device=self.device, threads=self.threads)


class ServicesPlacementSettings(PlacedSettings):
    """Trainer and inference in processes on this machine, or at addresses."""

    type: Literal["services"] = "services"
    trainer: str = ""
    """Address of a running `silva trainer`: http://HOST:PORT or unix:PATH; "": `silva rl` starts one."""
    inference: tuple[PartAddress, ...] = ()
    """Addresses of running `silva inference` servers; without any, `silva rl` starts them."""
    key_variable: str = "SILVA_API_KEY"
    """Environment variable (or line of .env) with the key of servers that other machines can reach."""

    @field_validator("trainer")
    @classmethod
    def _is_an_address(cls, trainer: str) -> str:
        return part_address(trainer) if trainer else ""

    @property
    def starts(self) -> bool:
        return not (self.trainer and self.inference)

    @property
    def key(self) -> str:
        return key_of(self.key_variable)

    def address_of(self, part: str) -> str:
        return self.trainer if part == "trainer" else next(iter(self.inference), "")

    def addressed(self) -> ServicesPlacementSettings:
        """With the addresses that `silva rl` gives the orchestrator, if it is one."""
        given = _given()
        return self.model_copy(update={**given, "inference": tuple(given.get("inference", self.inference))})

    def build(self, context: Assembly) -> Host:
        placed = self.addressed()
        if placed.starts:
            return self.local.build(context)
        from silva.placement.processes import Processes
        from silva.wire.transport import Peer

        servers = [Peer(url, name="inference", key=placed.key) for url in placed.inference]
        return Processes(placed, context, Peer(placed.trainer, name="trainer", key=placed.key), servers)


class RayPlacementSettings(PlacedSettings):
    """Trainer, inference and workers of environments as Ray actors, on a cluster that `silva rl` starts or
    that runs already."""

    clustered: ClassVar[bool] = True
    type: Literal["ray"] = "ray"
    address: str = ""
    """HOST:PORT of a cluster; auto: this machine's, or that of RAY_ADDRESS; "": `silva rl` starts one."""
    trainer_needs: Annotated[Mapping[str, Above0], Field(min_length=1)] = {"CPU": 1}
    """What Ray keeps for each rank of the trainer, by its names: { CPU = 4, GPU = 1, memory = 3e10 }."""
    server_needs: Annotated[Mapping[str, Above0], Field(min_length=1)] = {"CPU": 1}
    """The same for each inference server."""
    worker_needs: Annotated[Mapping[str, Above0], Field(min_length=1)] = {"CPU": 1}
    """The same for each worker of an environment (`workers`)."""
    env_vars: Mapping[str, str] = {}
    """Environment variables of the actors."""
    working_dir: str = ""
    """Folder that Ray copies to every node, in which the actors work; "": the folder of `silva rl`, which all
    nodes must have."""

    @field_validator("address")
    @classmethod
    def _is_a_cluster(cls, address: str) -> str:
        if address in ("", "auto") or re.fullmatch(r"[^\s/@]+:\d{1,5}", address):
            return address
        raise ValueError('expected "auto", HOST:PORT, or "" for a new cluster on this machine')

    @property
    def starts(self) -> bool:
        return not _given()

    def addressed(self) -> RayPlacementSettings:
        return self

    def needs(self, ranks: int = 1, workers: int = 0) -> dict[str, Mapping[str, float]]:
        """What each part needs, by its name, with so many ranks of the trainer and workers."""
        return {
            **{f"trainer{i or ''}": self.trainer_needs for i in range(ranks)},
            **{f"inference{i or ''}": self.server_needs for i in range(self.servers)},
            **{worker_name(i): self.worker_needs for i in range(workers)},
        }

    def build(self, context: Assembly) -> Host:
        if not (given := _given()):
            return self.local.build(context)
        from silva.placement.carrier import peer
        from silva.placement.processes import Processes
        from silva.placement.ray_cluster import join
        from silva.placement.ray_worker import RayWorker

        join(given["cluster"])
        servers = [peer(name, given["namespace"]) for name in self.needs(0)]
        worker = partial(RayWorker, self, given["room"])
        return Processes(self, context, peer("trainer", given["namespace"]), servers, worker)


def worker_name(number: int) -> str:
    return f"worker{number or ''}"


def _given() -> dict[str, Any]:
    """What `silva rl` tells its orchestrator."""
    found: dict[str, Any] = json.loads(os.environ.get(ADDRESSES) or "{}")
    return found
