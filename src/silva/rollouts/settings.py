"""Settings of the rollout strategies."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from silva.config.sections import Limits, Positive, Sampling, Section

if TYPE_CHECKING:
    from silva.protocols import Context, Rollout
    from silva.rollouts.faults import Watch


class LinearRolloutSettings(Section):
    """Independent episodes of one task, all from its start."""

    type: Literal["linear"] = "linear"
    groups_per_step: Positive = 8
    """Tasks of one step; each becomes a group."""
    max_async_level: Annotated[int, Field(ge=0)] = 0
    """How many steps rollouts may be ahead of training, and with it how many versions their policy may be
    behind (staleness). 0: a step's rollouts begin when the step before it is published."""
    group_size: Positive = 8
    """Episodes of one task."""
    sampling: Sampling = Sampling()
    limits: Limits = Limits()
    redo: Annotated[int, Field(ge=0)] = 1
    """How often an episode that gave no result (its environment failed) is tried again."""

    def build(
        self,
        context: Context,
        *,
        on_turn: Callable[[str, str | None], None] = lambda episode, waiting_for: None,
        watch: Watch | None = None,
    ) -> Rollout:
        from silva.rollouts.faults import UNWATCHED
        from silva.rollouts.linear import Linear

        return Linear(self, context.engine, context.renderer, seed=context.config.seed, on_turn=on_turn,
                      watch=watch or UNWATCHED)  # fmt: skip
