"""Settings of the placements."""

from __future__ import annotations

from typing import Literal

from silva.config.sections import Natural, Section


class LocalPlacementSettings(Section):
    """Everything in one process."""

    type: Literal["local"] = "local"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: Natural = 0
    """Threads for torch; 0 takes all cores."""
