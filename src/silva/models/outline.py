"""A model without its numbers: what it takes is known before a weight is read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from silva.errors import ModelError, one_line
from silva.models import adapters
from silva.models.loading import below, no_warnings, source_of
from silva.models.tiny import tiny_config, tiny_tokenizer

if TYPE_CHECKING:
    from silva.config.sections import PretrainedModel, TinyModel


def outline(settings: PretrainedModel | TinyModel) -> PreTrainedModel:
    """What `[model]` names, with its adapters and all parameters on the device "meta".

    Raises:
        ModelError: its config.json is not here, or is of no model that predicts the next token.
    """
    plain = below(settings)
    with no_warnings():
        config = _config(plain)
        with torch.device("meta"):
            try:
                model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
            except ValueError as error:
                named = getattr(plain, "name", plain.type)
                raise ModelError(f"model.name = {named!r}: {one_line(str(error), 160)}") from error
            model.to(getattr(torch, settings.dtype))  # type: ignore[arg-type]
            if settings.lora is not None:
                adapters.inject(model, settings.lora)
    return model


def _config(settings: PretrainedModel | TinyModel) -> Any:
    from silva.config.sections import TinyModel

    if isinstance(settings, TinyModel):
        return tiny_config(settings, tiny_tokenizer())
    source, options = source_of(settings)
    try:
        return AutoConfig.from_pretrained(source, **options)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"model.name = {settings.name!r}: there is no config.json of it ({one_line(str(error), 160)})"
        ) from error
