"""Parts in other processes: nothing computes here, and no model is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from silva.engines.remote.engine import HttpEngine
from silva.engines.remote.settings import PlacedClientSettings
from silva.engines.remote.wire import SilvaDialect
from silva.trainer.remote import Open, RemoteTrainer, plain_config
from silva.wire.transport import Peer

if TYPE_CHECKING:
    from silva.assembly import Assembly
    from silva.placement.settings import ServicesPlacementSettings
    from silva.protocols import Engine, Trainer

NARROW_TOLERANCE = 0.1
"""By which servers on different machines may differ in 16 bits, see `ClientSettings.probe_tolerance`."""


class Processes:
    """Implements `protocols.Host`. `settings` hold all addresses."""

    holds_model = False

    def __init__(self, settings: ServicesPlacementSettings, context: Assembly) -> None:
        self._settings, self._context = settings, context

    def engine(self) -> Engine:
        """The client of the servers, which are Silva's own, or what `[engine]` launches."""
        placed, context = self._settings, self._context
        engine: Any = context.config.engine
        peers = [Peer(url, name="inference", key=placed.key) for url in placed.inference]
        if engine.launched:
            return engine.client(peers, context)  # type: ignore[no-any-return]
        client = PlacedClientSettings(
            context=engine.context, patience=placed.patience, timeout=placed.timeout
        )
        if context.config.model.dtype == "bfloat16":
            client = client.model_copy(update={"probe_tolerance": NARROW_TOLERANCE})
        return HttpEngine(peers, client, SilvaDialect(owner=str(context.run_layout.path)), say=context.say)

    def trainer(self, *, recipe: bool = False) -> Trainer:
        placed, context = self._settings, self._context
        asked = Open(
            config=plain_config(context.config.model_dump(mode="json")),
            recipe=recipe,
            folder=str(context.run_layout.path),
            publishes="parameters" if "parameters" in context.engine.capabilities.loads else "folder",
        )
        peer = Peer(placed.trainer, name="trainer", key=placed.key)
        limits = {"patience": placed.patience, "timeout": placed.timeout}
        return RemoteTrainer(peer, asked, **limits, say=context.say)
