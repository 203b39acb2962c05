"""Memory of the CPU: how much there is, what is kept, given back or taken lazily, and whether it ran out."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

# Parameters of glibc's mallopt.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return "DefaultCPUAllocator" in str(error)  # a plain RuntimeError: CPU tensors have no type of their own


def memory_limit() -> int | None:
    """Bytes of memory that this process may use: the machine's, or what its control groups leave of them."""
    limits = _group_limits(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    with contextlib.suppress(ValueError, OSError):
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return min(limits, default=None)


def _group_limits(own: Path, root: Path) -> list[int]:
    """Of the control groups that the file `own` lists, and of those above them."""
    limits = []
    with contextlib.suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            base, file = (root / "memory", "memory.limit_in_bytes") if controllers else (root, "memory.max")
            group = Path(name.lstrip("/"))
            for each in (group, *group.parents):  # a container may see only the root of what it is in
                with contextlib.suppress(OSError, ValueError):  # "max"
                    limits.append(int((base / each / file).read_text()))
    return limits


def too_large(needed: float) -> str:
    """In words, with both numbers; empty if so many bytes fit into the memory here."""
    limit = memory_limit()
    if limit is None or needed <= limit:
        return ""
    return f"{in_words(needed)}, and there are {in_words(limit)} of memory here"


def in_words(size: float) -> str:
    unit, name = (2**30, "GiB") if size >= 2**30 else (2**20, "MiB") if size >= 2**20 else (2**10, "KiB")
    return f"{size / unit:.3g} {name}"


def keep_freed_memory() -> None:
    """Let what torch frees stay with this process for its next tensors. Without glibc it does nothing.

    glibc hands large blocks back to the system at once, and the next operation takes the same pages back, one
    fault for each 4 KiB: up to half of the time of a training step.
    """
    if glibc := _glibc():
        for parameter, value in (
            (_MMAP_MAX, 0),  # no block of its own from the system, whatever its size
            (_TRIM_THRESHOLD, -1),  # however much lies free at the end
            (_TOP_PAD, 64 * 2**20),
            (_ARENA_MAX, 1),  # what one thread has freed serves the others
        ):
            glibc.mallopt(parameter, value)


def give_freed_memory_back() -> None:
    """What `keep_freed_memory` has kept goes back to the system."""
    if glibc := _glibc():
        glibc.malloc_trim(0)


@functools.cache
def _glibc() -> Any:
    try:
        library = ctypes.CDLL(None)
        return library if library.gnu_get_libc_version and library.mallopt else None
    except (AttributeError, OSError, TypeError):
        return None


def is_lazy(device: torch.device) -> bool:
    """Whether `lazy_zeros` takes memory there only where something is written."""
    return device.type == "cpu" and hasattr(mmap, "MAP_ANONYMOUS")


def lazy_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that on CPU, where the system can, take memory only where something is written to them.

    Raises:
        MemoryError: not even the addresses are to be had.
    """
    size = math.prod(shape) * dtype.itemsize
    if not size or not is_lazy(device):
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    try:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{size:,} bytes for a tensor of shape {tuple(shape)}") from error
    return torch.frombuffer(pages, dtype=dtype).view(tuple(shape))
