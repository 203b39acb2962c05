"""For gpu.py: the machine, models with random weights, an engine, and how time and memory are taken."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import silva  # noqa: F401  # isort: skip  (before torch, which reads at its start what this sets)
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from silva.engines.local.engine import LocalEngine
from silva.models import attention
from silva.models.activation import steady_activations
from silva.models.flops import PEAKS
from silva.models.loading import LoadedModel

Step = Callable[[], Any]


@dataclass(frozen=True)
class Shape:
    hidden: int
    intermediate: int
    layers: int = 28
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    vocabulary: int = 151936


SHAPES = {
    "0.6B": Shape(1024, 3072),
    "1.7B": Shape(2048, 6144),
    "toy": Shape(64, 128, layers=2, heads=4, kv_heads=2, head_dim=16, vocabulary=512),
}


@dataclass(frozen=True)
class Machine:
    device: torch.device
    gemm: float  # FLOP/s, bf16 (CPU: float32), measured
    bandwidth: float  # bytes read and written per second, measured
    peak: float  # FLOP/s
    words: str

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32


def machine(device: torch.device) -> Machine:
    """Measures the rate of a square GEMM on random numbers, and of copying a buffer many times the caches."""
    gpu = device.type == "cuda"
    side, size = (8192, 2**30) if gpu else (1024, 2**26)
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16 if gpu else None) for _ in range(2))
    gemm = 2 * side**3 / median(lambda: a @ b, device, 10)
    source = torch.randint(0, 127, (size,), dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    bandwidth = 2 * size / median(lambda: target.copy_(source), device, 10)
    name = torch.cuda.get_device_name(device) if gpu else "CPU"
    peak = next((rate for part, rate in PEAKS.items() if part in name), gemm)
    sheet = f"{peak / 1e12:.0f} TFLOP/s by its data sheet, " if peak != gemm else ""
    words = (
        f"machine: {name}, {sheet}{gemm / 1e12:.3g} TFLOP/s ({'bf16' if gpu else 'fp32'} GEMM), "
        f"{bandwidth / 1e9:.0f} GB/s (copy), torch {torch.__version__}"
    )
    return Machine(device, gemm, bandwidth, peak, words)


def load(shape: Shape, device: torch.device, dtype: torch.dtype, name: str) -> LoadedModel:
    """Random weights; otherwise what `loading.load_model` makes, which needs pydantic for its settings."""
    config = Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=40960,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention.NAME)
    steady_activations(model)
    nothing: Any = None  # no tokenizer: nothing is decoded to text
    return LoadedModel(model.eval(), nothing, name, device, dtype, 40960, lora=False)


def engine(loaded: LoadedModel, requests: int, compute: Executor) -> LocalEngine:
    """With settings of its own, as those in silva.engines.settings need pydantic."""
    settings: Any = SimpleNamespace(
        max_concurrent=requests,
        cached_sequences=0,
        context=0,
        prefill_tokens=2048,
        prepack_weights=False,
        drafts="off",
    )
    return LocalEngine(loaded, settings, compute)


def paired(ours: Step, theirs: Step, pairs: int, device: torch.device) -> tuple[float, float]:
    """Median seconds of ours, and median of theirs over ours, in turns."""
    ours(), theirs()
    times = [(seconds_of(ours, device), seconds_of(theirs, device)) for _ in range(pairs)]
    return statistics.median(a for a, _ in times), statistics.median(b / a for a, b in times)


def median(step: Step, device: torch.device, repeats: int) -> float:
    step()
    return statistics.median(seconds_of(step, device) for _ in range(repeats))


def seconds_of(step: Step, device: torch.device) -> float:
    _finish(device)
    began = time.perf_counter()
    step()
    _finish(device)
    return time.perf_counter() - began


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory(step: Step, device: torch.device) -> int:
    """Bytes by which a step raises what torch has allocated on the GPU; gradients are there already."""
    step()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    return torch.cuda.max_memory_allocated(device) - before


@contextmanager
def memory_may_run_out(what: str) -> Iterator[None]:
    """Leave out, and say so, what does not fit."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError):
        print(f"... {what}: out of memory, left out", file=sys.stderr, flush=True)
    torch.cuda.empty_cache()
