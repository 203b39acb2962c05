"""Settings of the trainers."""

from __future__ import annotations

from typing import Literal

from silva.config.sections import Critic, Optimizer, Positive, Section


class LocalTrainerSettings(Section):
    """In-process torch, updating the parameters that the local engine samples from."""

    type: Literal["local"] = "local"
    optimizer: Optimizer = Optimizer()
    critic: Critic = Critic()
    updates_per_step: Positive = 1
    """Optimizer steps a batch is split into."""
    micro_batch_tokens: Positive = 4096
    """Token budget of one forward and backward; tokens that rows share count once."""
    self_check: bool = True
    """Compare the gradient of the first rows of a run with that of one row at a time, and say so."""
    gradient_checkpointing: bool = False
    max_nonfinite: Positive = 3
    """Stop after this many updates in a row, of policy or critic, whose loss or gradient is not finite."""
