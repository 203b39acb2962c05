"""What decides the last bits on this machine: processor, BLAS, and what was probed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from silva.models.processor import processor
from silva.models.same_bits import RowRules, probe

SHAPES = ((576, 192), (576, 1536), (1536, 576))
"""Inputs and outputs of layers that stand for those of a small language model."""
HEAD_DIM = 64


def describe(device: torch.device, rules: RowRules) -> dict[str, Any]:
    """As plain data for a run's folder, with the caller's number of threads. Equal data mean equal bits."""
    gpu = {"gpu": torch.cuda.get_device_name(device)} if device.type == "cuda" else {}
    return {
        **gpu,
        "processor": processor(),
        "kernels": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "blas": blas(),
        "threads": torch.get_num_threads(),
        "rows": rules.describe(),
    }


def promises(threads: int) -> dict[str, str]:
    """For each dtype, whether a row's bits are the same in any batch on this machine, and by which rules."""
    before, found = torch.get_num_threads(), {}
    torch.set_num_threads(threads)
    try:
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            layers = nn.ModuleList(nn.Linear(k, n, bias=False, dtype=dtype) for k, n in SHAPES)
            rules = probe(layers, head_dim=HEAD_DIM, dtype=dtype)
            found[str(dtype).removeprefix("torch.")] = f"{'yes' if rules.hold else 'no'} ({rules.describe()})"
    finally:
        torch.set_num_threads(before)
    return found


def blas() -> str:
    """The library that multiplies matrices, with its version where torch knows it."""
    lines = [line.strip(" -") for line in torch.__config__.show().splitlines()]
    named = next((line for line in lines if "Math Kernel Library" in line), None)
    info = next((line for line in lines if "BLAS_INFO=" in line), "")
    return named or info.partition("BLAS_INFO=")[2].partition(",")[0] or "unknown"
