"""The critic: a value of the state before every sampled token, over the same packing as the policy.

    samples -> pack -> trunk, every shared token once -> hidden states -> linear -> values [N]
                         own: a copy of the policy as it began, which learns
                         policy: the policy itself, into which no gradient of the critic goes

It has a `Stepper` of its own. Not here: advantages and returns, which
are made of its values before an update (algorithms/gae.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from silva.algorithms.values import value_loss
from silva.config.sections import CriticSettings as CriticSettings
from silva.models.loading import LoadedModel, copied
from silva.trainer.exact import called
from silva.trainer.gradients import summed_in_place
from silva.trainer.head import wide
from silva.trainer.loss_inputs import StreamTokens
from silva.trainer.optimizer import Stepper
from silva.trainer.policy import Pack, through
from silva.trainer.sharding.parallel import Mesh
from silva.trainer.training_mode import training_mode
from silva.types import Sample


class ValueHead(nn.Module):
    """A linear map to one number, 0 at the start so that an untrained critic says nothing."""

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device, *, frozen: bool) -> None:
        super().__init__()
        self.frozen = frozen
        self.linear = nn.Linear(width, 1, dtype=wide(dtype), device=device)
        self.reset()

    def reset(self) -> None:
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
        trunk: a copy of it for a trunk of its own; None: it is made here.
        max_nonfinite: skipped updates in a row after which there should be no further one.
    """

    def __init__(
        self,
        policy: LoadedModel,
        settings: CriticSettings,
        mesh: Mesh | None = None,
        *,
        max_nonfinite: int,
        trunk: LoadedModel | None = None,
    ) -> None:
        self.settings, self._policy = settings, policy
        self._own = own = settings.trunk == "own"
        self._trunk = trunk or (copied(policy, []) if own else policy)
        width = policy.model.config.get_text_config().hidden_size
        self._head = ValueHead(width, policy.dtype, policy.device, frozen=not own)
        parameters = {n: p for n, p in self._trunk.model.named_parameters() if p.requires_grad and own}
        unused = self._trunk.model.get_output_embeddings().weight  # but where it is the input's as well
        tied = unused is self._trunk.model.get_input_embeddings().weight
        used = {n: p for n, p in parameters.items() if p is not unused or tied}
        self.stepper = Stepper(
            used | {f"value_head.{n}": p for n, p in self._head.named_parameters()},
            mesh,
            most=max_nonfinite,
            of="critic",
            key="trainer.critic.optimizer",
        )

    @torch.no_grad()
    def restart(self) -> None:
        """Begin again, from the policy as it is now."""
        self._head.reset()
        if self._own:
            for name, parameter in self._policy.model.named_parameters():
                self._trunk.model.get_parameter(name).copy_(parameter)
        self.stepper.adopt()

    @property
    def warming_up(self) -> bool:
        """Whether the policy waits for the critic still."""
        return self.stepper.counters.updates < self.settings.warmup

    @torch.no_grad()
    def values(self, batch: Pack, budget: int, passes: int = 1) -> torch.Tensor:
        """[N]: the value before every trained token."""
        return through(self._trunk, batch, self._head, budget, passes)[0]

    def check(self, samples: Sequence[Sample]) -> None:
        """Raise RecordError for samples of an update, on all ranks, that a critic cannot learn from."""
        if samples:
            _targets(StreamTokens(samples, "", torch.zeros(())))

    def learn(self, batch: Pack, samples: list[Sample], budget: int, passes: int) -> dict[str, torch.Tensor]:
        """`backward` on the returns and old values of a micro-batch's samples.

        Without samples it adds zeros: the passes are those that other ranks make.
        """
        if not samples:
            with self._learning():
                (values,) = through(self._trunk, batch, self._head, budget, passes)
                (0 * values.sum()).backward()
            return {}
        like = torch.zeros((), dtype=wide(self._policy.dtype), device=self._policy.device)
        stream = StreamTokens(samples, "", like)
        returns, values = _targets(stream)
        names = [sample.trajectory for sample in samples]
        return self.backward(
            batch, budget, returns, values, stream.weights, passes=passes, of=stream.of, names=names
        )

    @contextlib.contextmanager
    def _learning(self) -> Iterator[None]:
        # The trainer has set the mode of the policy.
        mode = training_mode(self._trunk.model) if self._own else contextlib.nullcontext()
        with mode, summed_in_place(called(self._trunk)):
            yield

    def backward(
        self,
        batch: Pack,
        budget: int,
        returns: torch.Tensor,
        old_values: torch.Tensor,
        weights: torch.Tensor,
        *,
        passes: int = 1,
        of: Callable[[torch.Tensor], torch.Tensor] = lambda packed: packed,
        names: Sequence[str] = (),
    ) -> dict[str, torch.Tensor]:
        """Add the gradient of sum(weights * value loss); metrics [N]. All tensors [N].

        Args:
            passes: through the model, see `Walk`.
            of: picks the N tokens from all trained ones of the batch.
            names: the trajectories of the batch, for the message if their loss is not finite.
        """
        with self._learning():
            (values,) = through(self._trunk, batch, self._head, budget, passes)
            loss, metrics = value_loss(of(values), old_values, returns, clip=self.settings.clip)
            total = (weights * loss).sum()
            self.stepper.blame(total, names)
            total.backward()
        return metrics


def _targets(stream: StreamTokens) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns and old values, [N] each."""
    returns, values = (stream.needed(x, "which the critic learns from") for x in ("returns", "values"))
    return returns, values
