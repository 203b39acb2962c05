"""Parts in other processes: nothing computes here, and no model is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from silva.engines.remote.engine import HttpEngine
from silva.engines.remote.settings import PlacedClientSettings
from silva.engines.remote.wire import SilvaDialect
from silva.environments.process.channel import WorkerProcess
from silva.errors import CapabilityError
from silva.trainer.remote import Open, RemoteTrainer, plain_config
from silva.trainer.settings import published

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from silva.assembly import Assembly
    from silva.placement.settings import PlacedSettings
    from silva.protocols import Engine, Trainer, WorkerChannel, WorkerSpec
    from silva.wire.transport import Peer

NARROW_TOLERANCE = 0.1
"""By which servers on different machines may differ in 16 bits, see `ClientSettings.probe_tolerance`."""


class Processes:
    """Implements `protocols.Host`.

    Args:
        trainer, inference: where the parts are.
        worker: starts a worker of environments.
    """

    holds_model = False

    def __init__(
        self,
        settings: PlacedSettings,
        context: Assembly,
        trainer: Peer,
        inference: Sequence[Peer],
        worker: Callable[[WorkerSpec], WorkerChannel] = WorkerProcess,
    ) -> None:
        self._settings, self._context = settings, context
        self._trainer, self._inference = trainer, inference
        self.worker = worker

    def engine(self) -> Engine:
        """The client of the servers, which are Silva's own, or what `[engine]` launches."""
        placed, context = self._settings, self._context
        engine: Any = context.config.engine
        if engine.launched:
            return engine.client(self._inference, context)  # type: ignore[no-any-return]
        client = PlacedClientSettings(
            context=engine.context, patience=placed.patience, timeout=placed.timeout
        )
        if context.config.model.dtype == "bfloat16":
            client = client.model_copy(update={"probe_tolerance": NARROW_TOLERANCE})
        dialect = SilvaDialect(owner=str(context.run_layout.path))
        return HttpEngine(self._inference, client, dialect, say=context.say)

    def trainer(self, *, recipe: bool = False) -> Trainer:
        context, config = self._context, self._context.config
        loads, lora = context.engine.capabilities.loads, config.model.lora is not None
        publishes = published(config.trainer.transfer, loads, lora)
        if publishes == "sent" and config.placement.clustered:
            raise CapabilityError(
                f'trainer.transfer = "nccl": placement.type = "{config.placement.type}" has no addresses of '
                'servers; expected "services", or "folder"'
            )
        asked = Open(
            config=plain_config(config.model_dump(mode="json")),
            recipe=recipe,
            folder=str(context.run_layout.path),
            publishes=publishes,
            servers=tuple(peer.address for peer in self._inference) if publishes == "sent" else (),
        )
        limits = {"patience": self._settings.patience, "timeout": self._settings.timeout}
        return RemoteTrainer(self._trainer, asked, **limits, say=context.say)
