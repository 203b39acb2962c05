"""How published weights reach engines: as the trainer's own parameters, as folders on a disk or in memory, or
sent into the engine's memory (broadcast.py).

    publish ──> folder/version_7   written under another name, named with its digest, renamed ──> Engine.load
                folder/version_6   stays: an engine that is late, or starts again, may still read it

The other end is `Engine.load`, which receives folders with `models.snapshots.read_weights`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from silva.errors import CapabilityError
from silva.models.snapshots import weight_folder
from silva.ports import FILES
from silva.protocols import Publishes
from silva.scratch import MEMORY, private_folder
from silva.storage.checkpoints import disk_faults
from silva.trainer.settings import Way
from silva.types import Snapshot

if TYPE_CHECKING:
    from silva.trainer.learner import Learner
    from silva.wire.transport import Peer

KEPT = 2  # versions
Kind = Literal["folder", "parameters", "adapter"]


class WeightTransfer(Protocol):
    @property
    def kind(self) -> Publishes: ...
    def publish(self, learner: Learner) -> Snapshot: ...  # on every rank; the weights as they are now
    def close(self) -> None: ...  # of nothing that engines may still read


def transfer_of(
    publishes: Publishes,
    way: Way,
    folder: Path,
    *,
    servers: Sequence[Peer] = (),
    patience: float = 300.0,
    timeout: float = 600.0,
    first: bool = True,
) -> WeightTransfer:
    """For an engine that loads such snapshots.

    Args:
        way: `trainer.transfer`.
        folder: where versions may be written.
        first: of the ranks that publish together.
        servers, patience, timeout: of `Broadcast`.

    Raises:
        CapabilityError: this machine has no such way.
    """
    if publishes == "shared":
        return SharedWeights()
    if publishes == "sent":
        from silva.trainer.broadcast import Broadcast

        return Broadcast(servers, patience=patience, timeout=timeout)
    assert publishes != "sampler"  # of a service, which brings it there itself
    return SharedMemory(publishes) if way == "shm" else WeightFolders(folder, publishes, first)


class SharedWeights:
    """The engine reads the learner's own parameters."""

    kind: Literal["shared"] = "shared"

    def publish(self, learner: Learner) -> Snapshot:
        return Snapshot(learner.version)

    def close(self) -> None:
        """There is nothing to remove."""


class WeightFolders:
    """One folder a version. The first rank removes what an earlier run left in `folder`."""

    advice = "Checkpoints are untouched; free some space on the disk, then --resume."

    def __init__(self, folder: Path, kind: Kind, first: bool = True) -> None:
        self.kind, self.folder = kind, folder.absolute()
        self._paths: list[Path] = []  # in the order they were written: a load goes back to an earlier version
        if first:
            FILES.remove_tree(self.folder)

    def publish(self, learner: Learner) -> Snapshot:
        with disk_faults(f"cannot write version {learner.version} in {self.folder}", self.advice):
            path = self.folder / f"version_{learner.version}"
            temporary, first = path.with_name(f".{path.name}.tmp"), learner.mesh.rank == 0
            if first:
                FILES.remove_tree(temporary)
            self._write(learner, temporary)
            snapshot = Snapshot(learner.version)
            with learner.mesh.agreed():
                if first:
                    snapshot = self._renamed(temporary, path, learner.version)
            return learner.mesh.gather(snapshot)[0]

    def close(self) -> None:
        """They are files of the run."""

    def _write(self, learner: Learner, path: Path) -> None:
        ways = {"adapter": learner.save_adapter, "folder": learner.export}
        ways.get(self.kind, learner.save_parameters)(path)

    def _renamed(self, temporary: Path, path: Path, version: int) -> Snapshot:
        folder = weight_folder(temporary)
        FILES.remove_tree(path)
        FILES.rename(temporary, path)
        self._paths = [*(each for each in self._paths if each != path), path]
        while len(self._paths) > KEPT:
            FILES.remove_tree(self._paths.pop(0))
        return Snapshot(version, replace(folder, path=str(path), adapter=self.kind == "adapter"))


class SharedMemory(WeightFolders):
    """Folders of files that are memory, which engines on this machine map. They end with this process,
    however it ends."""

    advice = (
        f"Checkpoints are untouched; give {MEMORY} more room (docker run --shm-size), or set "
        'trainer.transfer = "folder", then --resume.'
    )

    def __init__(self, kind: Kind) -> None:
        if not MEMORY.is_dir():
            raise CapabilityError(
                f'trainer.transfer = "shm": this machine has no {MEMORY}; expected "folder"'
            )
        super().__init__(MEMORY / f"silva-weights-of-{os.getpid()}", kind)
        self._held = ExitStack()
        self._made = False

    def publish(self, learner: Learner) -> Snapshot:
        if not self._made:
            with disk_faults(f"cannot write in {MEMORY}", self.advice):
                self._make(learner)
        return super().publish(learner)

    def _make(self, learner: Learner) -> None:
        """The folder of the first rank becomes that of all."""
        mesh = learner.mesh
        with mesh.agreed():
            if int(os.environ.get("LOCAL_WORLD_SIZE", mesh.size)) != mesh.size:
                raise CapabilityError(
                    'trainer.transfer = "shm": the ranks of this trainer are on several machines; expected '
                    '"folder"'
                )
            if mesh.rank == 0:
                self.folder = self._held.enter_context(private_folder("weights", parent=MEMORY))
        self.folder, self._made = Path(mesh.gather(str(self.folder))[0]), True

    def close(self) -> None:
        self._held.close()
        self._made = False
