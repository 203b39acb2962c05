"""Tools that remember nothing of an episode: functions, and whatever else is a `Tool`.

Tools with a state of the episode are its methods: see `own_tools` in environments/bases/tool_dialogue.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from silva.config.plugins import load_object
from silva.config.sections import Positive
from silva.errors import CapabilityError, errors_about
from silva.protocols import Tool
from silva.tools.function import tool
from silva.tools.settings import ToolSettings


class FunctionSettings(ToolSettings):
    """A Python function of your own as a tool."""

    type: Literal["function"] = "function"
    function: str
    """ "file.py:name" or "package.module:name"."""
    timeout: Annotated[float, Field(gt=0)] | None = None
    """Seconds one call may take; null: what the environment allows."""
    max_chars: Positive | None = None
    """Characters of a result that are shown; null: what the environment allows."""

    def build(self) -> Fixed:
        with errors_about(f"tool {self.function}"):
            function = load_object(self.function, callable, "function")
        return Fixed([tool(function, timeout=self.timeout, max_chars=self.max_chars)])


class Fixed:
    """A `silva.protocols.Toolset`, and its own session: all episodes share it."""

    def __init__(self, tools: Sequence[Tool | Callable[..., Any]]) -> None:
        self.tools: Sequence[Tool] = [entry if hasattr(entry, "spec") else tool(entry) for entry in tools]

    async def open(self, seed: int) -> Fixed:
        return self

    async def fork(self, seed: int) -> Fixed:
        """Raises CapabilityError for methods of an episode: the fork's would change the original."""
        for each in self.tools:
            owner = getattr(getattr(each, "function", None), "__self__", None)
            if hasattr(owner, "reset") and hasattr(owner, "step"):
                raise CapabilityError(
                    f"tool {each.spec.name} is a method of the episode {type(owner).__name__}, so a fork "
                    "would use the original's state: return such methods from own_tools() of a ToolDialogue"
                )
        return self

    def metrics(self) -> Mapping[str, float]:
        return {}

    async def close(self) -> None:
        pass
