"""A trainer whose snapshots are folders, for engines that do not share its memory.

    publish ──> folder/version_7   written under another name, named with its digest, renamed ──> Engine.load
                folder/version_6   stays: an engine that is late, or starts again, may still read it

Everything else is handed on to the trainer inside.
"""

from __future__ import annotations

import asyncio
import dataclasses
from concurrent.futures import Executor
from pathlib import Path
from typing import Literal

from silva.models.loading import LoadedModel
from silva.models.snapshots import save_parameters, weight_folder
from silva.ports import FILES
from silva.protocols import Trainer
from silva.storage.checkpoints import disk_faults
from silva.types import Snapshot
from silva.wrapped import WrappedTrainer

KEPT = 2  # versions
Kind = Literal["folder", "parameters"]


class BroadcastTrainer(WrappedTrainer):
    """Writes what it publishes.

    Args:
        inner: the trainer, which changes the weights of `loaded` on `compute`.
        folder: where versions are written; what an earlier run left there is removed.
        kind: what a version holds, as in `TrainerCapabilities.publishes`.
    """

    def __init__(
        self, inner: Trainer, loaded: LoadedModel, compute: Executor, folder: Path, kind: Kind
    ) -> None:
        super().__init__(inner)
        self._loaded, self._compute = loaded, compute
        self._folder, self._kind = folder.absolute(), kind
        self._last: Snapshot | None = None
        self._paths: list[Path] = []  # in the order they were written: a load goes back to an earlier version
        self.capabilities = dataclasses.replace(inner.capabilities, publishes=kind)
        FILES.remove_tree(self._folder)

    async def publish(self) -> Snapshot:
        return await self._written(await self.inner.publish())

    async def snapshot(self) -> Snapshot:
        if self._last is None:
            return await self._written(await self.inner.snapshot())
        return self._last

    async def restart(self) -> None:
        self._last = None  # a warm start changes weights and no version
        await self.inner.restart()

    async def load(self, path: Path) -> None:
        self._last = None
        await self.inner.load(path)

    async def _written(self, snapshot: Snapshot) -> Snapshot:
        advice = "Checkpoints are untouched; free some space on the disk, then --resume."
        with disk_faults(f"cannot write version {snapshot.version} in {self._folder}", advice):
            return await self._write(snapshot)

    async def _write(self, snapshot: Snapshot) -> Snapshot:
        path = self._folder / f"version_{snapshot.version}"
        temporary = path.with_name(f".{path.name}.tmp")
        await asyncio.to_thread(FILES.remove_tree, temporary)
        if self._kind == "folder":
            await self.inner.export(temporary)
        else:
            await asyncio.wrap_future(self._compute.submit(save_parameters, self._loaded, temporary))
        found = await asyncio.to_thread(weight_folder, temporary)
        await asyncio.to_thread(FILES.remove_tree, path)
        FILES.rename(temporary, path)
        self._last = dataclasses.replace(snapshot, folder=dataclasses.replace(found, path=str(path)))
        self._paths = [*(each for each in self._paths if each != path), path]
        while len(self._paths) > KEPT:
            await asyncio.to_thread(FILES.remove_tree, self._paths.pop(0))
        return self._last
