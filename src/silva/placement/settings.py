"""Settings of the placements."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from silva.config.sections import Natural, Section

if TYPE_CHECKING:
    from silva.protocols import Placement


class LocalPlacementSettings(Section):
    """Everything in one process."""

    type: Literal["local"] = "local"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: Natural = 0
    """Threads for torch; 0 takes all cores."""

    def build(self) -> Placement:
        from silva.placement.local import LocalPlacement

        return LocalPlacement(self)
