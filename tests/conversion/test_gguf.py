"""GGUF files compute what the folder computes: read by transformers, and run by llama.cpp."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.conversion.made import FAMILIES, TEMPLATE, TEXT, folder, gap, logprobs, quiet
from transformers import AutoModelForCausalLM, AutoTokenizer

from silva.conversion.models import convert_model
from silva.errors import ModelError
from silva.models.loading import LoadedModel

END = "<|im_end|>"
LLAMA_CPP = 1e-5  # nats, of all tokens of the vocabulary
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def converted(source: Path | str, path: Path, form: str) -> Path:
    return convert_model(str(source), "gguf", path, form, overwrite=False, on_tensor=quiet).path


def by_hand(weight: torch.Tensor) -> torch.Tensor:
    """q8_0 by its definition: blocks of 32, a scale in float16, integers from -127 to 127."""
    blocks = weight.numpy().reshape(-1, 32)
    scale = np.abs(blocks).max(1, keepdims=True) / np.float32(127)
    whole = np.sign(blocks / scale) * np.floor(np.abs(blocks / scale) + np.float32(0.5))
    return torch.from_numpy((whole * scale.astype(np.float16).astype(np.float32)).reshape(weight.shape))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_the_same_model(family: str, tmp_path: Path) -> None:
    source = folder(tmp_path / "model", family)
    expected = AutoModelForCausalLM.from_pretrained(source)
    tokens = AutoTokenizer.from_pretrained(source)(TEXT)["input_ids"]
    file = converted(source, tmp_path / "m.gguf", "f32")
    found = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    assert tokenizer(TEXT)["input_ids"] == tokens
    assert (tokenizer.chat_template, tokenizer.eos_token) == (TEMPLATE, END)
    if family != "llama3":  # whose positions transformers does not read from GGUF; llama.cpp does, below
        assert gap(found, expected, tokens) <= 1e-5


@pytest.mark.slow
def test_every_form_rounds_as_it_says(tmp_path: Path) -> None:
    source = folder(tmp_path / "model", "qwen2")
    expected = AutoModelForCausalLM.from_pretrained(source)
    tokens = AutoTokenizer.from_pretrained(source)(TEXT)["input_ids"]
    weights = {name: each.clone() for name, each in expected.state_dict().items()}
    rounded = {"f16": lambda x: x.half().float(), "bf16": lambda x: x.bfloat16().float(), "q8_0": by_hand}
    for form, rounds in rounded.items():
        file = converted(source, tmp_path / f"{form}.gguf", form)
        found = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
        expected.load_state_dict({n: rounds(x) if x.ndim > 1 else x for n, x in weights.items()})
        assert gap(found, expected, tokens) <= 1e-5
        assert gap(found, AutoModelForCausalLM.from_pretrained(source), tokens) > 1e-3  # it does round
    for name, each in found.state_dict().items():
        if each.ndim > 1:
            blocks = weights[name].reshape(-1, 32)
            most = blocks.abs().amax(1, keepdim=True) * (1 / 254 + 1 / 2048)
            assert bool(((each.reshape(-1, 32) - blocks).abs() <= most).all())


def test_rows_that_are_no_multiple_of_32_stay_f16_and_it_is_said(tmp_path: Path) -> None:
    source = folder(tmp_path / "model", "llama", intermediate_size=72)
    made = convert_model(str(source), "gguf", tmp_path / "m.gguf", "q8_0", overwrite=False, on_tensor=quiet)
    assert made.notes == [
        "2 matrices are f16, since their rows are no multiple of 32 numbers: blk.0.ffn_down.weight"
    ]


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("llama", {"model_type": "mistral"}, "a model of the family mistral; for GGUF expected llama, qwen2"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act = gelu; for GGUF expected silu"),
        ("qwen2", {"use_sliding_window": True}, "sliding attention"),
        (
            "qwen2",
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}},
            "the kind yarn",
        ),
    ],
)
def test_what_would_compute_something_else_is_refused(
    family: str, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    source = folder(tmp_path / "model", family)
    file = source / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ModelError, match="config.json: got .*" + said):
        converted(source, tmp_path / "m.gguf", "f32")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_text_that_llama_cpp_would_cut_otherwise_is_refused(tmp_path: Path) -> None:
    source = folder(tmp_path / "model", "llama")
    file = source / "tokenizer.json"
    content = json.loads(file.read_text())
    content["pre_tokenizer"]["pretokenizers"][0]["individual_digits"] = False
    file.write_text(json.dumps(content))
    with pytest.raises(ModelError, match=r"splits text by Digits \(False\), ByteLevel \(True\); for GGUF"):
        converted(source, tmp_path / "m.gguf", "f32")


def test_a_number_that_f16_cannot_hold_is_refused_by_name(tmp_path: Path) -> None:
    source = folder(tmp_path / "model", "llama")
    model = AutoModelForCausalLM.from_pretrained(source)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = 1e5
    model.save_pretrained(source)
    with pytest.raises(
        ModelError, match=r"blk.1.ffn_up.weight: got numbers up to 1e\+05, and f16 ends at 65504"
    ):
        converted(source, tmp_path / "m.gguf", "f16")


# --- llama.cpp


def server(path: Path) -> Any:
    xllamacpp = pytest.importorskip("xllamacpp", reason="runs llama.cpp: pip install xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.warmup = str(path), 512, 1, False
    params.cpuparams.n_threads, params.verbosity = 1, -1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    return xllamacpp.Server(params)


def next_logprobs(running: Any, prompt: list[int] | str, vocabulary: int, forced: int) -> torch.Tensor:
    """[V] of llama.cpp. What it then says is fixed, since it reports nothing at half a character."""
    answer = running.handle_completions(
        {"prompt": prompt, "n_predict": 1, "n_probs": vocabulary, "logit_bias": [[forced, 1000.0]]}
    )
    found = torch.full((vocabulary,), float("nan"), dtype=torch.float64)
    for each in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
        found[each["id"]] = each["logprob"]
    return found.log_softmax(-1)  # again, since llama.cpp sums 49,152 probabilities in float32: off by 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_llama_cpp_computes_the_same(family: str, tmp_path: Path) -> None:
    source = folder(tmp_path / "model", family)
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokens = tokenizer(TEXT + END)["input_ids"]
    expected = logprobs(AutoModelForCausalLM.from_pretrained(source), tokens)
    running = server(converted(source, tmp_path / "m.gguf", "f32"))
    forced = tokenizer.convert_tokens_to_ids("a")
    for length in (1, 2, 9, len(tokens)):
        found = next_logprobs(running, tokens[:length], expected.shape[1], forced)
        assert float((found - expected[length - 1]).abs().max()) <= LLAMA_CPP
    by_text = next_logprobs(running, TEXT + END, expected.shape[1], forced)  # llama.cpp's own tokens
    assert float((by_text - expected[-1]).abs().max()) <= LLAMA_CPP


def test_smollm2_in_llama_cpp(smollm2: LoadedModel, tmp_path: Path) -> None:
    """The packaged model: a dialogue by its own template, in float32 and in q8_0."""
    messages = [{"role": "user", "content": "Name 3 trees that grew in 1984."}]
    text: str = smollm2.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    text += "Oak, birch and"
    tokens = smollm2.tokenizer(text)["input_ids"]
    expected = logprobs(smollm2.model, tokens)[-1]
    forced = smollm2.tokenizer.convert_tokens_to_ids("a")
    for form in ("f32", "q8_0"):
        running = server(converted("SmolLM2-135M-Instruct", tmp_path / f"{form}.gguf", form))
        found = next_logprobs(running, text, len(expected), forced)
        if form == "f32":
            assert float((found - expected).abs().max()) <= 1e-4
        else:  # llama.cpp rounds activations too
            assert 0 < float((expected.exp() * (expected - found)).sum()) <= 0.01
