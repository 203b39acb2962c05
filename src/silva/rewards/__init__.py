"""Rewards: each is one file with its settings, whose `build()` makes a `silva.protocols.Reward`."""

REWARDS: dict[str, str] = {}
"""Value of `type` in the configuration -> module and settings class."""
