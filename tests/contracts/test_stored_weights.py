"""Models whose weights each rank reads and writes a part of: they are those of one process, to the bit.

The last tests run this file again in processes that divide a model, where every rank makes all calls.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from peft.tuners.lora import Linear as LoraLinear
from safetensors.torch import load_file, save_file
from tests import moe
from tests.forked_ranks import Starter, TestedRanks, starting
from tests.test_families import TAKEN, saved
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedConfig, Qwen3Config

from silva.config.sections import CriticSettings, Lora, PretrainedModel
from silva.errors import CapabilityError, CheckpointError, ModelError, SilvaError
from silva.models.adapters import plain_name
from silva.models.loading import load_model
from silva.models.pieces import Box, Pieces, local, whole_of
from silva.models.snapshots import BASE, base_of, load_weights, weight_folder
from silva.models.stored import whole
from silva.models.tiny import tiny_tokenizer
from silva.models.weight_files import INDEX
from silva.trainer import streamed
from silva.trainer.learner import Learner
from silva.trainer.settings import LocalTrainerSettings, Parallel
from silva.trainer.sharding.parallel import Mesh
from silva.trainer.sharding.ranks import mesh_of
from silva.trainer.transfer import WeightFolders

SIZES: dict[str, Any] = {
    "vocab_size": 263, "hidden_size": 32, "intermediate_size": 72, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 257, "initializer_range": 0.2,
}  # fmt: skip
SETTINGS = LocalTrainerSettings(critic=CriticSettings(trunk="own"))
LORA = Lora(rank=2, alpha=6.0)
EXPERTS = Lora(rank=2, alpha=6.0, targets=("q_proj", "gate_proj", "up_proj"))
MODELS: dict[str, tuple[Callable[[], PreTrainedConfig], dict[str, Any]]] = {
    "untied": (lambda: Qwen3Config(**SIZES), {}),
    "tied": (lambda: LlamaConfig(**SIZES, tie_word_embeddings=True), {"dtype": "bfloat16"}),
    "lora": (lambda: LlamaConfig(**SIZES, tie_word_embeddings=True), {"lora": LORA}),
    "narrow_lora": (lambda: Qwen3Config(**SIZES), {"dtype": "bfloat16", "lora": LORA}),
    "experts": (lambda: moe.config("qwen3_moe"), {"dtype": "bfloat16"}),
    "experts_lora": (lambda: moe.config("mixtral"), {"lora": EXPERTS}),
}
DENSE = [name for name in MODELS if "experts" not in name]
M_MMAP_THRESHOLD = -3  # of glibc's mallopt
WORLD = int(os.environ.get("WORLD_SIZE", "0"))
"""Of the processes that run this file together."""
PARALLEL = Parallel(**json.loads(os.environ.get("SILVA_TEST_PARALLEL", "{}")))
divided = pytest.mark.skipif(not WORLD, reason="runs in processes that the last tests start")


@pytest.fixture(scope="session", autouse=True)
def group() -> Iterator[None]:
    if WORLD:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    yield
    if WORLD:
        dist.destroy_process_group()


@pytest.fixture
def mesh() -> Mesh:
    return mesh_of(PARALLEL, "cpu")


@pytest.fixture
def folder(tmp_path: Path, mesh: Mesh) -> Path:
    """One for all processes."""
    return Path(mesh.gather(str(tmp_path))[0])


def write_model(config: PreTrainedConfig, path: Path) -> None:
    """Into two files; not by `save_pretrained`, which writes on the first rank alone."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    head = set() if config.tie_word_embeddings is False else {"lm_head.weight"}
    tensors = {n: x.contiguous() for n, x in original(model).items() if n not in head}
    path.mkdir()
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    model.config.architectures = [type(model).__name__]
    (path / "config.json").write_text(model.config.to_json_string())
    model.generation_config.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)


def original(model: Any) -> dict[str, torch.Tensor]:
    """In the names of files, which of experts are others."""
    return streamed.revert_weight_conversion(model, model.state_dict())  # type: ignore[attr-defined, no-any-return]


def settings_of(path: Path, kind: str) -> PretrainedModel:
    return PretrainedModel(name=str(path), **MODELS[kind][1])


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


def same(ours: Any, alone: Any) -> None:
    """Divided tensors and whole ones, by name."""
    assert ours.keys() == alone.keys() or (PARALLEL.pp > 1 and ours.keys() < alone.keys())
    for name, expected in alone.items():
        found = whole_of(ours[name].detach()) if name in ours else expected
        assert found.dtype == expected.dtype and torch.equal(found, expected), name


# --- one process


FAMILIES = ("gemma3_text", "granite", "phi3", "gpt2", "opt")
OTHERS = [config for config in TAKEN if config.model_type in FAMILIES]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*MODELS, *OTHERS], ids=lambda kind: getattr(kind, "model_type", kind))
def test_every_part_of_a_parameter_is_what_transformers_loads(
    tmp_path: Path, kind: str | PreTrainedConfig
) -> None:
    if isinstance(kind, str):
        write_model(MODELS[kind][0](), tmp_path / "m")
        settings = settings_of(tmp_path / "m", kind)
    else:
        settings = saved(kind, tmp_path / "m").model_copy(update={"dtype": "bfloat16"})
    expected, found = load_model(settings, seed=3), load_model(settings, seed=3, stored=True)
    assert found.stored and found.model.config.to_dict() == expected.model.config.to_dict()
    assert found.model.generation_config.to_dict() == expected.model.generation_config.to_dict()
    of_all = dict(expected.model.named_parameters())
    assert {n: p.requires_grad for n, p in found.model.named_parameters()} == {
        n: p.requires_grad for n, p in of_all.items()
    }
    for name, parameter in found.model.named_parameters():
        wanted = of_all[name]
        if "lora_" in name:
            assert torch.equal(parameter, wanted)
            continue
        assert parameter.is_meta and parameter.dtype == wanted.dtype
        boxes = [whole(wanted), *(half(wanted, dim) for dim in range(wanted.dim()))]
        for box in boxes:
            part = found.stored.read(plain_name(name), box).to(wanted.dtype)
            assert torch.equal(part, wanted[box.within(whole(wanted))]), (name, box)
    of_all = dict(expected.model.named_buffers())
    for name, buffer in found.model.named_buffers():
        assert buffer.dtype == of_all[name].dtype and torch.equal(buffer, of_all[name])


def half(tensor: torch.Tensor, dim: int) -> Box:
    """The second one."""
    offset, shape = [0] * tensor.dim(), [*tensor.shape]
    offset[dim] = shape[dim] // 2
    shape[dim] -= offset[dim]
    return Box(tuple(offset), tuple(shape))


def test_only_the_experts_of_a_part_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(MODELS["experts"][0](), tmp_path / "m")
    found = load_model(settings_of(tmp_path / "m", "experts"), seed=0, stored=True)
    read, names = Pieces.read, list[str]()

    def spied(self: Pieces, name: str, wanted: Box) -> torch.Tensor:
        names.append(name)
        return read(self, name, wanted)

    monkeypatch.setattr(Pieces, "read", spied)
    at = "model.layers.1.mlp.experts"
    parameter = found.model.get_parameter(f"{at}.gate_up_proj")
    assert found.stored and found.stored.read(f"{at}.gate_up_proj", half(parameter, 0)).shape[0] == 2
    assert sorted(names) == [f"{at}.{n}.{part}_proj.weight" for n in (2, 3) for part in ("gate", "up")]


@pytest.mark.parametrize("equal", [True, False])
def test_a_head_in_the_files_of_a_tied_model_is_tied_if_it_is_equal(tmp_path: Path, equal: bool) -> None:
    """As transformers does it."""
    path = tmp_path / "tied"
    write_model(MODELS["tied"][0](), path)
    embeddings = {**load_file(path / "model-00001-of-00002.safetensors"),
                  **load_file(path / "model-00002-of-00002.safetensors")}  # fmt: skip
    head = embeddings["model.embed_tokens.weight"] * (1 if equal else 2)
    for file in path.glob("model*"):
        file.unlink()
    save_file({**embeddings, "lm_head.weight": head.clone()}, path / "model.safetensors")
    expected, found = (load_model(PretrainedModel(name=str(path)), seed=0, stored=s) for s in (False, True))
    for loaded in (expected, found):
        tied = loaded.model.get_output_embeddings().weight is loaded.model.get_input_embeddings().weight
        assert tied is equal


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda t: t.pop("model.norm.weight"), r"the weights do not fit config\.json \(missing: model\.norm"),
        (lambda t: t.update({"model.norm.weight": torch.ones(7)}), r"norm\.weight is \[7\], expected \[32\]"),
    ],
    ids=["missing", "shape"],
)  # fmt: skip
def test_weights_that_do_not_fit_are_refused_before_one_is_read(
    tmp_path: Path, damage: Callable[[dict[str, torch.Tensor]], Any], words: str
) -> None:
    write_model(MODELS["untied"][0](), tmp_path / "m")
    file = next(f for f in (tmp_path / "m").glob("*.safetensors") if "model.norm.weight" in load_file(f))
    tensors = load_file(file)
    damage(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    texts = []
    for stored in (False, True):
        with pytest.raises(ModelError, match=words) as caught:
            load_model(PretrainedModel(name=str(tmp_path / "m")), seed=0, stored=stored)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda file: os.truncate(file, 1000), r"model-00002-of-00002\.safetensors is damaged"),
        (lambda file: file.unlink(), r"could not be loaded .*model-00002-of-00002"),
    ],
    ids=["truncated", "gone"],
)
def test_files_that_are_damaged_are_named(tmp_path: Path, damage: Callable[[Path], Any], words: str) -> None:
    write_model(MODELS["untied"][0](), tmp_path / "m")
    damage(tmp_path / "m" / "model-00002-of-00002.safetensors")
    with pytest.raises(ModelError, match=words):
        load_model(PretrainedModel(name=str(tmp_path / "m")), seed=0, stored=True)


def test_one_process_has_nothing_to_offload() -> None:
    settings = LocalTrainerSettings(parallel=Parallel(offload=True))
    with pytest.raises(
        CapabilityError, match=r"trainer\.parallel\.offload = true: got a trainer of one process"
    ):
        settings.build(cast(Any, None))


# --- ranks


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
@pytest.mark.parametrize("kind", MODELS)
def test_folders_that_ranks_write_are_that_of_one_process(
    model: Callable[[str], PretrainedModel],
    mesh: Mesh,
    folder: Path,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings, held = model(kind), list[int]()
    monkeypatch.setattr(streamed, "LEAST", 1)  # a file for each rank
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
@pytest.mark.parametrize("kind", ["untied", "lora"])
def test_published_parameters_are_loaded_by_an_engine(
    model: Callable[[str], PretrainedModel],
    mesh: Mesh,
    folder: Path,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streamed, "LEAST", 1)
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
def test_what_cannot_be_written_is_one_error_on_all_ranks(
    model: Callable[[str], PretrainedModel], mesh: Mesh, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streamed, "LEAST", 1)
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


@pytest.fixture(scope="module")
def starter() -> Iterator[Starter]:
    with starting() as found:
        yield found


@pytest.mark.slow
@pytest.mark.skipif(WORLD > 0, reason="runs in the processes that it starts")
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
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    told = {"SILVA_TEST_PARALLEL": json.dumps(parallel)}
    ends = starter.make(TestedRanks(size, port, __file__, tests, str(tmp_path), told))
    assert len(ends) == size
    for status, said in ends:
        assert status == 0 and " passed" in said and " skipped" not in said, said[-4000:]
