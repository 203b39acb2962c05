"""Silva: reinforcement learning of LLM agents. A batch of rollouts is a forest."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

# Read by MKL when torch loads: rows of a matrix product get the same bits whatever rows are beside them.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

__version__ = "0.1.0"

if TYPE_CHECKING:
    from silva.launch import train as train

__all__ = ["__version__", "train"]


def __getattr__(name: str) -> Any:
    if name == "train":  # loads torch
        from silva.launch import train

        return train
    raise AttributeError(f"module 'silva' has no attribute {name!r}")
