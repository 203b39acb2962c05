"""Models whose weights each rank reads and writes a part of: they are those of one process, to the bit.

The last test runs this file again in processes that divide a model; the others run in those.
"""

from __future__ import annotations

import ctypes
import gc
import json
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.tuners.lora import Linear as LoraLinear
from safetensors.torch import load_file, save_file
from tests.contracts.rank import PARALLEL, divided, starts_ranks
from tests.forked_ranks import Starter
from tests.stored_models import MODELS, SIZES, load_weights, settings_of, write_model
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from silva.config.sections import CriticSettings, PretrainedModel
from silva.errors import CheckpointError, ModelError, SilvaError
from silva.models.loading import load_model
from silva.models.pieces import local, whole_of
from silva.models.snapshots import BASE, base_of, weight_folder
from silva.models.weight_files import INDEX
from silva.trainer import streamed
from silva.trainer.learner import Learner
from silva.trainer.settings import LocalTrainerSettings, Parallel
from silva.trainer.sharding.parallel import Mesh
from silva.trainer.sharding.ranks import mesh_of
from silva.trainer.transfer import WeightFolders

SETTINGS = LocalTrainerSettings(critic=CriticSettings(trunk="own"))
M_MMAP_THRESHOLD = -3  # of glibc's mallopt


@pytest.fixture
def mesh() -> Mesh:
    return mesh_of(PARALLEL, "cpu")


@pytest.fixture
def model(folder: Path, mesh: Mesh) -> Callable[[str], PretrainedModel]:
    """The settings of a model in a folder."""

    def made(kind: str) -> PretrainedModel:
        if mesh.rank == 0:
            write_model(MODELS[kind][0](), folder / kind)
        mesh.gather("written")
        return settings_of(folder / kind, kind)

    return made


def learner(settings: PretrainedModel, mesh: Mesh | None = None, **keys: Any) -> Learner:
    loaded = load_model(settings, seed=3, stored=mesh is not None)
    return Learner(loaded, SETTINGS, seed=0, reference=True, mesh=mesh, **keys)


@pytest.fixture
def many_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each rank."""
    monkeypatch.setattr(streamed, "LEAST", 1)


def same(ours: Any, alone: Any) -> None:
    """Divided tensors and whole ones, by name."""
    assert ours.keys() == alone.keys() or (PARALLEL.pp > 1 and ours.keys() < alone.keys())
    for name, expected in alone.items():
        found = whole_of(ours[name].detach()) if name in ours else expected
        assert found.dtype == expected.dtype and torch.equal(found, expected), name


@divided
def test_ranks_that_meet_again_take_no_more_threads() -> None:
    """As a trainer does with each run that opens it; the threads of a group stay."""

    def threads() -> int:
        mesh_of(Parallel(cp=2), "cpu")
        return len([*Path("/proc/self/task").iterdir()])

    assert threads() == threads()


@divided
@pytest.mark.parametrize("kind", MODELS)
def test_parts_that_ranks_read_are_those_of_one_process(
    model: Callable[[str], PretrainedModel], mesh: Mesh, kind: str
) -> None:
    """Of the policy, its masters, its reference and a critic that begins as the policy."""
    settings = model(kind)
    critic = PARALLEL.pp == 1
    ours, alone = learner(settings, mesh, critic=critic), learner(settings, critic=critic)
    same(ours.stepper.masters, alone.stepper.masters)
    rounded = {
        n: p.to(alone.loaded.model.get_parameter(n).dtype) for n, p in ours.loaded.model.named_parameters()
    }
    same(rounded, dict(alone.loaded.model.named_parameters()))
    assert ours._reference.parameters and alone._reference.parameters
    if ours.critic and alone.critic:
        same(ours.critic.stepper.masters, alone.critic.stepper.masters)
    same(ours._reference.parameters, alone._reference.parameters)
    named = {BASE: json.dumps(base_of(alone.loaded))}
    assert streamed.base(ours.loaded, mesh) == (named if mesh.rank == 0 else {})
    held = sum(local(p).numel() for p in ours.loaded.model.parameters())
    every = sum(p.numel() for p in alone.loaded.model.parameters())
    assert held < 0.8 * every  # stages are not equal, and norms are whole with tp


@divided
@pytest.mark.usefixtures("many_files")
@pytest.mark.parametrize("kind", MODELS)
def test_folders_that_ranks_write_are_that_of_one_process(
    model: Callable[[str], PretrainedModel],
    mesh: Mesh,
    folder: Path,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings, held = model(kind), list[int]()
    save = streamed._save

    def counted(file: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
        held.append(sum(each.nbytes for each in tensors.values()))
        save(file, tensors, metadata)

    monkeypatch.setattr(streamed, "_save", counted)
    ours = learner(settings, mesh)
    for each in (ours, alone := learner(settings)):
        perturb(each)
    ours.export(folder / "ours")
    files = sorted((folder / "ours").glob("*.safetensors"))
    assert len(files) >= mesh.size
    total, largest = (
        sum(file.stat().st_size for file in files),
        max(streamed_share.size for streamed_share in streamed.plain_weights(ours.loaded, mesh)),
    )
    assert max(held) <= total / mesh.size + largest and len(held) == len(files[mesh.rank :: mesh.size])
    if mesh.rank == 0:  # transformers writes on no other rank
        alone.export(folder / "alone")
        one, other = (AutoModelForCausalLM.from_pretrained(folder / name) for name in ("ours", "alone"))
        same(dict(one.named_parameters()), dict(other.named_parameters()))
        names = {name for file in files for name in load_file(file)}
        assert names == load_file(folder / "alone" / "model.safetensors").keys()
        for name in ("config.json", "generation_config.json"):
            assert (folder / "ours" / name).read_text() == (folder / "alone" / name).read_text()
        assert AutoTokenizer.from_pretrained(folder / "ours")("hi").input_ids
        assert {file.stat().st_mode for file in files} == {(folder / "ours" / INDEX).stat().st_mode}


@torch.no_grad()
def perturb(each: Learner) -> None:
    """As training would: every parameter that it changes, in the whole and in parts alike."""
    for parameter in each.stepper.masters.values():
        local(parameter).mul_(1.25).add_(0.03)
    each.stepper.round()


@divided
@pytest.mark.usefixtures("many_files")
@pytest.mark.parametrize("kind", ["untied", "lora"])
def test_published_parameters_are_loaded_by_an_engine(
    model: Callable[[str], PretrainedModel], mesh: Mesh, folder: Path, kind: str
) -> None:
    settings = model(kind)
    ours, alone = learner(settings, mesh), learner(settings)
    for each in (ours, alone):
        perturb(each)
    snapshot = WeightFolders(folder / "versions", "parameters", mesh.rank == 0).publish(ours)
    assert snapshot.folder == weight_folder(folder / "versions" / "version_0")
    engine = load_model(settings, seed=9)  # adapters that were drawn otherwise
    load_weights(engine, snapshot.folder)
    same(dict(engine.model.named_parameters()), dict(alone.loaded.model.named_parameters()))


@divided
def test_an_export_that_is_not_the_policy_is_not_kept(
    model: Callable[[str], PretrainedModel], mesh: Mesh, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = learner(model("lora"), mesh)
    perturb(ours)
    monkeypatch.setattr(LoraLinear, "get_delta_weight", lambda layer, adapter: torch.zeros(()))
    with pytest.raises(ModelError, match=r"not written, because .* gives other logits than the policy"):
        ours.export(folder / "wrong")
    mesh.gather("tried")
    assert not (folder / "wrong").exists()


@divided
def test_a_model_that_an_export_reads_again_is_not_kept(
    model: Callable[[str], PretrainedModel], folder: Path, mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or each publish would leave one, until Python happens to look for rings."""
    made = list[Any]()

    def load(*given: Any, **keys: Any) -> Any:
        loaded = load_model(*given, **keys)
        made.append(weakref.ref(loaded.model))
        return loaded

    monkeypatch.setattr("silva.trainer.export.load_model", load)
    ours = learner(model("tied"), mesh)
    gc.disable()
    try:
        ours.export(folder / "out")
    finally:
        gc.enable()
    assert [each() for each in made] == [None]


@divided
def test_what_cannot_be_read_is_one_error_on_all_ranks(
    model: Callable[[str], PretrainedModel], mesh: Mesh, folder: Path
) -> None:
    """Also if only one of them reads it: the last row of the last layer's last weight."""
    settings = model("untied")
    name = "model.layers.2.mlp.down_proj.weight"
    if mesh.rank == 0:
        file = next(f for f in (folder / "untied").glob("*.safetensors") if name in load_file(f))
        tensors = load_file(file)
        tensors[name][-1, -1] = float("nan")
        save_file(tensors, file, metadata={"format": "pt"})
    mesh.gather("damaged")
    with pytest.raises(ModelError, match=rf"weights hold NaN or infinity: {name} in .*safetensors") as caught:
        learner(settings, mesh)
    texts = {text.partition("model.name")[2] for text in mesh.gather(str(caught.value))}
    assert len(texts) == 1


@divided
@pytest.mark.usefixtures("many_files")
def test_what_cannot_be_written_is_one_error_on_all_ranks(
    model: Callable[[str], PretrainedModel], mesh: Mesh, folder: Path
) -> None:
    ours = learner(model("untied"), mesh)
    files = streamed.file_names(mesh.size)
    if mesh.rank == 0:  # the place of one rank's file is taken
        for count in range(mesh.size, 3 * mesh.size):
            (folder / "out" / streamed.file_names(count)[mesh.size - 1]).mkdir(parents=True)
        (folder / "file").touch()
    mesh.gather("taken")
    with pytest.raises(CheckpointError, match=rf"{files[-1][:11]}.*cannot be written"):
        ours.save_parameters(folder / "out")
    with pytest.raises((SilvaError, OSError), match="file"):
        ours.export(folder / "file" / "out")


@contextmanager
def peak_of_own_memory() -> Iterator[list[int]]:
    """Bytes that a process takes more than at the beginning, beside what it maps of files; seen often."""
    found, going = [0], threading.Event()

    def own() -> int:
        text = Path("/proc/self/status").read_text()
        return 1024 * int(text.partition("RssAnon:")[2].split()[0])

    def look() -> None:
        while not going.wait(0.002):
            found[0] = max(found[0], own() - before)

    # What is freed goes back to the system, so that memory that is taken can be seen.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
    before, looking = own(), threading.Thread(target=look)
    looking.start()
    try:
        yield found
    finally:
        going.set()
        looking.join()


@divided
def test_memory_of_a_rank_is_that_of_its_part(folder: Path, mesh: Mesh) -> None:
    """Of 200 MB in float32, loaded and exported; and of a whole one in bfloat16."""
    sizes = SIZES | {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 14, "head_dim": 128}
    if mesh.rank == 0:
        write_model(LlamaConfig(**sizes), folder / "large")
    mesh.gather("written")
    settings = PretrainedModel(name=str(folder / "large"))
    with peak_of_own_memory() as loading:
        loaded = mesh.divide(load_model(settings, seed=0, stored=True))
    size = sum(4 * p.numel() for p in loaded.model.parameters())
    with peak_of_own_memory() as exporting:
        ours = streamed.plain_weights(loaded, mesh)
        streamed.write(folder / "out", ours, mesh, {"format": "pt"})
    with peak_of_own_memory() as whole_model:
        kept = load_model(settings.model_copy(update={"dtype": "bfloat16"}), seed=0)
    assert kept.stored is None and size > 180e6
    shares = [round(p[0] / size, 2) for p in (loading, exporting, whole_model)]
    print(f"MEMORY {mesh.rank}: {size / 1e6:.0f} MB, {shares}")
    assert whole_model[0] > 0.45 * size  # in half of the bytes: what is measured can be seen
    assert loading[0] < 0.8 * size and exporting[0] < 0.8 * size  # a half, and what a pass gathers of layers


@pytest.mark.slow
@starts_ranks
@pytest.mark.parametrize(
    ("size", "parallel", "tests"),
    [
        (2, {}, "ranks or published or kept"),
        (4, {"dp_replicate": 2}, "(parts or folders) and experts_lora"),
        (2, {"pp": 2}, "(parts or folders or published) and not experts"),
        (4, {"tp": 2}, "(parts or folders) and (tied or lora) and not experts"),
        (4, {"cp": 2}, "(parts or folders) and narrow_lora"),
        (4, {"ep": 2}, "(parts or folders) and experts"),
        (2, {}, "memory_of"),
    ],
    ids=["dp2", "hsdp2x2", "pp2", "dp2tp2", "dp2cp2", "dp4ep2", "memory"],
)
def test_processes_that_divide_a_model(
    starter: Starter, tmp_path: Path, size: int, parallel: dict[str, int], tests: str
) -> None:
    starter.check(size, parallel, __file__, tests, tmp_path)
