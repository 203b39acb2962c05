"""The key of a configuration that takes any reward."""

from silva.config.schema import union
from silva.rewards import REWARDS

AnyReward = union(REWARDS)
"""A table with `type`, or in short the name of a type, or "file.py:function"."""
