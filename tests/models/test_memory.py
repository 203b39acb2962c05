from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from silva.models.memory import is_out_of_memory, lazy_zeros

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
FREEING = """
import sys
from pathlib import Path
from silva.config.load import load
from silva.models.memory import give_freed_memory_back
from silva.registries import REGISTRIES
from silva import process
from silva.assembly import Assembly
import torch

def resident():
    words = Path("/proc/self/statm").read_text().split()
    return int(words[1]) * 4096 >> 20

process.prepare()
assembly = Assembly(load(["@", sys.argv[1]], REGISTRIES).config).load()
give_freed_memory_back()  # what loading has left would serve x
before = resident()
x = torch.ones(200 << 18)  # 200 MiB
del x
kept = resident() - before
give_freed_memory_back()
print(kept, resident() - before)
assembly.close()
"""


def test_a_real_allocation_failure_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


def test_only_memory_counts() -> None:
    assert is_out_of_memory(MemoryError()) and is_out_of_memory(torch.OutOfMemoryError("CUDA"))
    assert not is_out_of_memory(RuntimeError("shapes do not match"))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads resident memory from /proc")
def test_memory_freed_in_a_run_stays_until_it_is_given_back() -> None:
    """In a process of its own, as it would stay so for all tests after this one."""
    command = [sys.executable, "-c", FREEING, ROOT / "configs" / "smoke.toml"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    kept, left = map(int, done.stdout.split())
    assert kept >= 200 and left < 20


def test_lazy_zeros_take_memory_where_they_are_written() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        x = lazy_zeros((3, 1000), dtype, CPU)
        assert x.dtype == dtype and x.shape == (3, 1000) and not x.any()
        x[1] = 2
        assert float(x.float().sum()) == 2000
    assert lazy_zeros((0, 4), torch.float32, CPU).shape == (0, 4)
    if Path("/proc/self/statm").exists():
        before = resident()
        large = lazy_zeros((256, 1 << 20), torch.float32, CPU)  # 1 GiB
        large[7] = 1
        assert resident() - before < 64 << 20
    with pytest.raises(MemoryError, match="bytes for a tensor of shape"):
        lazy_zeros((1 << 58,), torch.float32, CPU)
