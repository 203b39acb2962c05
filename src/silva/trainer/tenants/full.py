"""A run that trains all weights: a copy of the model, and AdamW over it.

Its passes are those of the learner of one model, over the run's own copy, so they have nothing to share with
other runs. Beside the base model there are then the copy, its gradient and two moments, and float32 masters
of a narrow model.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from silva.errors import CapabilityError
from silva.models.loading import LoadedModel, copied
from silva.models.memory import too_large
from silva.trainer.gradients import summed_in_place
from silva.trainer.optimizer import Stepper, learning_bytes
from silva.trainer.policy import token_logprobs
from silva.trainer.settings import LocalTrainerSettings
from silva.trainer.sharding.parallel import Mesh
from silva.trainer.tenants.folder import LoraShape, TenantRun
from silva.trainer.tenants.parts import PassWork
from silva.trainer.training_mode import enable_gradient_checkpointing


def full_run(
    plain: LoadedModel, shape: LoraShape, settings: LocalTrainerSettings, mesh: Mesh, of: str
) -> TenantRun:
    """A run over a fresh copy of `plain`.

    Args:
        shape: of rank 0, with all kinds of layers.
        mesh: as of `Tenants`.
        of: whose weights these are, for messages.

    Raises:
        CapabilityError: some layers are left out, or there is too little memory.
    """
    if not (shape.attn and shape.mlp and shape.unembed):
        raise CapabilityError(
            f"{of}: rank 0 trains all weights; expected train_attn, train_mlp and train_unembed, or a rank "
            "of 1 or more"
        )
    shared = [nn.Parameter(parameter.detach()) for parameter in plain.model.parameters()]
    needed = sum(parameter.nbytes for parameter in shared) + learning_bytes(shared)
    if plain.device.type == "cpu" and (why := too_large(needed)):
        raise CapabilityError(f"{of}: to train all weights takes {why}; expected rank 1 or more")
    whole = copied(plain, [])
    whole.model.requires_grad_(True)
    if settings.gradient_checkpointing:
        enable_gradient_checkpointing(whole.model)
    return TenantRun(
        shape, Stepper(dict(whole.model.named_parameters()), mesh, most=sys.maxsize, of=of), whole
    )


def through(whole: LoadedModel, stepper: Stepper, work: PassWork) -> None:
    """The next part of a pass, forward and, if it is asked for, backward."""
    assert work.next is not None
    with _gradients_of(work, stepper), summed_in_place(whole.model):
        found = token_logprobs(whole, work.next.pack)
        if (total := work.loss(work.next, found.logprobs)) is not None:
            total.backward()  # type: ignore[no-untyped-call]


@contextmanager
def _gradients_of(work: PassWork, stepper: Stepper) -> Iterator[None]:
    """Parameters collect the gradient of this pass within, and have their own again after it."""
    parameters = stepper.parameters
    before = {name: parameter.grad for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        parameter.grad = work.gradients.get(name)
    try:
        yield
    finally:
        work.gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        for name, parameter in parameters.items():
            parameter.grad = before[name]
