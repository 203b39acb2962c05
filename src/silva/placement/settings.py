"""Settings of the placements."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import field_validator

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
    threads: Natural = 0
    """Threads for torch; 0 takes all cores."""

    def build(self, context: Assembly) -> Host:
        from silva.placement.here import Here

        return Here(context)


class ServicesPlacementSettings(PlacementSettings):
    """Trainer and inference in processes of their own, which `silva rl` starts and watches."""

    processes: ClassVar[bool] = True
    type: Literal["services"] = "services"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Of each process."""
    threads: Natural = 0
    """Threads for torch in each process; 0 takes all cores."""
    trainer: str = ""
    """Address of a running `silva trainer`: http://HOST:PORT or unix:PATH; "": `silva rl` starts one."""
    inference: tuple[PartAddress, ...] = ()
    """Addresses of running `silva inference` servers; without any, `silva rl` starts them."""
    servers: Positive = 1
    """How many inference servers `silva rl` starts."""
    key_variable: str = "SILVA_API_KEY"
    """Environment variable (or line of .env) with the key of servers that other machines can reach."""
    patience: Above0 = 300.0
    """Seconds to wait for a part that does not answer, at the start or after it was lost."""
    timeout: Above0 = 600.0
    """Seconds that an inference server may take to load weights, or that it, or the trainer, may compute
    nothing while it is asked for something. A request may wait for its turn, and be computed, for as long as
    that takes."""

    @field_validator("trainer")
    @classmethod
    def _is_an_address(cls, trainer: str) -> str:
        return part_address(trainer) if trainer else ""

    @property
    def starts(self) -> bool:
        return not (self.trainer and self.inference)

    @property
    def local(self) -> LocalPlacementSettings:
        return LocalPlacementSettings(device=self.device, threads=self.threads)

    @property
    def key(self) -> str:
        return key_of(self.key_variable)

    def address_of(self, part: str) -> str:
        return self.trainer if part == "trainer" else next(iter(self.inference), "")

    def addressed(self) -> ServicesPlacementSettings:
        """With the addresses that `silva rl` gives the orchestrator, if it is one."""
        given = json.loads(os.environ.get(ADDRESSES) or "{}")
        return self.model_copy(update={**given, "inference": tuple(given.get("inference", self.inference))})

    def build(self, context: Assembly) -> Host:
        placed = self.addressed()
        if placed.starts:
            return self.local.build(context)
        from silva.placement.processes import Processes

        return Processes(placed, context)
