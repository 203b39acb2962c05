"""A rank's parts of a model's parameters, read from the model's files."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from silva.errors import ModelError
from silva.models.adapters import plain_name
from silva.models.loading import LoadedModel
from silva.models.pieces import Box, box_of, divided_like, local
from silva.models.stored import StoredWeights, place
from silva.models.weight_files import is_finite
from silva.trainer.optimizer import anywhere_within


@torch.no_grad()
def fill(loaded: LoadedModel, masters: Collection[str], device: torch.device | str) -> None:
    """Put this rank's parts of the weights where the model has parameters on the device "meta".

    Args:
        masters: parameters that are float32 masters of narrower weights, see `Stepper`.
        device: what holds the parts.

    Raises:
        ModelError: a weight is not finite.
        CheckpointError: a file has become unreadable.
    """
    assert loaded.stored is not None
    names: dict[nn.Parameter, list[str]] = {}  # tied ones have several
    for name, parameter in loaded.model.named_parameters(remove_duplicate=False):
        if local(parameter).is_meta:
            names.setdefault(parameter, []).append(name)
    for parameter, (first, *_) in names.items():
        box, kind = box_of(parameter), loaded.dtype if first in masters else parameter.dtype
        part = _read(loaded, loaded.stored, names[parameter], box).to(kind)
        if first in masters:
            part = anywhere_within(first, part, box, parameter.shape)
        # Also a tensor that is whole in its file, which would be a view of that.
        own = torch.empty(box.shape, dtype=parameter.dtype, device=device).copy_(part)
        filled = nn.Parameter(divided_like(parameter, own), parameter.requires_grad)
        for name in names[parameter]:
            place(loaded.model, name, filled)


def _read(loaded: LoadedModel, stored: StoredWeights, names: list[str], box: Box) -> torch.Tensor:
    name = next(plain for each in names if (plain := plain_name(each)) in stored)
    part = stored.read(name, box)
    if not is_finite(part):
        raise ModelError(
            f"model.name = {loaded.name!r}: weights hold NaN or infinity: {name} in {stored.file_of(name)}; "
            "copy or export the model again"
        )
    return part
