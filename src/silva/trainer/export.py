"""A plain Hugging Face folder of the current weights, with LoRA merged into a copy."""

from __future__ import annotations

import gc
from pathlib import Path

import torch
from transformers import PreTrainedModel

from silva.errors import ModelError
from silva.models.adapters import merged
from silva.models.checks import gap_of, own_states, sequences
from silva.models.division import WHOLE
from silva.models.loading import LoadedModel, load_model
from silva.models.snapshots import save_adapter, save_parameters
from silva.models.weight_files import let_read
from silva.ports import FILES
from silva.trainer.sharding.parallel import Mesh
from silva.trainer.streamed import base, changing, parameters, plain_outline, plain_weights, write

MOST_GAP = {torch.bfloat16: 0.5}
"""Merged weights are rounded: models of random weights differ by 0.01 to 0.26."""


@torch.no_grad()
def export_model(loaded: LoadedModel, path: Path, mesh: Mesh | None = None) -> None:
    """Write config, safetensors and tokenizer into `path`; plain AutoModelForCausalLM loads it.

    The model itself is only read. All ranks write if it is divided among them, otherwise the first one does.

    Raises:
        ModelError: the plain model would give other logits than the policy. Nothing is left in `path` then.
        CheckpointError: it cannot be written.
    """
    mesh = mesh or Mesh()
    if loaded.division is not WHOLE:
        _export_divided(loaded, path, mesh)
        return
    with mesh.agreed():
        if mesh.rank == 0:
            plain = _plain(loaded)
            _check(plain, loaded, path)
            plain.save_pretrained(path)
            loaded.tokenizer.save_pretrained(path)
            let_read(path)


def save_trained(loaded: LoadedModel, path: Path, mesh: Mesh) -> None:
    """Write the parameters that training changes into the new folder `path`; errors as above."""
    if loaded.division is not WHOLE:
        write(path, parameters(loaded, mesh), mesh, base(loaded, mesh))
        return
    with mesh.agreed():
        if mesh.rank == 0:
            save_parameters(loaded, path)


def save_adapters(loaded: LoadedModel, path: Path, mesh: Mesh) -> None:
    """Write LoRA's adapters into the new folder `path`, as PEFT stores them; the first rank does."""
    whole = loaded if loaded.division is WHOLE else changing(loaded, mesh)
    with mesh.agreed():
        if whole and mesh.rank == 0:
            save_adapter(whole, path)


def _export_divided(loaded: LoadedModel, path: Path, mesh: Mesh) -> None:
    """Write it in parts and read them again, as nobody has the plain model before it is there."""
    with mesh.agreed():
        if mesh.rank == 0:  # first, as transformers removes files of weights that it does not write
            plain_outline(loaded, type(mesh.outline(loaded))).save_pretrained(path, state_dict={})
            loaded.tokenizer.save_pretrained(path)
    write(path, plain_weights(loaded, mesh), mesh, {"format": "pt"})
    try:
        _check_written(loaded, path, mesh)
    except Exception:
        if mesh.rank == 0:
            FILES.remove_tree(path)
        raise
    finally:
        gc.collect()  # the model that was read again: hooks of FSDP refer to their own modules


def _check_written(loaded: LoadedModel, path: Path, mesh: Mesh) -> None:
    from silva.config.sections import PretrainedModel

    dtype = str(loaded.dtype).removeprefix("torch.")
    settings = PretrainedModel(name=str(path.absolute())).model_copy(update={"dtype": dtype})
    with mesh.agreed():
        written = load_model(settings, seed=0, device=loaded.device.type, stored=True)
        written.model.config._experts_implementation = loaded.model.config._experts_implementation
        assert written.stored
        written.stored.checked = True  # below
    if mesh.stages == 1:  # a stage has no logits
        _check(mesh.divide(written).model, loaded, path)


def _check(plain: PreTrainedModel, loaded: LoadedModel, path: Path) -> None:
    tokens = sequences(loaded)
    (_, found), (_, expected) = (own_states(model, tokens) for model in (plain, loaded.model))
    gap, most = gap_of(found, expected), MOST_GAP.get(loaded.dtype, 1e-3)
    if gap > most:
        raise ModelError(
            f"{path}: not written, because {loaded.name} as a plain model gives other logits than the policy "
            f"(by {gap:.2g} of their size, expected at most {most:g}); the checkpoints hold what was learned"
        )


def _plain(loaded: LoadedModel) -> PreTrainedModel:
    """As transformers would make it from the merged weights; it copies none but these."""
    plain = plain_outline(loaded, type(loaded.model))
    plain.load_state_dict(merged(loaded.model), assign=True)
    plain.tie_weights()
    return plain.to(loaded.device).eval()
