"""The policy that the trained policy is compared with: another model, or a frozen copy of itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from silva.errors import CapabilityError, errors_about
from silva.models.loading import LoadedModel, copied, load_model
from silva.trainer.sharding.parallel import Mesh
from silva.types import LossSpec

if TYPE_CHECKING:
    from silva.algorithms.settings import Algorithm
    from silva.assembly import Assembly


class Reference:
    """`given`: another model with the policy's vocabulary, True for a frozen copy of the policy as it is now,
    False for none.

    The copy shares every weight that is not trained: with LoRA it is a second set of adapters on the same
    base model. The base model alone would not do: it lacks the warm start, if there was one.
    """

    def __init__(self, policy: LoadedModel, given: LoadedModel | bool, mesh: Mesh | None = None) -> None:
        self._policy = policy
        mesh = mesh or Mesh()
        self._copy = mesh.divide(_frozen(policy)) if given is True else None
        self._model = mesh.divide(given) if isinstance(given, LoadedModel) else self._copy

    @property
    def exists(self) -> bool:
        return self._model is not None

    @property
    def model(self) -> LoadedModel:
        """The model to score with, if one exists."""
        assert self._model is not None
        return self._model

    def needed(self, loss: LossSpec) -> LoadedModel:
        """The model to score with.

        Raises:
            CapabilityError: none exists.
        """
        if self._model is None:
            raise CapabilityError(
                f"loss {loss.name} with kl_coef {loss.params['kl_coef']}: got a trainer without a reference "
                "policy, expected one"
            )
        return self._model

    @torch.no_grad()
    def refresh(self) -> None:
        """Make the current policy the reference.

        Raises:
            CapabilityError: there is no copy of the policy.
        """
        if self.parameters is None:
            raise CapabilityError(
                "refresh_reference: got another model as the reference or none, expected a copy of the policy"
            )
        for name, frozen in self.parameters.items():
            frozen.copy_(self._policy.model.get_parameter(name))

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter] | None:
        """What a checkpoint must hold: the parameters that the copy does not share with the policy."""
        if self._copy is None:
            return None
        trained = [name for name, p in self._policy.model.named_parameters() if p.requires_grad]
        return {name: self._copy.model.get_parameter(name) for name in trained}


def load_reference(context: Assembly, algorithm: Algorithm) -> LoadedModel | bool:
    """The model that `algorithm.reference` names, or whether a copy of the policy is needed.

    Raises:
        CapabilityError: it does not read the policy's tokens.
        ModelError: it cannot be loaded.
    """
    if algorithm.reference is None or not algorithm.refers:
        return algorithm.refers
    policy = context.model
    with errors_about("algorithm.reference"):
        reference = context.compute.run(
            load_model,
            algorithm.reference,
            seed=context.config.seed,
            device=policy.device.type,
            stored=context.stored,
        )
    if reference.tokenizer.get_vocab() != policy.tokenizer.get_vocab():
        raise CapabilityError(
            f"algorithm.reference: {reference.name} has another vocabulary than {policy.name}"
        )
    return reference


def _frozen(loaded: LoadedModel) -> LoadedModel:
    shared = [p for p in loaded.model.parameters() if not p.requires_grad]
    frozen = copied(loaded, shared)
    frozen.model.eval().requires_grad_(False)
    return frozen
