"""The processor of this machine, as Linux describes it."""

from __future__ import annotations

import functools
import platform
from pathlib import Path

_WITH_PRODUCTS = {"avx512_bf16", "amx_bf16", "bf16", "svebf16"}  # the latter two on Arm


def processor() -> str:
    """Its model's name."""
    return _described("model name") or platform.processor() or platform.machine()


@functools.cache
def multiplies_bfloat16() -> bool:
    """Whether it has instructions for products of bfloat16: without them they take five times as long as
    products of float32, and with them a quarter to more than the same (`products.bfloat16_gain`)."""
    return not _WITH_PRODUCTS.isdisjoint((_described("flags") or _described("Features")).split())


def _described(key: str) -> str:
    """What /proc/cpuinfo says of the first processor; nothing if there is no such file or line."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")
