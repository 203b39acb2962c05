"""Parameters that lie beside a model, put into it: those of a run's checkpoint, and adapters of PEFT."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from silva.errors import ModelError, one_line
from silva.models.adapters import fold
from silva.models.pieces import Pieces, written
from silva.models.weight_files import some
from silva.storage.checkpoints import verify

WEIGHTS = Path("trainer", "weights.safetensors")  # in a checkpoint (trainer/state.py writes it)


def trained_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """What training changes, by name, in float32.

    Raises:
        ModelError: a file of the checkpoint is damaged.
    """
    try:
        verify(checkpoint)
        with Pieces(written((checkpoint / WEIGHTS).parent, WEIGHTS.stem)) as pieces:
            return pieces.all()
    except OSError as error:  # a CheckpointError is one
        raise ModelError(f"{checkpoint}: its weights cannot be read: {error}") from error


@torch.no_grad()
def lay_checkpoint(model: PreTrainedModel, checkpoint: Path) -> None:
    """Copy what was trained into the model that it was trained in; adapters are merged.

    The file holds masters in float32: a narrower parameter gets their rounding, as while training.

    Raises:
        ModelError: a file of the checkpoint is damaged, or its parameters are not this model's.
    """
    tensors = trained_tensors(checkpoint)
    parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
    wrong = sorted(parameters.keys() ^ tensors.keys())
    wrong += [name for name in parameters.keys() & tensors if parameters[name].shape != tensors[name].shape]
    if wrong:
        raise ModelError(
            f"{checkpoint / WEIGHTS}: {some(wrong)} missing, too many or of another shape; expected the "
            "parameters that training changes in the model of the run's config.toml"
        )
    for name, parameter in parameters.items():
        parameter.copy_(tensors[name])
    fold(model)


def lay_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Merge the LoRA adapter of a folder of PEFT into its model.

    Raises:
        ModelError: it has other layers or shapes than the model, or cannot be read.
    """
    from peft import LoraConfig, PeftModel

    try:
        config = LoraConfig.from_pretrained(str(folder))
        config.inference_mode = True
        wrapped = PeftModel(model, config)  # type: ignore[arg-type]
        loaded = wrapped.load_adapter(str(folder), "default", use_safetensors=True)
    except Exception as error:  # a reader of a foreign format raises anything
        raise ModelError(
            f"{folder}: the adapter does not fit its model: {one_line(str(error), 300)}"
        ) from error
    missing = [name for name in loaded.missing_keys if "lora_" in name]
    if wrong := sorted({*missing, *loaded.unexpected_keys}):
        raise ModelError(f"{folder}: the adapter does not fit its model: {some(wrong)} missing or too many")
    wrapped.merge_and_unload()
    for parameter in model.parameters():
        parameter.requires_grad_(True)
