"""Kill `silva sft` at random times, go on with --resume, and compare with a run that was left alone.

    run ──> end state: metrics outside perf/, weights, optimiser, place in the data
    run, SIGKILL, (--resume, SIGKILL,)* --resume ──> the same end state, to the last bit?

    python benchmarks/sft_killed.py --kills 20 --seed 0

Exit code 1 unless every end is the same.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import runs

CONFIG = f"""
steps = 40
environments = [{{type = "{runs.WORLDS}:Parity", eval_size = 8}}]
model = {{type = "tiny", layers = 1, width = 32, heads = 2, kv_heads = 1}}
data.validation = 0.1
data.dialogues_per_step = 8
data.sources = [{{path = "a.jsonl"}}, {{path = "b.jsonl", weight = 0.5}}]
trainer = {{optimizer = {{lr = 1e-3, schedule = "cosine"}}}}
rollout = {{limits = {{max_turn_tokens = 8}}}}
eval = {{every = 10, tasks = 4}}
checkpoint = {{every = 5}}
monitoring = {{terminal = "plain", tensorboard = false, report = false}}
"""


def job(folder: Path, name: str) -> runs.Job:
    if not (folder / "sft.toml").exists():
        write_rows(folder, random.Random(0))
        (folder / "sft.toml").write_text(CONFIG)
    begun = (folder / "runs" / name / "metrics.jsonl").exists()
    again = ["--resume", "--name", name] if begun else ["@", "sft.toml", "--name", name, "--overwrite"]
    return runs.Job(["sft", *again], str(folder / f"{name}.log"), folder=str(folder))


def write_rows(folder: Path, rng: random.Random) -> None:
    for name, count in (("a.jsonl", 150), ("b.jsonl", 60)):
        said = [(f"{rng.randrange(1000)}?", "x" * rng.randrange(1, 30)) for _ in range(count)]
        rows = [
            {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]}
            for asked, answer in said
        ]
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def different(folder: Path, name: str) -> list[str]:
    return runs.differences(folder / "runs" / name, runs.end_state(folder / "runs" / "whole"))


if __name__ == "__main__":
    sys.exit(runs.kill_at_random(__doc__, job, different))
