"""Products with the large weights of linear layers in training on CPU.

torch multiplies float32 with MKL, which is not made for AMD's processors: oneDNN takes half of its time there
(benchmarks/RESULTS.md). Small weights keep to torch: what they take is mostly the call itself.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from silva.models.processor import processor

LARGE = 100_000  # numbers of a weight


@functools.cache
def made_by_amd() -> bool:
    """The processor, where torch has oneDNN for it."""
    return processor().startswith("AMD ") and torch.backends.mkldnn.is_available()


def by_onednn(weight: torch.Tensor) -> bool:
    """Whether products with this weight, or of its shape, are oneDNN's."""
    fits = weight.dtype == torch.float32 and weight.device.type == "cpu" and weight.numel() >= LARGE
    return fits and made_by_amd()


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """[..., in] and [out, in] -> [..., out], without a gradient."""
    return onednn(x, weight, bias) if by_onednn(weight) else F.linear(x, weight, bias)


def of_inputs(out: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The gradient of the inputs: [..., out] and [out, in] -> [..., in]."""
    return onednn(out, weight.T) if by_onednn(weight) else out @ weight


@functools.cache
@torch.inference_mode()
def bfloat16_gain() -> float:
    """How many times as fast as those of float32 products of bfloat16 are here, by the shortest of five.

    Instructions for them say little: it is 2 on AMD's Zen 5, and below 1 on an Intel Xeon without AMX.
    """
    x, weight = torch.ones(1024, 576), torch.ones(1536, 576)
    narrow = x.bfloat16(), weight.bfloat16()

    def seconds(work: Callable[[], object]) -> float:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    pairs = [(seconds(lambda: product(x, weight)), seconds(lambda: F.linear(*narrow))) for _ in range(5)]
    full, half = map(min, zip(*pairs, strict=True))
    return full / half


def onednn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]
