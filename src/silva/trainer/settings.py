"""Settings of the trainers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from silva.config.sections import CriticSettings, Optimizer, Positive, Section

if TYPE_CHECKING:
    from silva.algorithms.settings import Algorithm
    from silva.assembly import Assembly
    from silva.protocols import Trainer
    from silva.trainer.transfer import WeightTransfer


class LocalTrainerSettings(Section):
    """In-process torch, updating the parameters that the local engine samples from."""

    type: Literal["local"] = "local"
    optimizer: Optimizer = Optimizer()
    critic: CriticSettings = CriticSettings()
    updates_per_step: Positive = 1
    """Optimizer steps a batch is split into."""
    micro_batch_tokens: Positive = 4096
    """Token budget of one forward and backward; tokens that rows share count once."""
    self_check: bool = True
    """Compare the gradient of the first rows of a run with that of one row at a time, and say so."""
    gradient_checkpointing: bool = False
    replay_routing: bool = False
    """Of a mixture of experts: tokens go to the experts that they went to when they were sampled (R3,
    docs/moe.md). The engine records them."""
    max_nonfinite: Positive = 3
    """Stop after this many updates in a row, of policy or critic, whose loss or gradient is not finite."""

    def build(
        self,
        context: Assembly,
        algorithm: Algorithm | None = None,
        *,
        transfer: WeightTransfer | None = None,
    ) -> Trainer:
        """`algorithm`: what it needs beside the policy, a reference or a critic, is made too. `transfer`: how
        weights reach the engine; None: it shares them."""
        from silva.trainer.learner import Learner
        from silva.trainer.local import LocalTrainer
        from silva.trainer.reference import load_reference

        learner = Learner(
            context.model,
            self,
            seed=context.config.seed,
            reference=load_reference(context, algorithm) if algorithm else False,
            critic=bool(algorithm and algorithm.critic),
            say=context.say,
        )
        return LocalTrainer(learner, transfer, compute=context.compute)
