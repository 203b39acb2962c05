"""Settings of the rollout strategies."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from silva.config.sections import Limits, Positive, Sampling, Section


class LinearRolloutSettings(Section):
    """Independent episodes of one task, all from its start."""

    type: Literal["linear"] = "linear"
    groups_per_step: Positive = 8
    """Tasks of one step; each becomes a group."""
    group_size: Positive = 8
    """Episodes of one task."""
    sampling: Sampling = Sampling()
    limits: Limits = Limits()
    redo: Annotated[int, Field(ge=0)] = 1
    """How often an episode that gave no result (its environment failed) is tried again."""
