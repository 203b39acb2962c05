"""How published weights reach engines: in shared memory, or as folders.

    publish ──> folder/version_7   written under another name, named with its digest, renamed ──> Engine.load
                folder/version_6   stays: an engine that is late, or starts again, may still read it

The other end is `Engine.load`, which receives folders with `models.snapshots.load_weights`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from silva.models.snapshots import weight_folder
from silva.ports import FILES
from silva.storage.checkpoints import disk_faults
from silva.types import Snapshot, WeightFolder

if TYPE_CHECKING:
    from silva.trainer.learner import Learner

KEPT = 2  # versions
Kind = Literal["folder", "parameters"]


class WeightTransfer(Protocol):
    @property
    def kind(self) -> Literal["shared", "folder", "parameters"]: ...  # as TrainerCapabilities.publishes
    def publish(self, learner: Learner) -> Snapshot: ...  # on every rank; the weights as they are now


def transfer_to(loads: frozenset[str], folder: Path) -> WeightTransfer:
    """For an engine that loads these kinds of snapshots; `folder`: where versions may be written."""
    if "shared" in loads:
        return SharedWeights()
    return WeightFolders(folder, "parameters" if "parameters" in loads else "folder")


class SharedWeights:
    """The engine reads the learner's own parameters."""

    kind: Literal["shared"] = "shared"

    def publish(self, learner: Learner) -> Snapshot:
        return Snapshot(learner.version)


class WeightFolders:
    """One folder a version. What an earlier run left in `folder` is removed."""

    def __init__(self, folder: Path, kind: Kind) -> None:
        self.kind, self.folder = kind, folder.absolute()
        self._paths: list[Path] = []  # in the order they were written: a load goes back to an earlier version
        FILES.remove_tree(self.folder)

    def publish(self, learner: Learner) -> Snapshot:
        advice = "Checkpoints are untouched; free some space on the disk, then --resume."
        with disk_faults(f"cannot write version {learner.version} in {self.folder}", advice):
            path = self.folder / f"version_{learner.version}"
            temporary, first = path.with_name(f".{path.name}.tmp"), learner.mesh.rank == 0
            if first:
                FILES.remove_tree(temporary)
            (learner.export if self.kind == "folder" else learner.save_parameters)(temporary)
            snapshot = Snapshot(learner.version)
            with learner.mesh.agreed():
                if first:
                    snapshot = self._renamed(temporary, path, learner.version)
            return learner.mesh.gather(snapshot)[0]

    def _renamed(self, temporary: Path, path: Path, version: int) -> Snapshot:
        digest = weight_folder(temporary).digest
        FILES.remove_tree(path)
        FILES.rename(temporary, path)
        self._paths = [*(each for each in self._paths if each != path), path]
        while len(self._paths) > KEPT:
            FILES.remove_tree(self._paths.pop(0))
        return Snapshot(version, WeightFolder(str(path), digest))
