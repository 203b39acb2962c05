"""The policy that the trained one is compared with: another model, or itself, as it was or without LoRA."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator

import torch
from peft.tuners.tuners_utils import BaseTunerLayer

from silva.errors import CapabilityError
from silva.models.loading import LoadedModel


class Reference:
    """`given`: another model with the policy's vocabulary, or True for a frozen copy of the policy as it is
    now (none is made with LoRA, whose reference is the model below the adapters; there always is one then).
    """

    def __init__(self, policy: LoadedModel, given: LoadedModel | bool) -> None:
        self._policy = policy
        self._other = given if isinstance(given, LoadedModel) else None
        self._copy = _frozen(policy) if given is True and not policy.lora else None
        self.exists = policy.lora or bool(given)

    @contextlib.contextmanager
    def model(self) -> Iterator[LoadedModel]:
        """The model to score with."""
        other = self._other or self._copy
        if other is not None:
            yield other
            return
        layers = [module for module in self._policy.model.modules() if isinstance(module, BaseTunerLayer)]
        for layer in layers:
            layer.enable_adapters(False)
        try:
            yield self._policy
        finally:
            for layer in layers:
                layer.enable_adapters(True)

    def refresh(self) -> None:
        """Make the current policy the reference.

        Raises:
            CapabilityError: there is no copy of the policy.
        """
        if self._copy is None:
            raise CapabilityError(
                "refresh_reference: got LoRA or another model as the reference, expected a copy of the policy"
            )
        self._copy.model.load_state_dict(self._policy.model.state_dict())

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter] | None:
        """What a checkpoint has to hold of it."""
        return dict(self._copy.model.named_parameters()) if self._copy else None


def _frozen(loaded: LoadedModel) -> LoadedModel:
    model = copy.deepcopy(loaded.model).eval().requires_grad_(False)
    return dataclasses.replace(loaded, model=model)
