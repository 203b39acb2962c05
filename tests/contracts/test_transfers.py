"""What every way for weights from a trainer to an engine does. A new one adds itself to `KINDS`."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tests.stored_models import load_weights
from tests.trainer.updates import train

from silva.errors import ModelError
from silva.models.loading import LoadedModel
from silva.models.snapshots import weight_folder
from silva.trainer.learner import Learner
from silva.trainer.local import LocalTrainer
from silva.trainer.settings import LocalTrainerSettings
from silva.trainer.transfer import WeightTransfer, transfer_of
from silva.types import Sample, Snapshot

pytestmark = pytest.mark.slow

Tiny = Callable[..., LoadedModel]
Weights = dict[str, torch.Tensor]
KINDS = ["shared", "folder", "parameters", "adapters", "memory"]


def weights(loaded: LoadedModel) -> Weights:
    return {name: p.detach().clone() for name, p in loaded.model.named_parameters()}


def equal(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class Ends:
    """A trainer, and at the other end the model of an engine, which began with other weights."""

    def __init__(self, kind: str, tiny: Tiny, folder: Path, rows: list[Sample]) -> None:
        lora, way = kind == "adapters", "shm" if kind == "memory" else "auto"
        self.kind = "parameters" if kind in ("adapters", "memory") else kind
        self.rows, self.policy = rows, tiny(lora=lora)
        self.transfer: WeightTransfer = transfer_of(self.kind, way, folder)
        self.trainer = LocalTrainer(Learner(self.policy, LocalTrainerSettings(), seed=0), self.transfer)
        self.engine = self.policy if kind == "shared" else tiny(lora=lora, seed=0 if lora else 5)

    def publish(self) -> Snapshot:
        train(self.trainer, self.rows)
        return asyncio.run(self.trainer.publish())

    def receive(self, snapshot: Snapshot) -> None:
        if snapshot.folder:
            load_weights(self.engine, snapshot.folder)


@pytest.fixture
def rows(make_samples: Callable[..., list[Sample]]) -> list[Sample]:
    return make_samples([9, 14])


@pytest.fixture(params=KINDS)
def ends(request: pytest.FixtureRequest, tiny: Tiny, tmp_path: Path, rows: list[Sample]) -> Iterator[Ends]:
    ends = Ends(request.param, tiny, tmp_path / "broadcast", rows)
    yield ends
    asyncio.run(ends.trainer.close())


def written(ends: Ends) -> Path:
    """The folder of the next version; skips a way without one."""
    snapshot = ends.publish()
    if snapshot.folder is None:
        pytest.skip("the engine reads the trainer's own parameters")
    return Path(snapshot.folder.path)


def test_what_arrives_is_what_was_published_to_the_bit_and_in_place(ends: Ends) -> None:
    places = [p.data_ptr() for p in ends.engine.model.parameters()]
    for version in (1, 2):
        snapshot = ends.publish()
        assert snapshot.version == ends.trainer.version == version
        assert (snapshot.folder is None) == (ends.kind == "shared")
        assert snapshot.folder is None or snapshot.folder == weight_folder(Path(snapshot.folder.path))
        ends.receive(snapshot)
        assert equal(weights(ends.engine), weights(ends.policy))
    assert [p.data_ptr() for p in ends.engine.model.parameters()] == places
    assert asyncio.run(ends.trainer.snapshot()) == snapshot
    assert ends.trainer.capabilities.publishes == ends.transfer.kind == ends.kind


def test_nothing_of_a_later_update_leaks_into_a_version(ends: Ends) -> None:
    path = written(ends)
    published, snapshot = weights(ends.policy), asyncio.run(ends.trainer.snapshot())
    train(ends.trainer, ends.rows)
    ends.receive(snapshot)
    assert equal(weights(ends.engine), published) and not equal(published, weights(ends.policy))
    ends.publish()
    ends.receive(snapshot)  # an engine that is late
    assert equal(weights(ends.engine), published)
    ends.publish()
    with pytest.raises(ModelError, match=str(path)):  # of which only the last two stay
        ends.receive(snapshot)


def cut(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])


def of_a_stranger(path: Path) -> None:
    """Other weights of the same shapes under the same name."""
    file = path / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-64] + bytes(64))


@pytest.mark.parametrize("damage", [cut, of_a_stranger, shutil.rmtree])
def test_what_was_not_published_is_refused_and_changes_nothing(
    ends: Ends, damage: Callable[[Path], None]
) -> None:
    path = written(ends)
    snapshot, before = asyncio.run(ends.trainer.snapshot()), weights(ends.engine)
    damage(path)
    with pytest.raises(ModelError, match=str(path)):
        ends.receive(snapshot)
    assert equal(weights(ends.engine), before)


def test_after_a_restart_or_a_load_the_snapshot_is_of_the_weights_of_then(ends: Ends, tmp_path: Path) -> None:
    first = ends.publish()
    kept = weights(ends.policy)
    asyncio.run(ends.trainer.save(tmp_path / "saved"))
    ends.publish()
    asyncio.run(ends.trainer.load(tmp_path / "saved"))
    again = asyncio.run(ends.trainer.snapshot())
    # The snapshot was written again, and its digest says that the bits are the same.
    assert again.version == ends.trainer.version == 1 and again == first
    ends.receive(again)
    assert equal(weights(ends.engine), kept)
    asyncio.run(ends.trainer.restart())
    train(ends.trainer, ends.rows)  # as a warm start does
    asyncio.run(ends.trainer.restart())
    other = asyncio.run(ends.trainer.snapshot())
    ends.receive(other)
    assert other.version == 0 and equal(weights(ends.engine), weights(ends.policy))
