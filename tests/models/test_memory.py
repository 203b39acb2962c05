from __future__ import annotations

import pytest
import torch

from silva.models.memory import is_out_of_memory


def test_a_real_allocation_failure_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


def test_only_memory_counts() -> None:
    assert is_out_of_memory(MemoryError()) and is_out_of_memory(torch.OutOfMemoryError("CUDA"))
    assert not is_out_of_memory(RuntimeError("shapes do not match"))
