"""One GPU: what sharing saves in training, how much of the machine training and decoding use.

    python benchmarks/gpu.py --json gpu.json              Qwen3-0.6B and 1.7B shapes; --only, --shape: a part
    python benchmarks/gpu.py --quick                      the smaller shape, shorter sequences, three pairs
    python benchmarks/gpu.py --device cpu --quick         a toy: tests this program, its numbers mean nothing

Random weights in bf16. Needs torch, transformers and numpy; where silva is not installed, PYTHONPATH=src.

- numerics first, on two layers: the trie against one row at a time in float32 (log-probabilities within
  1e-4 nats, gradient within 1e-3 of its size), and in bf16 against float32 on the same weights: one row at a
  time within 0.1 of the gradient's size, the trie at most 1.5 times as far off as that. Log-probabilities of
  sampled tokens (in recorded steps, with shared prefixes) against the trainer's, in float32, within 1e-4
  nats. Where this fails the exit code is 1 and nothing else is measured.
- forest: forward and backward over the trie (FlexAttention) against flat packing of the same rows (the same
  code with nothing shared, in the micro-batches that are fastest for it) and against one product with a mask.
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
from dataclasses import dataclass
from unittest import mock

import numpy as np

import silva  # noqa: F401  # isort: skip  (before torch, which reads at its start what this sets)
import torch
from common import Row, parser, results, write
from forests import drawn, group, rows_pairs, turn_tree
from gpu_numerics import WITHOUT_FLEX, attending, numerics
from gpu_setup import (
    SHAPES,
    Machine,
    Step,
    engine,
    load,
    machine,
    median,
    memory_may_run_out,
    paired,
    peak_memory,
    seconds_of,
)

from silva.engines.local.engine import LocalEngine
from silva.models import flops
from silva.models.loading import LoadedModel
from silva.models.trie import MIN_SHARED, NEVER
from silva.trainer.head import CHUNK_ROWS
from silva.trainer.policy import pack, token_logprobs
from silva.types import Sample, SamplingParams


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
    if there.device.type == "cuda":
        yield from _small_pieces(there, loaded, [s for _ in range(7) for s in group(tokens, 48, 8, 12)])


def _small_pieces(there: Machine, loaded: LoadedModel, samples: Sequence[Sample]) -> Iterator[Row]:
    """As answers to sums are: a trie too small for FlexAttention by default, in many pieces."""
    name, ways = "7 x (48 + 8 x 12)", {"one product with a mask": WITHOUT_FLEX, "FlexAttention": (0, {})}
    for way, (flex_least, one_product) in ways.items():

        def ours(flex_least: int = flex_least, one_product: dict[str, int] = one_product) -> None:
            with attending(flex_least, one_product):
                _forward_backward(loaded, samples, MIN_SHARED)

        def segments() -> None:
            with attending(sys.maxsize, {}):
                _forward_backward(loaded, samples, MIN_SHARED)

        seconds, ratio = paired(ours, segments, 3, there.device)
        yield Row(name, f"step, {way}", seconds, "s", "attention by segment", ratio)


def _sharing(
    there: Machine, loaded: LoadedModel, name: str, samples: Sequence[Sample], pairs: int
) -> Iterator[Row]:
    device, gpu = there.device, there.device.type == "cuda"
    trie, predicted = pack(loaded, samples).trie, sum(int((s.loss_weights > 0).sum()) for s in samples)
    bound = sum(map(len, samples)) / len(trie)
    flop, lengths = flops.flop_of(loaded.model), [len(s) for s in samples]
    flop_bound = flop.forward(sum(lengths), rows_pairs(lengths), predicted) / flop.forward(
        len(trie), flops.pairs(trie), predicted
    )
    yield Row(name, "tokens, flat over trie", bound, "x")
    yield Row(name, "FLOPs, flat over trie", flop_bound, "x")

    def ours() -> None:
        _forward_backward(loaded, samples, MIN_SHARED)

    def one_product() -> None:
        with attending(*WITHOUT_FLEX):
            _forward_backward(loaded, samples, MIN_SHARED)

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
        with memory_may_run_out(f"{name}, in one product"):
            seconds, ratio = paired(ours, one_product, pairs, device)
            yield Row(name, "step, trie", seconds, "s", "one product with a mask", ratio)
            theirs = peak_memory(one_product, device)
            yield Row(
                name, "peak memory, trie", used / 2**30, "GiB", "one product with a mask", theirs / used
            )


def _forward_backward(loaded: LoadedModel, samples: Sequence[Sample], least: int) -> None:
    token_logprobs(loaded, pack(loaded, samples, least=least)).logprobs.mean().neg().backward()


def _fastest(layout: Callable[[int], Step], rows: int, device: torch.device) -> int:
    """Rows at once that the better of two runs each finds fastest, of those that fit into memory."""
    times = {}
    for size in sorted({1, 2, 4, 8, rows} & set(range(1, rows + 1))):
        with memory_may_run_out(f"flat packing, {size} rows at once"):
            times[size] = min(seconds_of(layout(size), device) for _ in range(2))
    if not times:
        raise torch.OutOfMemoryError("flat packing: not even one row fits")
    return min(times, key=times.__getitem__)


# Training


def training(there: Machine, loaded: LoadedModel, scale: Scale) -> Iterator[Row]:
    tokens, model = drawn(np.random.default_rng(2), loaded), loaded.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    optimizer.zero_grad(set_to_none=True)
    model.train()  # without it transformers ignores checkpointing
    # Other chunks of the head tell what the default ones cost on a GPU.
    rows = CHUNK_ROWS[there.device.type]
    ways = {
        "": (False, rows),
        ", checkpointing": (True, rows),
        ", head 128 at once": (False, 128),
        ", head 2048 at once": (False, 2048),
    }
    for length in scale.lengths:
        samples = [s for _ in range(scale.tokens // length) for s in group(tokens, 1, 1, length - 1)]
        seen, predicted = rows_pairs([length] * len(samples)), scale.tokens - len(samples)
        work = flops.flop_of(loaded.model).training(scale.tokens, seen, predicted)
        for way, (checkpointing, at_once) in ways.items():
            name = f"training, {len(samples)} x {length}{way}"

            def step(samples: list[Sample] = samples, at_once: int = at_once) -> None:
                with mock.patch.dict(CHUNK_ROWS, {there.device.type: at_once}):
                    _forward_backward(loaded, samples, MIN_SHARED)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

            if checkpointing:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            with memory_may_run_out(name):
                step()
                seconds = median(step, there.device, scale.pairs)
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
    config, itemsize = loaded.model.config, loaded.dtype.itemsize
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    flop = flops.flop_of(loaded.model)
    weights = flop.body.all + flop.head.all
    ratios, times = [], []

    async def rounds(sampler: LocalEngine) -> None:
        contexts = [tokens(context).tolist() for _ in range(requests)]
        for number in range(scale.pairs + 2):  # the first computes the contexts, the second warms up
            began = time.perf_counter()
            params = [SamplingParams(scale.new, seed=number * requests + i) for i in range(requests)]
            found = await asyncio.gather(*map(sampler.sample, contexts, params))
            seconds = (time.perf_counter() - began) / scale.new
            held = sum(map(len, contexts)) + requests * scale.new / 2
            read = (weights + held * per_token) * itemsize / there.bandwidth
            if number >= 2:
                times.append(seconds)
                ratios.append(max(read, 2 * weights * requests / there.gemm) / seconds)
            contexts = [[*c, *f.tokens] for c, f in zip(contexts, found, strict=True)]

    with ThreadPoolExecutor(1) as compute:
        sampler = engine(loaded, requests, compute)
        asyncio.run(rounds(sampler))
        asyncio.run(sampler.sleep())
    seconds, ratio = statistics.median(times), statistics.median(ratios)
    yield Row(name, "tokens per second", requests / seconds, "/s")
    yield Row(name, "step", seconds, "s", "memory bandwidth", ratio, ">= 0.5")


PARTS = {"forest": forest, "training": training, "decoding": decoding}

if __name__ == "__main__":
    sys.exit(main())
