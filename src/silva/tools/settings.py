"""What the settings of every toolset share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from silva.config.sections import Section

if TYPE_CHECKING:
    from silva.protocols import Toolset


class ToolSettings(Section):
    """Base of the settings of a toolset: `type` picks the class, `build` makes it."""

    type: str = ""

    def build(self) -> Toolset:
        raise TypeError(f"{type(self).__name__} must define build()")
