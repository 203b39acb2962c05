"""What sharing saves in training: forward and backward over the trie against flat layouts of the same rows.

    .venv/bin/python benchmarks/forest.py --json forest.json            SmolLM2-135M-Instruct, over an hour
    .venv/bin/python benchmarks/forest.py --quick                       a tiny model, under a minute

Every case is measured in interleaved pairs; ratios are medians over the pairs. Flat layouts run in the
micro-batches that are fastest for them, the trie in one. Two bounds: tokens (flat over trie tokens), and
FLOPs, which know that the head and the attention of answers to prompts are not shared.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from common import Row, machine, parser, table, write

from silva.config.sections import Lora, PretrainedModel, TinyModel
from silva.models.loading import LoadedModel, load_model
from silva.models.trie import LEAST, NEVER, Trie
from silva.trainer.head import Head
from silva.trainer.policy import pack, token_logprobs
from silva.types import Sample

Step = Callable[[], None]
Tokens = np.ndarray


@dataclass(frozen=True)
class Case:
    """`merged`: a row for each leaf. `by_turn`: a row for each turn, where there are several."""

    name: str
    merged: Sequence[Sample]
    by_turn: Sequence[Sample] = ()


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--quick", action="store_true", help="a tiny model, small shapes, three pairs")
    options.add_argument("--pairs", type=int, default=9, help="interleaved pairs a case (default 9)")
    options.add_argument("--only", help="only cases whose name contains this")
    given = options.parse_args()
    speed, words = machine()
    loaded = _model(given.quick)
    rows, lines = [speed], []
    for case in cases(loaded, given.quick):
        if given.only and given.only not in case.name:
            continue
        print(f"... {case.name}", file=sys.stderr, flush=True)
        found = measure(loaded, case, 3 if given.quick else given.pairs)
        rows += found
        lines += [_line(row) for row in found]
    if not given.only and not given.quick:
        lora = _model(given.quick, lora=True)
        case = next(iter(cases(lora, given.quick)))
        found = measure(lora, Case(f"{case.name}, LoRA", case.merged), given.pairs)
        rows += found
        lines += [_line(row) for row in found]
    print(words, "", table(["case", "metric", "value", "against", "ratio", "target"], lines), sep="\n")
    write(rows, given.json)
    return 0


def _model(quick: bool, lora: bool = False) -> LoadedModel:
    adapters = Lora(rank=16, alpha=32.0) if lora else None
    if quick:
        return load_model(TinyModel(layers=4, width=128, heads=4, kv_heads=2, context=4096, lora=adapters),
                          seed=0)  # fmt: skip
    return load_model(PretrainedModel(lora=adapters), seed=0)


def cases(loaded: LoadedModel, quick: bool) -> list[Case]:
    rng = np.random.default_rng(0)

    def tokens(n: int) -> Tokens:
        return rng.integers(5, loaded.model.config.vocab_size, n)

    def group(prompt: int, count: int, answer: int) -> list[Sample]:
        shared = tokens(prompt)
        return [_sample(np.concatenate([shared, tokens(answer)]), [(prompt, prompt + answer)])
                for _ in range(count)]  # fmt: skip

    d = 4 if quick else 1
    turns = _turn_tree(tokens, 64 // d, 6, (2, 4), 4)
    return [
        Case("256 + 8 x 32", group(256 // d, 8, 32 // d)),
        Case("64 + 8 x 64", group(64 // d, 8, 64 // d)),
        Case("512 + 16 x 64", group(512 // d, 16, 64 // d)),
        Case("6 turns of 64, 16 leaves", *turns),
        Case(
            "8 roots, 2 forks each",
            [s for _ in range(8) for s in _turn_tree(tokens, 64 // d, 3, (2, 3), 2)[0]],
        ),
        Case("nothing shared: 8 x (128 + 64)", [s for _ in range(8) for s in group(128 // d, 1, 64 // d)]),
    ]


def _turn_tree(
    tokens: Callable[[int], Tokens], length: int, count: int, forks: Sequence[int], width: int
) -> tuple[list[Sample], list[Sample]]:
    """Turns half observation, half answer; `width` branches before each of `forks` (1-based)."""
    leaves: list[Sample] = []
    turns: list[Sample] = []

    def grow(history: Tokens, spans: list[tuple[int, int]], turn: int) -> None:
        here = np.concatenate([history, tokens(length)])
        answer = (len(here) - length // 2, len(here))
        turns.append(_sample(here, [answer]))
        if turn == count:
            leaves.append(_sample(here, [*spans, answer]))
            return
        for _ in range(width if turn + 1 in forks else 1):
            grow(here, [*spans, answer], turn + 1)

    grow(np.empty(0, np.int64), [], 1)
    return leaves, turns


def _sample(tokens: Tokens, spans: Sequence[tuple[int, int]]) -> Sample:
    weights = np.zeros(len(tokens))
    for start, stop in spans:
        weights[start:stop] = 1.0 / len(tokens)
    return Sample(
        tokens=tokens,
        loss_weights=weights,
        logprobs=np.full(len(tokens), -5.0),
        temperatures=np.ones(len(tokens)),
        versions=np.zeros(len(tokens), np.int64),
        trajectory="t",
        group="g",
    )


def measure(loaded: LoadedModel, case: Case, pairs: int) -> list[Row]:
    samples = case.merged
    batch = pack(loaded, samples)
    flat_tokens = sum(map(len, samples))
    bound = flat_tokens / len(batch.trie)
    flop_bound = flops(loaded, [len(s) for s in samples], samples) / _trie_flops(
        loaded, batch.trie, len(batch.targets)
    )
    shared = bound > 1.01
    trie = _trie(loaded, samples)
    packed_rows = _fastest(loaded, samples, _flat)
    padded_rows = _fastest(loaded, samples, _padded)
    rows = [
        Row(case.name, "tokens, flat over trie", bound, "x"),
        Row(case.name, "FLOPs, flat over trie", flop_bound, "x"),
    ]

    def against(name: str, ours: Step, theirs: Step, metric: str = "step") -> float:
        seconds, ratio = paired(ours, theirs, pairs)
        aim = ">= 0.97" if not shared and name == "flat packing" else ""
        rows.append(Row(case.name, f"{metric}, trie", seconds, "s", name, ratio, aim))
        return ratio

    ratio = against(f"flat packing ({packed_rows} rows at once)", trie, _flat(loaded, samples, packed_rows))
    if shared:
        aim = 0.85 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 0.75
        share = ratio / bound
        rows.append(Row(case.name, "share of the token bound", share, "", "token bound", share,
                        f">= {aim}" if bound >= 1.5 else ""))  # fmt: skip
        rows.append(Row(case.name, "share of the FLOP bound", ratio / flop_bound, "", "FLOP bound",
                        ratio / flop_bound, ">= 0.9" if bound >= 1.5 else ""))  # fmt: skip
    against(f"padded rows ({padded_rows} at once)", trie, _padded(loaded, samples, padded_rows))
    if case.by_turn:
        turn_rows = _fastest(loaded, case.by_turn, _flat)
        against("flat packing, a row a turn", trie, _flat(loaded, case.by_turn, turn_rows))
    against("flat packing", _trie(loaded, samples, grad=False),
            _flat(loaded, samples, packed_rows, grad=False), "log-probabilities alone")  # fmt: skip
    if shared:
        walk = _trie(loaded, samples, budget=-(-len(batch.trie) // 3))
        _, of_walk = paired(walk, _flat(loaded, samples, packed_rows), pairs)
        rows.append(Row(case.name, "share of the token bound, walked in 3 chunks", of_walk / bound, "",
                        "token bound", of_walk / bound, ">= 0.6"))  # fmt: skip
        ours, theirs = peak(trie), peak(_flat(loaded, samples, packed_rows))
        aim = "memory <= 0.4 of flat" if case.name.startswith("256") else ""
        rows.append(Row(case.name, "peak memory above weights, trie", ours / 2**20, "MiB", "flat packing",
                        theirs / max(ours, 1), aim))  # fmt: skip
        rows.append(Row(case.name, "peak memory above weights, walked", peak(walk) / 2**20, "MiB"))
    return rows


def _trie(
    loaded: LoadedModel, samples: Sequence[Sample], *, grad: bool = True, budget: int | None = None
) -> Step:
    def step() -> None:
        _run(loaded, samples, grad, budget, LEAST)

    return step


def _flat(loaded: LoadedModel, samples: Sequence[Sample], at_once: int, *, grad: bool = True) -> Step:
    """Rows side by side without padding, nothing merged: what the trie is where every row is a root."""

    def step() -> None:
        for start in range(0, len(samples), at_once):
            _run(loaded, samples[start : start + at_once], grad, None, NEVER)

    return step


def _run(loaded: LoadedModel, samples: Sequence[Sample], grad: bool, budget: int | None, least: int) -> None:
    batch = pack(loaded, samples, least=least)
    with torch.set_grad_enabled(grad):
        found = token_logprobs(loaded, batch, budget=budget)
        if grad:
            found.logprobs.sum().backward()


def _padded(loaded: LoadedModel, samples: Sequence[Sample], at_once: int) -> Step:
    """What most trainers do: rows filled up to the longest, plain causal attention."""
    order = sorted(samples, key=len)

    def step() -> None:
        for start in range(0, len(order), at_once):
            part = order[start : start + at_once]
            width = max(map(len, part))
            tokens = torch.zeros(len(part), width, dtype=torch.int64)
            for row, sample in enumerate(part):
                tokens[row, : len(sample)] = torch.from_numpy(sample.tokens)
            rows, places = (torch.from_numpy(np.concatenate(x)) for x in zip(*(
                (np.full(int((s.loss_weights > 0).sum()), r), np.flatnonzero(s.loss_weights))
                for r, s in enumerate(part)), strict=True))  # fmt: skip
            states = loaded.model.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state
            logprobs, _ = Head(loaded)(states[rows, places - 1], tokens[rows, places], torch.ones(len(rows)))
            logprobs.sum().backward()

    return step


def _fastest(loaded: LoadedModel, samples: Sequence[Sample], layout: Callable[..., Step]) -> int:
    """Rows at once that one timed run each finds fastest."""
    sizes = sorted({1, 2, 4, 8, len(samples)} & set(range(1, len(samples) + 1)))
    return min(sizes, key=lambda size: min(_seconds(layout(loaded, samples, size)) for _ in range(2)))


def paired(ours: Step, theirs: Step, pairs: int) -> tuple[float, float]:
    """Median seconds of ours, and median of theirs over ours, in turns."""
    ours(), theirs()
    times = [(_seconds(ours), _seconds(theirs)) for _ in range(pairs)]
    return statistics.median(a for a, _ in times), statistics.median(b / a for a, b in times)


def _seconds(step: Step) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def peak(step: Step) -> int:
    """Bytes by which a step raises the process's resident memory (Linux; 0 elsewhere)."""
    status, clear = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not clear.exists():
        return 0
    step()  # gradients are there from now on
    gc.collect()
    clear.write_text("5")  # the high-water mark starts anew
    before = _status(status, "VmRSS")
    step()
    return max(0, _status(status, "VmHWM") - before)


def _status(path: Path, key: str) -> int:
    line = next(line for line in path.read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def flops(loaded: LoadedModel, lengths: Sequence[int], samples: Sequence[Sample]) -> float:
    """Of one forward pass over rows: linear layers, attention over what is seen, head where there is loss."""
    seen = sum(n * (n + 1) / 2 for n in lengths)
    predicted = sum(int((s.loss_weights > 0).sum()) for s in samples)
    return _flops(loaded, sum(lengths), seen, predicted)


def _trie_flops(loaded: LoadedModel, trie: Trie, predicted: int) -> float:
    return _flops(loaded, len(trie), float((trie.positions + 1).sum()), predicted)


def _flops(loaded: LoadedModel, tokens: int, seen: float, predicted: int) -> float:
    config = loaded.model.config
    body = sum(p.numel() for n, p in loaded.model.get_decoder().named_parameters() if "embed" not in n)
    width = config.num_attention_heads * (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    head = config.vocab_size * config.hidden_size
    return 2.0 * (body * tokens + 2 * config.num_hidden_layers * width * seen + head * predicted)


def _line(row: Row) -> list[str]:
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
    return [row.case, row.metric, f"{row.value:.3g} {row.unit}".strip(), row.against, ratio, row.target]


if __name__ == "__main__":
    sys.exit(main())
