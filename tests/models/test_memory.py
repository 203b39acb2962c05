from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from silva.models import memory
from silva.models.memory import is_out_of_memory, lazy_zeros, memory_limit, too_large

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
@pytest.mark.slow
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


GIB = 2**30


@pytest.mark.parametrize(
    ("groups", "files", "limits"),
    [
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": str(3 * GIB)}, [3 * GIB]),
        ("0::/\n", {"memory.max": str(2 * GIB)}, [2 * GIB]),  # a container of its own
        ("0::/host/path\n", {"memory.max": str(2 * GIB)}, [2 * GIB]),  # whose path is the host's
        ("0::/a\n", {}, []),
        (
            "9:cpu,cpuacct:/a\n4:memory:/a/b\n0::/\n",
            {"memory/a/b/memory.limit_in_bytes": str(GIB), "memory/memory.limit_in_bytes": str(2**63 - 4096)},
            [GIB, 2**63 - 4096],
        ),
    ],
)
def test_control_groups_bound_the_memory(
    tmp_path: Path, groups: str, files: dict[str, str], limits: list[int]
) -> None:
    (tmp_path / "self").write_text(groups)
    for name, text in files.items():
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(text + "\n")
    assert memory._group_limits(tmp_path / "self", tmp_path / "root") == limits


def test_what_is_too_large_is_said_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = memory_limit()
    assert machine is not None and machine > 2**28
    monkeypatch.setattr(memory, "_group_limits", lambda own, root: [2**28])
    assert memory_limit() == 2**28
    assert too_large(2**28) == ""
    assert too_large(3 * 2**29) == "1.5 GiB, and there are 256 MiB of memory here"
