"""Telling "memory ran out" from other failures of torch."""

from __future__ import annotations

import torch


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return "DefaultCPUAllocator" in str(error)  # a plain RuntimeError: CPU tensors have no type of their own
