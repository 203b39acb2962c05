"""The critic: a value of the state before every sampled token, over the same packing as the policy.

    samples -> pack -> trunk, every shared token once -> hidden states -> linear -> values [N]
                         own: a copy of the policy as it began, which learns
                         policy: the policy itself, into which no gradient of the critic goes

It has an optimizer and a count of updates of its own. Not here: advantages and returns, which
are made of its values before an update (algorithms/gae.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import nn

from silva.algorithms.values import value_loss
from silva.config.sections import Critic as CriticSettings
from silva.errors import NonFiniteError
from silva.models.loading import LoadedModel, copied
from silva.trainer.explained_errors import not_finite
from silva.trainer.gradients import summed_in_place
from silva.trainer.head import wide
from silva.trainer.optimizer import Stepper, norm_of
from silva.trainer.policy import Pack, through
from silva.trainer.randomness import Randomness
from silva.trainer.state import Counters, State
from silva.trainer.training_mode import training_mode
from silva.types import OptimParams


class ValueHead(nn.Module):
    """A linear map to one number, 0 at the start so that an untrained critic says nothing."""

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device, *, frozen: bool) -> None:
        super().__init__()
        self.frozen = frozen
        self.linear = nn.Linear(width, 1, dtype=wide(dtype), device=device)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(
        self, hidden: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        return (self.linear(hidden.to(self.linear.weight.dtype))[:, 0],)


class Critic:
    """Lives beside a policy in one trainer, which calls it on its compute thread.

    Args:
        policy: as it is before training.
        max_nonfinite: skipped updates in a row after which `step` raises.
    """

    def __init__(self, policy: LoadedModel, settings: CriticSettings, *, max_nonfinite: int) -> None:
        self.settings, self._max_nonfinite = settings, max_nonfinite
        self._own = own = settings.trunk == "own"
        self._trunk = copied(policy, []) if own else policy
        width = policy.model.config.get_text_config().hidden_size
        self._head = ValueHead(width, policy.dtype, policy.device, frozen=not own)
        parameters = {n: p for n, p in self._trunk.model.named_parameters() if p.requires_grad and own}
        unused = self._trunk.model.get_output_embeddings().weight  # but where it is the input's as well
        used = {n: p for n, p in parameters.items() if p is not unused or _tied(self._trunk)}
        self._stepper = Stepper(used | {f"value_head.{n}": p for n, p in self._head.named_parameters()})
        self._counters = Counters()
        self._bad_loss: list[str] = []  # trajectories whose loss was not finite since the last step

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """What learns, by name."""
        return self._stepper.parameters

    def state(self, randomness: Randomness) -> State:
        return State(self._stepper, self._counters, randomness)

    @property
    def warming_up(self) -> bool:
        """Whether the policy waits for the critic still."""
        return self._counters.updates < self.settings.warmup

    @torch.no_grad()
    def values(self, batch: Pack, budget: int) -> torch.Tensor:
        """[N]: the value before every trained token."""
        return through(self._trunk, batch, self._head, budget)[0]

    def backward(
        self,
        batch: Pack,
        budget: int,
        returns: torch.Tensor,
        old_values: torch.Tensor,
        weights: torch.Tensor,
        names: Sequence[str] = (),
    ) -> dict[str, torch.Tensor]:
        """Add the gradient of sum(weights * value loss); metrics [N]. All tensors [N].

        `names`: some trajectories of the batch, for the message if their loss is not finite.
        """
        # The trainer has set the mode of the policy.
        mode = training_mode(self._trunk.model) if self._own else contextlib.nullcontext()
        with mode, summed_in_place(self._trunk.model):
            (values,) = through(self._trunk, batch, self._head, budget)
            loss, metrics = value_loss(values, old_values, returns, clip=self.settings.clip)
            total = (weights * loss).sum()
            if not torch.isfinite(total):
                self._bad_loss = self._bad_loss or list(names)
            total.backward()
        return metrics

    def step(self, params: OptimParams) -> dict[str, float]:
        """One update, skipped if the loss or a gradient is not finite. Clears the gradients.

        Raises:
            NonFiniteError: too many in a row were skipped.
        """
        counters, norm = self._counters, norm_of(self._stepper.gradients)
        finite = not self._bad_loss and self._stepper.step(norm, params)
        counters.nonfinite = 0 if finite else counters.nonfinite + 1
        problem = ""
        if not finite:
            problem = not_finite(
                counters.updates,
                counters.nonfinite,
                self._bad_loss,
                self.parameters,
                self._max_nonfinite,
                params,
                key="trainer.critic.optimizer",
                whose="of the critic",
            )
        counters.updates += 1
        self.drop_gradients()
        if counters.nonfinite >= self._max_nonfinite:
            raise NonFiniteError(problem)
        return {"critic/grad_norm": norm, "critic/lr": params.lr, "critic/nonfinite": float(not finite)}

    def drop_gradients(self) -> None:
        self._stepper.drop_gradients()
        self._bad_loss = []


def _tied(loaded: LoadedModel) -> bool:
    model = loaded.model
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight
