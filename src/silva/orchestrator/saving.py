"""A checkpoint of a run: what trainer, loop and parts need to go on, and its place in the ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from silva.orchestrator.state import RunState
from silva.protocols import Trainer
from silva.storage.checkpoints import CheckpointStore, Writer
from silva.storage.ledger import Ledger


async def save_checkpoint(
    store: CheckpointStore, ledger: Ledger, trainer: Trainer, state: RunState, others: Mapping[str, Writer]
) -> None:
    """Written in a thread, so that the loop's parts stay alive. `others`: files beside state and trainer."""
    loop = asyncio.get_running_loop()

    def of_trainer(path: Path) -> None:
        asyncio.run_coroutine_threadsafe(trainer.save(path), loop).result()

    files: dict[str, Writer] = {"trainer": of_trainer, "state.json": state.encode(), **others}
    await asyncio.to_thread(store.save, state.step, files, {"ledger": state.ledger})
    ledger.record("checkpoint", step=state.step, position=state.ledger)
    ledger.commit()
