"""Whole runs of several seeds at once (`silva rl --seeds`), against the same seeds one after the other.

    .venv/bin/python benchmarks/seeds.py --json seeds.json          about ten minutes

Multi-turn episodes and a small batch for each seed, so that most of the time goes into decoding. Both ways
run in this process, on one thread; loading the model, evaluations and the last export count too. The
two ways take turns, and ratios are medians of neighbours, together over one after the other. Beside seconds
that this process computed, in which other work on the machine counts little, stand those of the clock. That
the runs are equal, bit for bit, is compared.
"""

from __future__ import annotations

import io
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import Row, machine, parser, results, write

from runs import end_state
from silva.commands.common import as_resolved
from silva.commands.seeds import train_seeds
from silva.commands.train import train
from silva.config.load import Resolved
from silva.config.sections import TinyModel
from silva.models.loading import load_model

WANTED = {4: 0.55, 8: 0.36}


@contextmanager
def _timed(into: list[tuple[float, float]]) -> Iterator[None]:
    computed, began = time.process_time(), time.monotonic()
    yield
    into.append((time.process_time() - computed, time.monotonic() - began))


def main() -> int:
    options = parser(__doc__)
    options.add_argument(
        "--model", default="SmolLM2-135M-Instruct", help="or tiny (default SmolLM2-135M-Instruct)"
    )
    options.add_argument("--seeds", default="4,8", help="how many at once (default 4,8)")
    options.add_argument("--steps", type=int, default=3, help="of each run (default 3)")
    options.add_argument("--groups", default="1x4", help="groups and samples of a step (default 1x4)")
    options.add_argument("--turns", type=int, default=4, help="of an episode (default 4)")
    options.add_argument("--tokens", type=int, default=24, help="of a turn (default 24)")
    options.add_argument("--repeats", type=int, default=1, help="pairs (default 1)")
    given = options.parse_args()
    speed, words = machine()
    print(words, "", sep="\n", flush=True)
    rows, equal = [speed], True
    with tempfile.TemporaryDirectory() as folder:
        model = given.model
        if model == "tiny":
            loaded = load_model(TinyModel(), seed=0)
            model = f"{folder}/tiny"
            loaded.model.save_pretrained(model)
            loaded.tokenizer.save_pretrained(model)
        train(_config(given, model, 0, Path(folder) / "first"))  # what a process does once is not counted
        for count in map(int, given.seeds.split(",")):
            times: dict[str, list[tuple[float, float]]] = {"together": [], "apart": []}
            for repeat in range(given.repeats):
                where = Path(folder) / f"{count}-{repeat}"
                configs = {
                    way: [_config(given, model, seed, where / way) for seed in range(count)] for way in times
                }
                with _timed(times["together"]):
                    train_seeds(configs["together"], output=io.StringIO())
                with _timed(times["apart"]):
                    for each in configs["apart"]:
                        train(each)
                for seed in range(count):
                    one, other = (end_state(where / way / f"seed_{seed}") for way in times)
                    equal = equal and one == other
            case = f"{count} seeds"
            for unit, own in (("CPU s", 0), ("s", 1)):
                together, apart = ([pair[own] for pair in times[way]] for way in ("together", "apart"))
                share = statistics.median(a / b for a, b in zip(together, apart, strict=True))
                rows += [
                    Row(case, "together", statistics.median(together), unit, "one after the other", share,
                        target=f"<= {WANTED.get(count, 1.0)}"),
                    Row(case, "one after the other", statistics.median(apart), unit),
                ]  # fmt: skip
            rows += [Row(case, "same runs, bit for bit", float(equal), "", target=">= 1")]
            print(results(rows[-5:]), flush=True)
    write(rows, given.json)
    return int(not equal)


def _config(given: Any, model: str, seed: int, folder: Path) -> Resolved:
    groups, samples = map(int, given.groups.split("x"))
    return as_resolved(
        {
            "name": f"seed_{seed}", "output_dir": str(folder), "seed": seed, "steps": given.steps,
            "environments": [{"type": "frozen_lake"}],
            "model": {"name": model, "lora": {"rank": 16}},
            "rollout": {
                "groups_per_step": groups, "group_size": samples,
                "limits": {
                    "max_turns": given.turns, "max_turn_tokens": given.tokens, "max_episode_tokens": 2048,
                },
            },
            "algorithm": {"type": "grpo", "drop_zero_variance": False},
            "trainer.self_check": False, "eval.every": 0, "eval.tasks": 1, "placement.threads": 1,
            "monitoring": {"terminal": "off", "tensorboard": False, "report": False},
        }
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
