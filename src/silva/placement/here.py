"""Everything in this process: one thread computes, for the engine and the trainer alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from silva.environments.process.channel import WorkerProcess
from silva.trainer.settings import published
from silva.trainer.transfer import transfer_of

if TYPE_CHECKING:
    from silva.assembly import Assembly
    from silva.protocols import Engine, Trainer, WorkerChannel, WorkerSpec


class Here:
    """Implements `protocols.Host`: the parts are objects."""

    def __init__(self, context: Assembly) -> None:
        self._context = context

    @property
    def holds_model(self) -> bool:
        """Not if both of its parts are clients of a service."""
        config = self._context.config
        return not (config.engine.remote and config.trainer.remote)

    def engine(self) -> Engine:
        engine: Engine = self._context.config.engine.build(self._context)
        return engine

    def trainer(self, *, recipe: bool = False) -> Trainer:
        """If the engine cannot read the trainer's own parameters, its snapshots are folders of the run.

        Those of a trainer that is at a service never leave it.
        """
        context, config = self._context, self._context.config
        if config.trainer.remote:
            served: Trainer = config.trainer.build(context, config.algorithm if recipe else None)
            return served
        loads, way, lora = context.engine.capabilities.loads, config.trainer.transfer, config.model.lora
        publishes, folder = published(way, loads, lora is not None), context.run_layout.broadcast
        engine: Any = context.engine
        reached = engine.reached() if publishes == "sent" else {}
        transfer = transfer_of(publishes, way, folder, **reached)
        algorithm = config.algorithm if recipe else None
        trainer: Trainer = config.trainer.build(context, algorithm, transfer=transfer)
        return trainer

    def worker(self, spec: WorkerSpec) -> WorkerChannel:
        return WorkerProcess(spec)
