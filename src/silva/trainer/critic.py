"""The critic: a value of the state before every sampled token, over the same packing as the policy.

    samples -> pack -> trunk, every shared token once -> hidden states -> linear -> values [N]
                         own: a copy of the policy as it began, which learns
                         policy: the policy itself, into which no gradient of the critic goes

It has an optimizer, a schedule and a count of updates of its own. Not here: advantages and returns, which
are made of its values before an update (algorithms/credit.py).
"""

from __future__ import annotations

import copy
import dataclasses

import torch
from torch import nn

from silva.algorithms.values import value_loss
from silva.config.sections import Critic as CriticSettings
from silva.models.loading import LoadedModel
from silva.trainer.gradients import summed_in_place
from silva.trainer.head import wide
from silva.trainer.optimizer import adamw, gradient_norm, lr_at, step
from silva.trainer.policy import Pack, through
from silva.trainer.state import Counters, State


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
        total_updates: where the schedule ends.
    """

    def __init__(self, policy: LoadedModel, settings: CriticSettings, *, total_updates: int) -> None:
        self.settings, self._total_updates = settings, total_updates
        self._own = own = settings.trunk == "own"
        self._trunk = dataclasses.replace(policy, model=copy.deepcopy(policy.model)) if own else policy
        width = policy.model.config.get_text_config().hidden_size
        self._head = ValueHead(width, policy.dtype, policy.device, frozen=not own)
        parameters = {n: p for n, p in self._trunk.model.named_parameters() if p.requires_grad and own}
        unused = self._trunk.model.get_output_embeddings().weight  # but where it is the input's as well
        used = {n: p for n, p in parameters.items() if p is not unused or _tied(self._trunk)}
        self.parameters = used | {f"value_head.{n}": p for n, p in self._head.named_parameters()}
        self._optimizer = adamw(list(self.parameters.values()), settings.optimizer)
        self._counters = Counters()

    @property
    def state(self) -> State:
        return State(self.parameters, self._optimizer, self._counters, self._trunk.device)

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
    ) -> dict[str, torch.Tensor]:
        """Add the gradient of sum(weights * value loss); metrics [N]. All arguments [N]."""
        if self._own:  # else the trainer has set it
            self._trunk.model.train()
        try:
            with summed_in_place(self._trunk.model):
                (values,) = through(self._trunk, batch, self._head, budget)
                loss, metrics = value_loss(values, old_values, returns, clip=self.settings.clip)
                (weights * loss).sum().backward()
        finally:
            if self._own:
                self._trunk.model.eval()
        return metrics

    def step(self) -> dict[str, float]:
        """One update, skipped where a gradient is not finite; then the gradients are gone."""
        parameters = list(self.parameters.values())
        norm, lr = (
            gradient_norm(parameters),
            lr_at(self._counters.updates, self.settings.optimizer, self._total_updates),
        )
        stepped = step(self._optimizer, parameters, norm, lr, self.settings.optimizer.max_grad_norm)
        self._counters.updates += 1
        self.drop_gradients()
        return {"critic/grad_norm": norm, "critic/lr": lr, "critic/nonfinite": float(not stepped)}

    def drop_gradients(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)


def _tied(loaded: LoadedModel) -> bool:
    model = loaded.model
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight
