"""The adapters of a checkpoint as a folder of PEFT: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save_file

from silva.config.sections import TinyModel
from silva.errors import ModelError
from silva.models.adapters import peft_config
from silva.models.loading import resolve, skeleton
from silva.models.overlays import trained_tensors
from silva.models.sources import RunCheckpoint
from silva.models.weight_files import let_read


def write_adapter(checkpoint: RunCheckpoint, path: Path) -> tuple[int, list[str]]:
    """Write the new folder `path`.

    Returns:
        How many tensors, and in words, what their base is.

    Raises:
        ModelError: the run trained no adapters, its base is in no folder, or the checkpoint is damaged.
    """
    lora = checkpoint.model.lora
    if lora is None:
        raise ModelError(
            f"{checkpoint.folder}: trained without [model.lora], so it has no adapters; take --to hf"
        )
    if isinstance(checkpoint.model, TinyModel):
        raise ModelError(
            f"{checkpoint.folder}: adapters of a tiny model, whose base is in no folder; take --to hf"
        )
    tensors = trained_tensors(checkpoint.folder)
    base = resolve(checkpoint.model.name)
    description = peft_config(
        skeleton(checkpoint.model),
        lora,
        base_model_name_or_path=base,
        revision=checkpoint.model.revision,
        task_type="CAUSAL_LM",
        inference_mode=True,
    )
    named = {f"base_model.model.{name.replace('.default.', '.')}": each for name, each in tensors.items()}
    path.mkdir()
    save_file(named, path / "adapter_model.safetensors", metadata={"format": "pt"})
    let_read(path)
    description.save_pretrained(str(path))
    return len(named), [f"its base is {base}, as adapter_config.json says"]
