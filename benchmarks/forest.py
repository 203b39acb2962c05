"""What sharing saves in training: forward and backward over the trie against flat layouts of the same rows.

    .venv/bin/python benchmarks/forest.py --json forest.json            SmolLM2-135M-Instruct, over an hour
    .venv/bin/python benchmarks/forest.py --quick                       a tiny model, under a minute

All layouts of a case run in turns; ratios are medians over the rounds. Each runs in the micro-batches that
are fastest for it, the trie as the trainer's plan cuts it. Two bounds: tokens (flat over trie tokens), and
FLOPs, which know that the head and the attention of answers to prompts are not shared.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import silva  # noqa: F401  # isort: skip  (before torch, which reads at its start what this sets)
import torch
from common import Row, machine, parser, results, write
from forests import drawn, group, rows_pairs, turn_tree

from silva.config.sections import Lora, PretrainedModel, TinyModel
from silva.models.flops import flop_of, pairs
from silva.models.loading import LoadedModel, load_model
from silva.models.memory import give_freed_memory_back, keep_freed_memory
from silva.models.trie import MIN_SHARED, NEVER
from silva.trainer.gradients import summed_in_place
from silva.trainer.head import Head
from silva.trainer.plan import plan
from silva.trainer.policy import pack, token_logprobs
from silva.types import Sample

WALKS = {"walked in 3 chunks": 3, "walked in 6 chunks": 6}
FAST_WALK, SMALL_WALK = WALKS  # a target is set for the time of the first and the memory of the second
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
    options.add_argument("--quick", action="store_true", help="a tiny model, small shapes, three rounds")
    options.add_argument("--rounds", type=int, default=9, help="rounds a case (default 9)")
    options.add_argument("--only", help="only cases whose name contains this")
    given = options.parse_args()
    keep_freed_memory()
    speed, words = machine()
    rows = [speed]
    for loaded, case in _cases(given.quick):
        if given.only is None or given.only in case.name:
            print(f"... {case.name}", file=sys.stderr, flush=True)
            rows += measure(loaded, case, 3 if given.quick else given.rounds)
            write(rows, given.json)
    print(words, "", results(rows[1:]), sep="\n")
    return 0


def _cases(quick: bool) -> Iterator[tuple[LoadedModel, Case]]:
    loaded = _model(quick)
    yield from ((loaded, case) for case in cases(loaded, quick))
    if not quick:
        lora = _model(quick, lora=True)
        first = cases(lora, quick)[0]
        yield lora, Case(f"{first.name}, LoRA", first.merged)


def _model(quick: bool, lora: bool = False) -> LoadedModel:
    adapters = Lora(rank=16, alpha=32.0) if lora else None
    if quick:
        return load_model(TinyModel(layers=4, width=128, heads=4, kv_heads=2, context=4096, lora=adapters),
                          seed=0)  # fmt: skip
    return load_model(PretrainedModel(lora=adapters), seed=0)


def cases(loaded: LoadedModel, quick: bool) -> list[Case]:
    tokens, d = drawn(np.random.default_rng(0), loaded), 4 if quick else 1
    return [
        Case("256 + 8 x 32", group(tokens, 256 // d, 8, 32 // d)),
        Case("64 + 8 x 64", group(tokens, 64 // d, 8, 64 // d)),
        Case("512 + 16 x 64", group(tokens, 512 // d, 16, 64 // d)),
        Case("6 turns of 64, 16 leaves", *turn_tree(tokens, 64 // d, 6, (2, 4), 4)),
        Case(
            "8 roots, 2 forks each",
            [s for _ in range(8) for s in turn_tree(tokens, 64 // d, 3, (2, 3), 2)[0]],
        ),
        Case(
            "nothing shared: 8 x (128 + 64)",
            [s for _ in range(8) for s in group(tokens, 128 // d, 1, 64 // d)],
        ),
    ]


def measure(loaded: LoadedModel, case: Case, rounds: int) -> list[Row]:
    samples = case.merged
    batch = pack(loaded, samples)
    trie, lengths = batch.trie, [len(sample) for sample in samples]
    bound = sum(lengths) / len(trie)
    flop = flop_of(loaded.model)
    flop_bound = flop.forward(sum(lengths), rows_pairs(lengths), len(batch.pairs)) / flop.forward(
        len(trie), pairs(trie), len(batch.targets)
    )
    shared = bound > 1.01
    rows = [
        Row(case.name, "tokens, flat over trie", bound, "x"),
        Row(case.name, "FLOPs, flat over trie", flop_bound, "x"),
    ]
    at_once = _fastest(loaded, samples, _flat)
    padded_at_once = _fastest(loaded, samples, _padded)
    flat = f"flat packing ({at_once} rows at once)"
    budget = _fastest_budget(loaded, samples, len(trie))
    steps = {"trie": _trie(loaded, samples, budget), flat: _flat(loaded, samples, at_once)}
    walks = {name: _walk(loaded, samples, -(-len(trie) // n)) for name, n in WALKS.items()}
    seconds, ratios = interleaved(steps | (walks if shared else {}), rounds)
    walked = {name: ratios.pop(name) for name in walks if shared}
    others = {
        "trie": steps["trie"],
        f"padded rows ({padded_at_once} at once)": _padded(loaded, samples, padded_at_once),
    }
    if case.by_turn:
        turns_at_once = _fastest(loaded, case.by_turn, _flat)
        others["flat packing, a row a turn"] = _flat(loaded, case.by_turn, turns_at_once)
    ratios |= interleaved(others, min(rounds, 3))[1]  # no target depends on them
    for name, ratio in ratios.items():
        aim = ">= 0.97" if not shared and name == flat else ""
        rows.append(Row(case.name, f"step, trie ({budget} tokens at once)", seconds, "s", name, ratio, aim))

    def share(metric: str, of: str, ratio: float, aim: float | None) -> None:
        target = f">= {aim}" if aim and bound >= 1.5 else ""
        rows.append(Row(case.name, metric, ratio, "", of, ratio, target))

    if shared:
        best = 0.85 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 0.75
        share("share of the token bound", "token bound", ratios[flat] / bound, best)
        share("share of the FLOP bound", "FLOP bound", ratios[flat] / flop_bound, 0.9)
        for name, ratio in walked.items():
            least = 0.6 if name == FAST_WALK else None
            share(f"share of the token bound, {name}", "token bound", ratios[flat] / ratio / bound, least)
    scoring = {
        "trie": _trie(loaded, samples, budget, grad=False),
        "flat packing": _flat(loaded, samples, at_once, grad=False),
    }
    seconds, ratios = interleaved(scoring, rounds)
    rows.append(Row(case.name, "log-probabilities alone, trie", seconds, "s", "flat packing",
                    ratios["flat packing"]))  # fmt: skip
    if shared:
        theirs = {flat: steps[flat], "flat packing, all rows at once": _flat(loaded, samples, len(samples))}
        bytes_of = {against: peak(step) for against, step in theirs.items()}
        for name, step in {"trie": steps["trie"], **walks}.items():
            ours = peak(step)
            for against, of_flat in bytes_of.items():
                aimed = name == SMALL_WALK and against == flat and case.name.startswith("256")
                rows.append(Row(case.name, f"peak memory above weights, {name}", ours / 2**20, "MiB", against,
                                of_flat / ours if ours else None, ">= 2.5" if aimed else ""))  # fmt: skip
    return rows


def _trie(loaded: LoadedModel, samples: Sequence[Sample], budget: int, *, grad: bool = True) -> Step:
    def step() -> None:
        for work in plan([sample.tokens for sample in samples], budget)[0]:
            _run(loaded, [samples[i] for i in work.rows], grad, budget, MIN_SHARED)

    return step


def _walk(loaded: LoadedModel, samples: Sequence[Sample], budget: int) -> Step:
    return lambda: _run(loaded, samples, True, budget, MIN_SHARED)


def _flat(loaded: LoadedModel, samples: Sequence[Sample], at_once: int, *, grad: bool = True) -> Step:
    """Rows side by side without padding, nothing merged: what the trie is where every row is a root."""

    def step() -> None:
        for start in range(0, len(samples), at_once):
            _run(loaded, samples[start : start + at_once], grad, None, NEVER)

    return step


def _run(loaded: LoadedModel, samples: Sequence[Sample], grad: bool, budget: int | None, least: int) -> None:
    batch = pack(loaded, samples, least=least)
    with torch.set_grad_enabled(grad), summed_in_place(loaded.model):
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
    """Rows at once, of 1 to 8, that one timed run each over eight rows finds fastest."""
    some = samples[:8]
    layout(loaded, some, 1)()  # warms up
    return min((1, 2, 4, 8), key=lambda size: _seconds(layout(loaded, some, size)))


def _fastest_budget(loaded: LoadedModel, samples: Sequence[Sample], whole: int) -> int:
    """Tokens of the trie at once: all, or what one timed run finds faster. No row is cut."""
    longest = max(map(len, samples))
    budgets = [whole, *(budget for budget in (2048, 1024, 512, 256, 128) if longest <= budget < whole)]
    _trie(loaded, samples, whole)()  # warms up
    return min(budgets, key=lambda budget: _seconds(_trie(loaded, samples, budget)))


def interleaved(steps: Mapping[str, Step], rounds: int) -> tuple[float, dict[str, float]]:
    """All in turns: median seconds of the first, and medians of the others' over the first's."""
    times = [[_seconds(step) for step in steps.values()] for _ in range(rounds + 1)][1:]  # the first warms up
    ratios = {name: statistics.median(row[i] / row[0] for row in times) for i, name in enumerate(steps) if i}
    return statistics.median(row[0] for row in times), ratios


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
    give_freed_memory_back()  # else it would be counted as there already
    clear.write_text("5")  # resets the high-water mark
    before = _status(status, "VmRSS")
    step()
    return max(0, _status(status, "VmHWM") - before)


def _status(path: Path, key: str) -> int:
    line = next(line for line in path.read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    sys.exit(main())
