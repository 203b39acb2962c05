"""The key of a configuration that takes any tool."""

from silva.config.schema import union
from silva.tools import TOOLS

AnyTool = union(TOOLS)
"""A table with `type`, or in short the name of a type, or "file.py:function"."""
