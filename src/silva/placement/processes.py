"""Parts in other processes: nothing computes here, and no model is loaded."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from silva.engines.remote.engine import HttpEngine
from silva.engines.remote.settings import PlacedClientSettings
from silva.engines.remote.wire import dialect_of
from silva.errors import CapabilityError
from silva.trainer.remote import Open, RemoteTrainer, plain_config
from silva.wire.requests import key_of
from silva.wire.transport import Peer

if TYPE_CHECKING:
    from silva.algorithms.settings import Algorithm
    from silva.placement.settings import ServicesPlacementSettings
    from silva.protocols import Context, Engine, Trainer

NARROW_TOLERANCE = 0.1
"""By which servers on different machines may differ in 16 bits, see `ClientSettings.probe_tolerance`."""
P = ParamSpec("P")
T = TypeVar("T")


class ServicesPlacement:
    """Implements `protocols.Placement`. `settings` hold all addresses."""

    device = "cpu"
    holds_model = False

    def __init__(self, settings: ServicesPlacementSettings) -> None:
        self._settings = settings
        self._key = key_of(settings.key_variable)

    @property
    def compute(self) -> Executor:
        raise CapabilityError('placement.type = "services": nothing computes in this process')

    def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        raise CapabilityError('placement.type = "services": nothing computes in this process')

    def engine(self, context: Context) -> Engine:
        """The client of the servers, which are Silva's own, or what `[engine]` says they are."""
        settings: Any = context.config.engine
        peers = [Peer(url, name="inference", key=self._key) for url in self._settings.inference]
        if settings.type == "vllm":
            return settings.client(peers, context)  # type: ignore[no-any-return]
        narrow = context.config.model.dtype in ("bfloat16", "float16")
        client = PlacedClientSettings(
            context=settings.context,
            patience=self._settings.patience,
            timeout=self._settings.timeout,
            probe_tolerance=NARROW_TOLERANCE if narrow else PlacedClientSettings().probe_tolerance,
        )
        dialect = dialect_of("silva", owner=self._folder(context))
        return HttpEngine(peers, client, dialect, say=context.say)

    def trainer(self, context: Context, algorithm: Algorithm | None = None) -> Trainer:
        loads, config = context.engine.capabilities.loads, context.config
        asked = Open(
            config=plain_config(config.model_dump(mode="json")),
            recipe=algorithm is not None,
            folder=self._folder(context),
            publishes="parameters" if "parameters" in loads else "folder",
        )
        peer = Peer(self._settings.trainer, name="trainer", key=self._key)
        return RemoteTrainer(peer, asked, patience=self._settings.patience, say=context.say)

    def _folder(self, context: Context) -> str:
        return str((Path(context.config.output_dir) / context.config.name).absolute())

    def close(self, *, wait: bool = True) -> None:
        """Connections end with their event loop."""
