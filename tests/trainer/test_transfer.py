"""Snapshots as folders: whole or not there, few, and exactly the trainer's weights."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tests.stored_models import load_weights
from tests.trainer.updates import REINFORCE

from silva import scratch
from silva.engines.local.engine import LocalEngine
from silva.engines.settings import LocalEngineSettings
from silva.errors import CapabilityError, CheckpointError
from silva.models.loading import LoadedModel
from silva.models.snapshots import weight_folder
from silva.ports import FaultyFiles, Files, use_files
from silva.protocols import Trainer
from silva.trainer.learner import Learner
from silva.trainer.local import LocalTrainer
from silva.trainer.settings import LocalTrainerSettings, Way, published
from silva.trainer.transfer import Kind, SharedMemory, WeightFolders
from silva.types import Completion, OptimParams, Sample, SamplingParams, Snapshot

Tiny = Callable[..., LoadedModel]
Rows = Callable[..., list[Sample]]
Make = Callable[..., LocalTrainer]


@pytest.fixture
def compute() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as thread:
        yield thread


@pytest.fixture
def make(compute: ThreadPoolExecutor, tmp_path: Path) -> Make:
    def make(loaded: LoadedModel, kind: Kind = "parameters") -> LocalTrainer:
        learner = Learner(loaded, LocalTrainerSettings(), seed=0)
        transfer = WeightFolders(tmp_path / "run" / "broadcast", kind)
        return LocalTrainer(learner, transfer, compute=compute)

    return make


def update(trainer: Trainer, rows: list[Sample]) -> dict[str, float]:
    async def run() -> dict[str, float]:
        metrics = await trainer.forward_backward(rows, REINFORCE)
        return {**metrics, **await trainer.optim_step(OptimParams(lr=1e-2))}

    return asyncio.run(run())


def publish(trainer: LocalTrainer) -> Path:
    """The folder of the next version."""
    snapshot = asyncio.run(trainer.publish())
    assert snapshot.folder is not None
    return Path(snapshot.folder.path)


def folder_of(trainer: LocalTrainer) -> Path:
    assert isinstance(trainer._transfer, WeightFolders)
    return trainer._transfer.folder


def written(trainer: LocalTrainer) -> list[str]:
    return sorted(path.name for path in folder_of(trainer).iterdir())


def answers(loaded: LoadedModel, compute: ThreadPoolExecutor, snapshot: Snapshot) -> list[Completion]:
    """What an engine over `loaded` samples once it has loaded the snapshot."""
    settings = LocalEngineSettings(max_concurrent=4, cached_sequences=4, context=64)
    prompts = [list(range(40, 40 + length)) for length in (3, 9, 17)]

    async def ask() -> list[Completion]:
        engine = LocalEngine(loaded, settings, compute)
        await engine.load(snapshot)
        params = [SamplingParams(max_tokens=12, temperature=0.9, seed=7 + i) for i in range(len(prompts))]
        return await asyncio.gather(*map(engine.sample, prompts, params))

    return asyncio.run(ask())


def test_only_the_last_two_versions_stay(make: Make, tiny: Tiny) -> None:
    trainer = make(tiny())
    found = []
    for _ in range(12):
        publish(trainer)
        found.append(written(trainer))
    assert found[0] == ["version_1"]
    assert found[1:] == [sorted([f"version_{n - 1}", f"version_{n}"]) for n in range(2, 13)]


def test_an_earlier_runs_versions_are_removed(make: Make, tiny: Tiny) -> None:
    first = make(tiny())
    publish(first)
    (folder_of(first) / ".version_2.tmp").mkdir()
    second = make(tiny(seed=1))
    assert not folder_of(second).exists()
    publish(second)
    assert written(second) == ["version_1"]


def test_what_a_broken_publish_left_is_no_part_of_the_next(make: Make, tiny: Tiny) -> None:
    trainer = make(tiny())
    left = folder_of(trainer) / ".version_1.tmp" / "model-00002-of-00002.safetensors"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half of a file")
    assert not (publish(trainer) / left.name).exists() and written(trainer) == ["version_1"]


class Killed(BaseException):
    """Stands for the end of the process."""


class Dying(Files):
    """The process ends before it renames for the `at`-th time."""

    def __init__(self, at: int) -> None:
        self.left = at

    def rename(self, source: Path, target: Path) -> None:
        self.left -= 1
        if not self.left:
            raise Killed
        super().rename(source, target)


def test_a_crash_before_the_rename_leaves_the_version_before_whole(
    make: Make, tiny: Tiny, make_samples: Rows
) -> None:
    trainer = make(tiny())
    first = asyncio.run(trainer.publish())
    update(trainer, make_samples([9, 5]))
    with use_files(Dying(1)), pytest.raises(Killed):
        asyncio.run(trainer.publish())
    assert first.folder is not None and weight_folder(Path(first.folder.path)) == first.folder
    assert not (folder_of(trainer) / "version_2").exists()  # under its name it is whole or not there
    load_weights(tiny(seed=5), first.folder)


def test_a_disk_that_fails_leaves_the_version_before_and_the_next_try_is_whole(
    make: Make, tiny: Tiny
) -> None:
    trainer = make(tiny())
    first = asyncio.run(trainer.publish())
    with use_files(FaultyFiles(1)) as disk, pytest.raises(OSError, match="No space left"):
        asyncio.run(trainer.publish())
    assert disk.fired == 1
    assert first.folder is not None and weight_folder(Path(first.folder.path)) == first.folder
    snapshot = asyncio.run(trainer.publish())
    assert snapshot.version == 3 and snapshot.folder == weight_folder(folder_of(trainer) / "version_3")
    assert {"version_1", "version_3"} < {*written(trainer)}


def test_the_snapshot_is_written_once(make: Make, tiny: Tiny) -> None:
    trainer = make(tiny())
    first = asyncio.run(trainer.snapshot())
    assert first.version == 0 and written(trainer) == ["version_0"]
    before = (folder_of(trainer) / "version_0").stat().st_mtime_ns
    assert asyncio.run(trainer.snapshot()) is first
    assert (folder_of(trainer) / "version_0").stat().st_mtime_ns == before


def test_of_lora_only_the_adapters_are_written(make: Make, tiny: Tiny) -> None:
    loaded = tiny(lora=True)
    file = publish(make(loaded)) / "model.safetensors"
    tensors = load_file(file)
    trained = {name: p for name, p in loaded.model.named_parameters() if p.requires_grad}
    assert tensors.keys() == trained.keys() and all(".lora_" in name for name in tensors)
    size = sum(p.numel() * p.element_size() for p in trained.values())
    whole = sum(p.numel() * p.element_size() for p in loaded.model.parameters())
    assert size < file.stat().st_size < size + 8192 < whole


@pytest.mark.slow
@pytest.mark.same_bits
@pytest.mark.parametrize("lora", [False, True])
def test_an_engine_that_loads_it_samples_the_trainers_own_bits(
    make: Make, tiny: Tiny, make_samples: Rows, compute: ThreadPoolExecutor, lora: bool
) -> None:
    loaded, elsewhere = tiny(lora=lora), tiny(lora=lora)
    trainer = make(loaded)
    before = answers(elsewhere, compute, Snapshot(0))
    for _ in range(3):
        update(trainer, make_samples([14, 9, 30]))
    snapshot = asyncio.run(trainer.publish())
    shared = answers(loaded, compute, dataclasses.replace(snapshot, folder=None))
    found = answers(elsewhere, compute, snapshot)
    for one, other in zip(found, shared, strict=True):
        assert one.tokens == other.tokens and one.versions == other.versions == (1,) * len(one.tokens)
        for name in ("logprobs", "raw_logprobs", "entropies"):
            ours, theirs = (np.array(getattr(each, name)).view(np.int64) for each in (one, other))
            assert np.array_equal(ours, theirs), name
    assert [one.raw_logprobs for one in found] != [one.raw_logprobs for one in before]


def in_memory(loaded: LoadedModel) -> LocalTrainer:
    return LocalTrainer(Learner(loaded, LocalTrainerSettings(), seed=0), SharedMemory("parameters"))


def test_weights_in_shared_memory_are_private_and_gone_with_the_trainer(tiny: Tiny) -> None:
    trainer = in_memory(tiny())
    path = publish(trainer)
    assert path.parent.parent == scratch.MEMORY and path.parent.stat().st_mode & 0o777 == 0o700
    assert scratch.holds_weights(path) and not scratch.holds_weights(path.parent.parent)
    asyncio.run(trainer.close())
    assert not path.parent.exists()


@pytest.mark.skipif(os.getuid() != 0, reason="mounts a file system")
def test_shared_memory_that_is_full_is_one_error_and_the_version_before_stays(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container, which has 64 MiB; here room for one version and a half."""
    loaded = tiny()
    size = sum(parameter.nbytes for parameter in loaded.model.parameters())
    mount = ["mount", "-t", "tmpfs", "-o", f"size={int(1.5 * size)}", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, stderr=subprocess.DEVNULL).returncode:
        pytest.skip("may not mount")
    try:
        monkeypatch.setattr("silva.trainer.transfer.MEMORY", tmp_path)
        trainer = in_memory(loaded)
        first = asyncio.run(trainer.publish())
        with pytest.raises(CheckpointError, match=rf"version 2 in {tmp_path}.*No space left") as raised:
            asyncio.run(trainer.publish())
        assert 'set trainer.transfer = "folder", then --resume' in str(raised.value)
        assert first.folder is not None and weight_folder(Path(first.folder.path)) == first.folder
        asyncio.run(trainer.close())
        assert not list(tmp_path.iterdir())
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


ALL = frozenset({"shared", "folder", "parameters"})


@pytest.mark.parametrize(
    ("way", "loads", "lora", "kind"),
    [
        ("auto", ALL, False, "shared"),
        ("shared", ALL, True, "shared"),
        ("auto", ALL - {"shared"}, True, "parameters"),
        ("folder", frozenset({"folder", "adapter"}), False, "folder"),
        ("auto", frozenset({"folder", "adapter"}), True, "adapter"),
        ("auto", frozenset({"folder"}), True, "folder"),
        ("nccl", frozenset({"folder", "sent"}), False, "sent"),
        ("auto", frozenset({"folder", "sent"}), False, "folder"),
    ],
)
def test_what_is_published_is_what_the_engine_loads_best(
    way: Way, loads: frozenset[str], lora: bool, kind: str
) -> None:
    assert published(way, loads, lora) == kind


@pytest.mark.parametrize(
    ("way", "loads", "lora", "words"),
    [
        ("shm", ALL, False, "the engine is in the trainer's process"),
        ("folder", ALL, False, "the engine is in the trainer's process"),
        ("shared", ALL - {"shared"}, False, "the engine is in another process"),
        ("nccl", ALL - {"shared"}, False, "expected servers of vLLM"),
        ("nccl", frozenset({"sent", "adapter"}), True, "vLLM takes adapters as files"),
    ],
)
def test_a_way_that_does_not_lead_to_the_engine_is_refused(
    way: Way, loads: frozenset[str], lora: bool, words: str
) -> None:
    with pytest.raises(CapabilityError, match=f'trainer.transfer = "{way}": {words}'):
        published(way, loads, lora)


def test_adapters_are_what_peft_loads(make: Make, tiny: Tiny, make_samples: Rows, tmp_path: Path) -> None:
    loaded = tiny(lora=True)
    trainer = make(loaded, "adapter")
    update(trainer, make_samples([9, 14]))
    snapshot = asyncio.run(trainer.publish())
    assert snapshot.folder is not None and snapshot.folder.adapter
    peft = PeftModel.from_pretrained(tiny().model, snapshot.folder.path)
    tokens = torch.tensor([[*range(40, 60)]])
    with torch.no_grad():
        found, expected = peft(tokens).logits, loaded.model(tokens).logits
        plain = tiny().model(tokens).logits
    assert torch.equal(found, expected) and not torch.allclose(found, plain, atol=1e-4)
