"""One GPU: what sharing saves in training, how much of the machine training and decoding use.

    python benchmarks/gpu.py --json gpu.json              Qwen3-0.6B and 1.7B shapes; --only, --shape: a part
    python benchmarks/gpu.py --quick                      the smaller shape, shorter sequences, three pairs
    python benchmarks/gpu.py --device cpu --quick         a toy: tests this program, its numbers mean nothing

Random weights in bf16. Needs torch, transformers and numpy; where silva is not installed, PYTHONPATH=src.

- numerics first, on two layers: the trie against one row at a time in float32 (log-probabilities within
  1e-4 nats, gradient within 1e-3 of its size), and in bf16 against float32 on the same weights: one row at a
  time within 0.1 of the gradient's size, the trie at most 1.5 times as far off as that. Where this fails the
  exit code is 1 and nothing else is measured.
- forest: forward and backward over the trie (FlexAttention) against flat packing of the same rows (the same
  code with nothing shared, in the micro-batches that are fastest for it) and against attention by segment.
  Interleaved pairs, medians. Bounds: flat tokens, and flat FLOPs, over those of the trie. Memory is the peak
  of the allocator above weights and gradients.
- training: packing, forward, backward and a fused AdamW step. MFU is 3 x the FLOPs of a forward pass (linear
  layers, causal attention, head) over the seconds, against the chip's dense bf16 peak by its data sheet, or
  the measured GEMM where the chip is not in PEAKS; what checkpointing computes again does not count.
- decoding: `LocalEngine`, every request with a context of its own, the seconds of a whole step with sampling.
  The limit of a step is the time to read weights, head and all keys and values at the measured bandwidth, or
  to multiply at the measured GEMM rate, whichever is longer.
"""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from common import Row, parser, results, write
from forests import drawn, flops, group, linear_parameters, rows_flops, turn_tree
from transformers import AutoModelForCausalLM, Qwen3Config

from silva.engines.local import LocalEngine
from silva.models import attention
from silva.models.activation import steady_activations
from silva.models.loading import LoadedModel
from silva.models.trie import LEAST, NEVER
from silva.trainer import head, policy
from silva.trainer.head import CHUNK_ROWS
from silva.trainer.policy import pack, token_logprobs
from silva.types import Sample, SamplingParams

Step = Callable[[], Any]
Tokens = np.ndarray


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
PEAKS = {  # dense bf16 FLOP/s by the makers' data sheets; the first name found in the device's counts
    "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "GH200": 989e12, "H200 NVL": 835e12,
    "H200": 989e12, "H20": 148e12, "B200": 2250e12, "A100": 312e12, "A800": 312e12, "L40S": 362e12,
}  # fmt: skip


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


@dataclass(frozen=True)
class Scale:
    """Sizes of the cases. `shrink` divides their lengths."""

    shapes: tuple[str, ...]
    shrink: int
    pairs: int
    lengths: tuple[int, ...]  # of the rows of training
    tokens: int  # of one training step
    requests: tuple[int, ...]
    new: int  # tokens decoded in a round


FULL = Scale(("0.6B", "1.7B"), 1, 9, (2048, 8192, 16384), 16384, (1, 8, 64), 32)
QUICK = Scale(("0.6B",), 4, 3, (2048,), 4096, (8,), 16)
TOY = Scale(("toy",), 32, 3, (64, 128), 256, (1, 4), 8)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--quick", action="store_true", help="small shapes, three pairs")
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only with --quick")
    options.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS), help="parts (default all)")
    options.add_argument("--shape", choices=SHAPES, nargs="+", help="shapes (default as above)")
    options.add_argument("--pairs", type=int, help="interleaved pairs or repeats (default 9, --quick 3)")
    given = options.parse_args()
    if given.device == "cpu" and not given.quick:
        options.error("--device cpu tests this program and runs with --quick only")
    if given.device == "cuda" and not torch.cuda.is_available():
        options.error("no GPU found; --device cpu --quick tests this program without one")
    # Past its limit of recompilations torch would go on without the kernel, many times slower and unseen.
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    scale = TOY if given.device == "cpu" else QUICK if given.quick else FULL
    scale = dataclasses.replace(
        scale, pairs=given.pairs or scale.pairs, shapes=tuple(given.shape or scale.shapes)
    )
    there = machine(torch.device(given.device))
    rows = [
        Row("machine", "GEMM", there.gemm / 1e12, "TFLOP/s"),
        Row("machine", "copy bandwidth", there.bandwidth / 1e9, "GB/s"),
    ]
    found, good = numerics(there)
    rows += found
    write(rows, given.json)
    for shape in scale.shapes if good else ():
        loaded = load(SHAPES[shape], there.device, there.dtype, shape)
        for part in given.only:
            print(f"... {shape}, {part}", file=sys.stderr, flush=True)
            for row in PARTS[part](there, loaded, scale):
                rows.append(dataclasses.replace(row, case=f"{shape}: {row.case}"))
                write(rows, given.json)
        del loaded
        torch.cuda.empty_cache()
    print(there.words, "", results(rows), sep="\n")
    if not good:
        print("numerics FAILED: nothing else was measured", file=sys.stderr)
    return 0 if good else 1


def machine(device: torch.device) -> Machine:
    """Measures the rate of a square GEMM on random numbers, and of copying a buffer many times the caches."""
    gpu = device.type == "cuda"
    side, size = (8192, 2**30) if gpu else (1024, 2**26)
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16 if gpu else None) for _ in range(2))
    gemm = 2 * side**3 / _median(lambda: a @ b, device, 10)
    source = torch.randint(0, 127, (size,), dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    bandwidth = 2 * size / _median(lambda: target.copy_(source), device, 10)
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


# Numerics


def numerics(there: Machine) -> tuple[list[Row], bool]:
    gpu = there.device.type == "cuda"
    shape = dataclasses.replace(SHAPES["0.6B" if gpu else "toy"], layers=2)
    narrow = load(shape, there.device, torch.bfloat16, "bf16")
    wide = load(shape, there.device, torch.float32, "fp32")
    wide.model.load_state_dict(narrow.model.state_dict())
    rng = np.random.default_rng(1)
    # No lengths are multiples of FlexAttention's blocks; on a GPU the trie goes through it, no row does.
    samples = turn_tree(drawn(rng, wide), 147 if gpu else 13, 4, (2, 4), 2)[0]
    samples += group(drawn(rng, wide), 310 if gpu else 40, 5, 61 if gpu else 9)
    weights = torch.from_numpy(rng.normal(size=sum(int((s.loss_weights > 0).sum()) for s in samples)))
    weights = weights.to(there.device, torch.float32)
    exact = _logprobs_gradient(wide, [[s] for s in samples], weights)
    rows, good = [], True

    def held(metric: str, value: float, limit: float, unit: str = "") -> None:
        nonlocal good
        good &= value <= limit  # false for NaN
        rows.append(Row("numerics", metric, value, unit, target=f"<= {limit:.3g}"))

    ways = {"trie": policy.FLEX_LEAST, **({"trie, by segment": sys.maxsize} if gpu else {})}
    for way, flex_least in ways.items():
        with mock.patch.object(policy, "FLEX_LEAST", flex_least):
            ours = _logprobs_gradient(wide, [samples], weights)
        held(
            f"fp32, {way} and one row at a time: log-probabilities",
            float((ours[0] - exact[0]).abs().max()),
            1e-4,
            "nats",
        )
        held(f"fp32, {way} and one row at a time: gradient", _apart(ours, exact), 1e-3)
    flat = _logprobs_gradient(narrow, [[s] for s in samples], weights)
    ours = _logprobs_gradient(narrow, [samples], weights)
    held("bf16 one row at a time and fp32: gradient", _apart(flat, exact), 0.1)
    held("bf16 trie and fp32: gradient", _apart(ours, exact), 1.5 * _apart(flat, exact))
    held("bf16 trie and fp32: log-probabilities, RMS", _rms(ours, exact), 1.5 * _rms(flat, exact), "nats")
    return rows, good


Computed = tuple[torch.Tensor, list[torch.Tensor]]


def _logprobs_gradient(
    loaded: LoadedModel, batches: Sequence[Sequence[Sample]], weights: torch.Tensor
) -> Computed:
    """Log-probabilities [N] in float32, and the gradient of their weighted sum."""
    loaded.model.zero_grad(set_to_none=True)
    parts, start = [], 0
    for samples in batches:
        logprobs = token_logprobs(loaded, pack(loaded, samples)).logprobs
        (logprobs * weights[start : start + len(logprobs)]).sum().backward()
        start += len(logprobs)
        parts.append(logprobs.detach())
    gradient = [p.grad.float().clone() for p in loaded.model.parameters()]
    loaded.model.zero_grad(set_to_none=True)
    return torch.cat(parts), gradient


def _rms(ours: Computed, theirs: Computed) -> float:
    return float((ours[0] - theirs[0]).square().mean().sqrt())


def _apart(ours: Computed, theirs: Computed) -> float:
    """Norm of the difference of the gradients over the norm of the second."""
    norm = torch.nn.utils.get_total_norm
    return float(norm([a - b for a, b in zip(ours[1], theirs[1], strict=True)]) / norm(theirs[1]))


# Forest


def forest(there: Machine, loaded: LoadedModel, scale: Scale) -> Iterator[Row]:
    long, half, short = 2048 // scale.shrink, 1024 // scale.shrink, 512 // scale.shrink
    tokens = drawn(np.random.default_rng(0), loaded)
    cases = {
        f"{long} + 16 x {short}": group(tokens, long, 16, short),
        f"8 turns of {short}, 9 leaves": turn_tree(tokens, short, 8, (5, 7), 3)[0],
        f"nothing shared: 8 x {long}": [s for _ in range(8) for s in group(tokens, half, 1, half)],
    }
    for name, samples in cases.items():
        with memory_may_run_out(name):
            yield from _sharing(there, loaded, name, samples, scale.pairs)


def _sharing(
    there: Machine, loaded: LoadedModel, name: str, samples: Sequence[Sample], pairs: int
) -> Iterator[Row]:
    device, gpu = there.device, there.device.type == "cuda"
    trie, predicted = pack(loaded, samples).trie, sum(int((s.loss_weights > 0).sum()) for s in samples)
    bound = sum(map(len, samples)) / len(trie)
    flop_bound = rows_flops(loaded, [len(s) for s in samples], predicted) / flops(
        loaded, len(trie), float((trie.positions + 1).sum()), predicted
    )
    yield Row(name, "tokens, flat over trie", bound, "x")
    yield Row(name, "FLOPs, flat over trie", flop_bound, "x")

    def ours() -> None:
        _forward_backward(loaded, samples, LEAST)

    def segments() -> None:
        with mock.patch.object(policy, "FLEX_LEAST", sys.maxsize):
            _forward_backward(loaded, samples, LEAST)

    def flat(at_once: int) -> Step:
        def step() -> None:
            for start in range(0, len(samples), at_once):
                _forward_backward(loaded, samples[start : start + at_once], NEVER)

        return step

    at_once = _fastest(flat, len(samples), device)
    against = f"flat packing ({at_once} rows at once)"
    seconds, ratio = paired(ours, flat(at_once), pairs, device)
    shared = bound > 1.01
    yield Row(name, "step, trie", seconds, "s", against, ratio, "" if shared else ">= 0.97")
    if shared:
        for kind, most, aim in (("token bound", bound, ">= 0.85"), ("FLOP bound", flop_bound, ">= 0.9")):
            yield Row(name, f"share of the {kind}", ratio / most, "", kind, ratio / most, aim)
    if gpu:
        used, theirs = peak_memory(ours, device), peak_memory(flat(at_once), device)
        yield Row(name, "peak memory, trie", used / 2**30, "GiB", against, theirs / used)
        with memory_may_run_out(f"{name}, by segment"):
            seconds, ratio = paired(ours, segments, pairs, device)
            yield Row(name, "step, trie", seconds, "s", "attention by segment", ratio)
            theirs = peak_memory(segments, device)
            yield Row(name, "peak memory, trie", used / 2**30, "GiB", "attention by segment", theirs / used)


def _forward_backward(loaded: LoadedModel, samples: Sequence[Sample], least: int) -> None:
    token_logprobs(loaded, pack(loaded, samples, least=least)).logprobs.mean().neg().backward()


def _fastest(layout: Callable[[int], Step], rows: int, device: torch.device) -> int:
    """Rows at once that the better of two runs each finds fastest, of those that fit into memory."""
    times = {}
    for size in sorted({1, 2, 4, 8, rows} & set(range(1, rows + 1))):
        with memory_may_run_out(f"flat packing, {size} rows at once"):
            times[size] = min(_seconds(layout(size), device) for _ in range(2))
    if not times:
        raise torch.OutOfMemoryError("flat packing: not even one row fits")
    return min(times, key=times.__getitem__)


# Training


def training(there: Machine, loaded: LoadedModel, scale: Scale) -> Iterator[Row]:
    tokens, model = drawn(np.random.default_rng(2), loaded), loaded.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    optimizer.zero_grad(set_to_none=True)
    model.train()  # without it transformers ignores checkpointing
    # Larger chunks of the head, for as many logits at once, tell what the default ones cost on a GPU.
    ways = {
        "": (False, CHUNK_ROWS),
        ", checkpointing": (True, CHUNK_ROWS),
        ", head 2048 at once": (False, 2048),
    }
    for length in scale.lengths:
        samples = [s for _ in range(scale.tokens // length) for s in group(tokens, 1, 1, length - 1)]
        work = 3 * rows_flops(loaded, [length] * len(samples), scale.tokens - len(samples))
        for way, (checkpointing, at_once) in ways.items():
            name = f"training, {len(samples)} x {length}{way}"

            def step(samples: list[Sample] = samples, at_once: int = at_once) -> None:
                with mock.patch.object(head, "CHUNK_ROWS", at_once):
                    _forward_backward(loaded, samples, LEAST)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

            if checkpointing:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            with memory_may_run_out(name):
                step()
                seconds = _median(step, there.device, scale.pairs)
                yield Row(name, "tokens per second", scale.tokens / seconds, "/s")
                aim = ">= 0.35" if loaded.name == "1.7B" and length == 8192 and not way else ""
                mfu, of_gemm = work / seconds / there.peak, work / seconds / there.gemm
                yield Row(name, "MFU", mfu, "", "peak", mfu, aim)
                yield Row(name, "share of the GEMM rate", of_gemm, "", "GEMM", of_gemm)
                if there.device.type == "cuda":
                    memory = peak_memory(step, there.device)
                    yield Row(name, "peak memory above weights and states", memory / 2**30, "GiB")
            optimizer.zero_grad(set_to_none=True)
            if checkpointing:
                model.gradient_checkpointing_disable()
    model.eval()


# Decoding


def decoding(there: Machine, loaded: LoadedModel, scale: Scale) -> Iterator[Row]:
    for requests in scale.requests:
        name = f"decoding, {requests} requests of {2048 // scale.shrink}"
        with memory_may_run_out(name):
            yield from _decoded(there, loaded, name, requests, scale)


def _decoded(there: Machine, loaded: LoadedModel, name: str, requests: int, scale: Scale) -> Iterator[Row]:
    """Rounds continue the same contexts, as turns do, so that all of a round but its sampling is decoding."""
    rng, context = np.random.default_rng(3), 2048 // scale.shrink
    tokens = drawn(rng, loaded)
    settings: Any = SimpleNamespace(  # silva.engines.settings needs pydantic
        max_concurrent=requests, cached_sequences=0, context=0, prefill_tokens=2048, pack_weights=False
    )
    config, itemsize = loaded.model.config, loaded.dtype.itemsize
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    weights = linear_parameters(loaded) + config.vocab_size * config.hidden_size
    ratios, times = [], []

    async def rounds(engine: LocalEngine) -> None:
        contexts = [tokens(context).tolist() for _ in range(requests)]
        for number in range(scale.pairs + 2):  # the first computes the contexts, the second warms up
            began = time.perf_counter()
            params = [SamplingParams(scale.new, seed=number * requests + i) for i in range(requests)]
            found = await asyncio.gather(*map(engine.sample, contexts, params))
            seconds = (time.perf_counter() - began) / scale.new
            held = sum(map(len, contexts)) + requests * scale.new / 2
            read = (weights + held * per_token) * itemsize / there.bandwidth
            if number >= 2:
                times.append(seconds)
                ratios.append(max(read, 2 * weights * requests / there.gemm) / seconds)
            contexts = [[*c, *f.tokens] for c, f in zip(contexts, found, strict=True)]

    with ThreadPoolExecutor(1) as compute:
        engine = LocalEngine(loaded, settings, compute)
        asyncio.run(rounds(engine))
        engine.cache.clear()
    seconds, ratio = statistics.median(times), statistics.median(ratios)
    yield Row(name, "tokens per second", requests / seconds, "/s")
    yield Row(name, "step", seconds, "s", "memory bandwidth", ratio, ">= 0.5")


# Time and memory


def paired(ours: Step, theirs: Step, pairs: int, device: torch.device) -> tuple[float, float]:
    """Median seconds of ours, and median of theirs over ours, in turns."""
    ours(), theirs()
    times = [(_seconds(ours, device), _seconds(theirs, device)) for _ in range(pairs)]
    return statistics.median(a for a, _ in times), statistics.median(b / a for a, b in times)


def _median(step: Step, device: torch.device, repeats: int) -> float:
    step()
    return statistics.median(_seconds(step, device) for _ in range(repeats))


def _seconds(step: Step, device: torch.device) -> float:
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


PARTS = {"forest": forest, "training": training, "decoding": decoding}

if __name__ == "__main__":
    sys.exit(main())
