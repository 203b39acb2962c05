"""A model as one GGUF file, which llama.cpp, Ollama, LM Studio and transformers read.

Names of tensors come from the package `gguf`. Llama's queries and keys are permuted: llama.cpp rotates
neighbours (0, 1), (2, 3), ... of a head, transformers halves (0, d/2), (1, d/2 + 1), ... Matrices are stored
as asked, vectors (norms, biases) always in float32. q8_0 stores blocks of 32 numbers as 8-bit integers times
one scale in float16: no number moves by more than 1/254 + 1/2048 of the largest of its block. As llama.cpp's
own converters write these families. Not here: tokenizers (gguf_tokenizer.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from silva.conversion.gguf_tokenizer import add_tokenizer
from silva.conversion.tensors import DTYPES, LazyTensor, Model, OnDone, cast
from silva.errors import ModelError, errors_about

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFWriter

Q8_0 = "q8_0"
FORMATS = (*DTYPES, Q8_0)
BLOCK = 32  # numbers with one scale in q8_0
FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""Names of llama.cpp by `model_type` of config.json."""


def write_gguf(model: Model, path: Path, form: str, on_tensor: OnDone) -> list[str]:
    """Write the new file `path`; one tensor is in memory at a time.

    Args:
        form: one of `FORMATS`.

    Returns:
        In words, what could not be stored in this form.

    Raises:
        ModelError: GGUF is not written for this family, its positions or its tokenizer; a tensor has no place
            in the family; or a number has none in `form`.
    """
    import gguf
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(model.folder, trust_remote_code=False)
    _refuse(model, config)
    arch = gguf.MODEL_ARCH[FAMILIES[config.model_type].upper()]
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    try:
        _add_numbers(writer, model, config, form)
        tokenizer = AutoTokenizer.from_pretrained(model.folder, trust_remote_code=False)
        with errors_about(model.name):
            add_tokenizer(writer, tokenizer, config.vocab_size)
        written = [(name, tensor, _form(tensor, form)) for name, tensor in _tensors(model, config, names)]
        for name, tensor, kind in written:
            nbytes = math.prod(tensor.shape) * (34 / BLOCK if kind == Q8_0 else DTYPES[kind].itemsize)
            type = gguf.GGMLQuantizationType[kind.upper()]
            writer.add_tensor_info(name, tensor.shape, _numpy(kind), int(nbytes), raw_dtype=type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for done, (name, tensor, kind) in enumerate(written, 1):
            writer.write_tensor_data(_stored(name, tensor.read(), kind))
            on_tensor(done, len(written))
    finally:
        writer.close()
    if wider := [
        name for name, tensor, kind in written if form == Q8_0 and kind != Q8_0 and len(tensor.shape) > 1
    ]:
        return [
            f"{len(wider)} matrices are f16, since their rows are no multiple of {BLOCK} numbers: {wider[0]}"
        ]
    return []


def _refuse(model: Model, config: Any) -> None:
    rotation = dict(getattr(config, "rope_parameters", None) or {})
    kind = rotation.get("rope_type", "default")
    wrong = (
        (
            config.model_type not in FAMILIES,
            f"a model of the family {config.model_type}",
            ", ".join(FAMILIES),
        ),
        (
            getattr(config, "hidden_act", "silu") != "silu",
            f"hidden_act = {config.to_dict().get('hidden_act')}",
            "silu",
        ),
        (
            kind not in ("default", "linear", "llama3"),
            f"positions of the kind {kind}",
            "default, linear or llama3",
        ),
        (bool(getattr(config, "use_sliding_window", False)), "sliding attention", "attention to all before"),
        (hasattr(config, "quantization_config"), "a quantised model", "the one that it was made from"),
    )
    for is_wrong, got, expected in wrong:
        if is_wrong:
            raise ModelError(f"{model.name}: config.json: got {got}; for GGUF expected {expected}")


def _add_numbers(writer: GGUFWriter, model: Model, config: Any, form: str) -> None:
    import gguf

    rotation, head = dict(config.rope_parameters), _head(config)
    kinds = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", Q8_0: "MOSTLY_Q8_0"}
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(model.name)
    writer.add_file_type(gguf.LlamaFileType[kinds[form]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(rotation["rope_theta"])
    if rotation.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rotation["factor"])


def _tensors(model: Model, config: Any, names: Any) -> Iterator[tuple[str, LazyTensor]]:
    """The weights under their names in GGUF, with queries and keys as llama.cpp rotates them."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.tensors.items():
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise ModelError(f"{model.name}: {name} is no tensor of the family {config.model_type}")
        layer = name.split(".")[-2]
        if config.model_type == "llama" and layer in heads:
            tensor = tensor._replace(read=partial(_permuted, tensor.read, heads[layer]))
        yield found, tensor
    if config.rope_parameters.get("rope_type") == "llama3":
        factors = _llama3(config)
        yield "rope_freqs.weight", LazyTensor(tuple(factors.shape), factors.dtype, lambda: factors)


def _permuted(read: Any, heads: int) -> torch.Tensor:
    weight = read()
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def _llama3(config: Any) -> torch.Tensor:
    """[head / 2] by how much Llama 3.1 slows each frequency, as transformers computes it."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    plain = config.rope_parameters["rope_theta"] ** -(
        torch.arange(0, _head(config), 2).float() / _head(config)
    )
    slowed, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    return plain / slowed


def _head(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _form(tensor: LazyTensor, form: str) -> str:
    if len(tensor.shape) == 1:
        return "f32"
    return "f16" if form == Q8_0 and tensor.shape[-1] % BLOCK else form


def _numpy(form: str) -> np.dtype[Any]:
    """Anything but uint8, which would mean that shapes count bytes."""
    import numpy as np

    return np.dtype(np.float16 if form == "f16" else np.float32)


def _stored(name: str, tensor: torch.Tensor, form: str) -> np.ndarray[Any, Any]:
    """The bytes of a tensor in a form."""
    import gguf

    if form in DTYPES:
        made = cast(name, tensor, DTYPES[form]).contiguous()
        array: np.ndarray[Any, Any] = made.view(torch.uint8).numpy()
        return array
    return gguf.quants.quantize(tensor.float().contiguous().numpy(), gguf.GGMLQuantizationType.Q8_0)
