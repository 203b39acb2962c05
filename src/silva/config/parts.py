"""What settings say of a part before it is built; commands read this, and never the name of its type."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar

from pydantic import Field

from silva.config.requests import PaidService
from silva.config.sections import NotNegative, Section
from silva.wire.requests import Prices, key_of


class EngineSettings(Section):
    """What an engine says of itself.

    Another one has `build(context)`, which makes an `Engine`. One that is launched has `command`, what
    `silva inference` runs (`routes`: it records which experts tokens go to; `lora`: the adapters, if any;
    `sent`: the trainer sends weights to it), and `client(peers, context)`, the engine that asks such servers;
    one that only evaluates has `max_concurrent` and `actor(context, sampling)` instead, which makes an
    `Actor` with `reach`, `close`, `counts` and `notes`.
    """

    remote: ClassVar[bool] = False
    """Whether its model is on servers: where it is built nothing computes and no weights are loaded."""
    launched: ClassVar[bool] = False
    """Whether `silva inference` becomes a program of somebody else's, which listens at a port."""
    shares: ClassVar[bool] = False
    """Whether runs of several seeds can share it, each with adapters of its own (engines/one_adapter.py)."""
    only_evaluates: ClassVar[str] = ""
    """Why its model cannot be trained; "" if it can be."""


class TrainerSettings(Section):
    """What a trainer says of itself.

    Another one has `optimizer`, `updates_per_step`, and `build(context, algorithm, *, transfer)`, which makes
    a `Trainer`; one that is not `remote` has `transfer`, how weights reach the engine.
    """

    remote: ClassVar[bool] = False
    """Whether the weights are at a service, which brings them to its own engine."""
    shares: ClassVar[bool] = False
    """Whether those of several seeds can share a base model: they have a `learner` (trainer/joined.py)."""


class TinkerService(PaidService):
    """Where the Tinker service is, and who asks it; wire/tinker.py asks."""

    url: Annotated[str, Field(pattern=r"^(https?://.+)?$")] = ""
    """Address of the service; "" is TINKER_BASE_URL, or else the service of Thinking Machines."""
    key_variable: str = "TINKER_API_KEY"
    """Environment variable (or line of .env) that holds the key."""
    model: str = ""
    """The service's name of the model; "" is `model.name`, from which its tokenizer is loaded."""
    weights: Annotated[str, Field(pattern=r"^(tinker://.+)?$")] = ""
    """Where an evaluation or the training of a run begins, such as tinker://RUN/weights/NAME; "" is the model
    as it is."""

    train_price: NotNegative = 0.0
    """For a million tokens of a gradient."""

    @property
    def key(self) -> str:
        """Raises ConfigError if it is not set."""
        return key_of(self.key_variable, "engine.key_variable")

    @property
    def prices(self) -> Prices:
        return replace(super().prices, trained=self.train_price)


class PlacementSettings(Section):
    """What a placement says of itself.

    Another one has the keys of `local`, and `build(context)`, which makes a `Host`.
    """

    processes: ClassVar[bool] = False
    """Whether trainer and engine are in processes of their own."""
    clustered: ClassVar[bool] = False
    """Whether a cluster starts these processes, and not `silva rl`."""

    @property
    def starts(self) -> bool:
        """Whether there is a part that `silva rl` starts itself."""
        return False

    @property
    def local(self) -> PlacementSettings:
        """Of each of its processes; of commands that have no services, such as `silva eval`."""
        return self

    @property
    def key(self) -> str:
        """Which servers ask for; "" if there is none."""
        return key_of("SILVA_API_KEY")

    def address_of(self, part: str) -> str:
        """Where the trainer or the (first) inference server listens; "" if that is not said."""
        return ""
