"""Requests with adapters of their own in one decode batch, against one adapter after the other, and none.

    .venv/bin/python benchmarks/adapted.py --json adapted.json          about six minutes

32 requests for SmolLM2-135M-Instruct in fp32, on one thread: prompts of 8 random tokens, 64 new ones at
temperature 1, without drafts, the same number for each adapter. The ways take turns, and ratios are
medians of neighbours. Speeds are tokens by the second of processor time of this process, so other work on
the machine counts little. What a request gets is the same in both ways with adapters: that is checked.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

import silva  # noqa: F401  # isort: skip  (before torch, which reads at its start what this sets)
import numpy as np
import torch
from common import Row, machine, parser, results, write

from silva.aio import gather
from silva.config.sections import Lora, PretrainedModel
from silva.engines.local.engine import LocalEngine
from silva.engines.settings import LocalEngineSettings
from silva.models.loading import load_model
from silva.models.lora_runs import LoraRuns
from silva.types import Completion, SamplingParams

REQUESTS, PROMPT, NEW = 32, 8, 64
ALPHA = 32.0
Way = Callable[[], Awaitable[list[Completion]]]


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--adapters", default="4x16,4x32,32x16",
                         help="how many, and of which rank (default 4x16,4x32,32x16)")  # fmt: skip
    options.add_argument("--repeats", type=int, default=3, help="rounds of all ways (default 3)")
    given = options.parse_args()
    torch.set_num_threads(1)
    speed, words = machine()
    rows = [speed]
    print(words, "", sep="\n", flush=True)
    for case in given.adapters.split(","):
        count, rank = map(int, case.split("x"))
        rows += asyncio.run(measure(count, rank, given.repeats))
    print(results(rows[1:]))
    write(rows, given.json)
    return 0


async def measure(adapters: int, rank: int, repeats: int) -> list[Row]:
    loaded, drawn = load_model(PretrainedModel(), seed=0), np.random.default_rng(0)
    prompts = drawn.integers(0, 49_000, (REQUESTS, PROMPT)).tolist()
    names = [f"adapter {number}" for number in range(adapters)]
    each = REQUESTS // adapters
    with ThreadPoolExecutor(1) as compute:
        settings = LocalEngineSettings(drafts="off", cached_sequences=0)
        engine = LocalEngine(loaded, settings, compute)
        runs = LoraRuns(loaded.model, Lora().targets)
        for number, name in enumerate(names):
            parameters = runs.add(name, rank, ALPHA, seed=number)
            for path, parameter in parameters.items():
                if "lora_B" in path:
                    parameter.data.normal_(0, 0.01, generator=torch.Generator().manual_seed(number))
            await engine.load_adapter(name, parameters, scale=ALPHA / rank)

        async def asked(numbers: range, adapter: Callable[[int], str | None]) -> list[Completion]:
            return await gather(
                engine.sample(prompts[i], SamplingParams(NEW, seed=i), adapter=adapter(i)) for i in numbers
            )

        async def apart() -> list[Completion]:
            parts = [await asked(range(a * each, a * each + each), lambda i: names[i // each])
                     for a in range(adapters)]  # fmt: skip
            return [one for part in parts for one in part]

        ways: dict[str, Way] = {
            "together": lambda: asked(range(REQUESTS), lambda i: names[i // each]),
            "one adapter after the other": apart,
            "no adapter": lambda: asked(range(REQUESTS), lambda i: None),
        }
        speeds, found = await _measured(engine, ways, repeats)
    together, *others = ways
    if found[together] != found[others[0]]:
        raise SystemExit("requests got other tokens or log-probabilities in the company of other adapters")
    case, ours = f"{adapters} adapters of rank {rank} in one batch", speeds[together]
    rows = [Row(case, "speed", statistics.median(ours), "tokens/CPU s")]
    for way in others:
        ratio = statistics.median(a / b for a, b in zip(ours, speeds[way], strict=True))
        rows.append(Row(case, "theirs", statistics.median(speeds[way]), "tokens/CPU s", way, ratio))
    return rows


async def _measured(
    engine: LocalEngine, ways: dict[str, Way], repeats: int
) -> tuple[dict[str, list[float]], dict[str, list[Completion]]]:
    """Of each way, tokens a second of processor time in every round, and what its requests got."""
    speeds: dict[str, list[float]] = {way: [] for way in ways}
    found: dict[str, list[Completion]] = {}
    for number in range(repeats + 1):  # the first is not counted
        for way, play in ways.items():
            engine.cache.clear()
            began = time.process_time()
            found[way] = await play()
            seconds = time.process_time() - began
            if number:
                speeds[way].append(sum(len(one.tokens) for one in found[way]) / seconds)
    return speeds, found


if __name__ == "__main__":
    sys.exit(main())
