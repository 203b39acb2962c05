"""Kill `silva eval` at random times, give the same command again, and compare with one that was left alone.

    evaluation ──> episodes.parquet, summary.json
    evaluation, SIGKILL, (again, SIGKILL,)* again ──> the same bytes? each episode played to its end once?

    python benchmarks/evaluations.py --kills 20 --seed 0

Exit code 1 unless every end is the same, and no episode that had been written was played again.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

import runs

CONFIG = f"""
environments = [
    {{type = "{runs.WORLDS}:Parity", eval_size = 64, delay = 5.0}},
    {{type = "{runs.WORLDS}:Letters", eval_size = 64, delay = 5.0}},
]
model = {{type = "tiny", layers = 1, width = 32, heads = 2, kv_heads = 1, context = 256}}
rollout = {{limits = {{max_turn_tokens = 16, max_episode_tokens = 200}}}}
eval = {{tasks = 64, samples_per_task = 4}}
monitoring = {{tensorboard = false}}
"""
EPISODES = 512
FILES = ("episodes.parquet", "summary.json")
STARTS: dict[str, list[int]] = defaultdict(list)
"""By trial, how many episodes each of its starts found written, so that they need not be played again."""


def job(folder: Path, name: str) -> runs.Job:
    (folder / "eval.toml").write_text(CONFIG)
    STARTS[name].append(written(folder / "evals" / name))
    argv = ["eval", "@", "eval.toml", "--name", name]
    return runs.Job(
        argv, str(folder / f"{name}.log"), counts=str(folder / f"{name}.counts"), folder=str(folder)
    )


def written(evaluation: Path) -> int:
    if (evaluation / "journal.jsonl").exists():
        return (evaluation / "journal.jsonl").read_bytes().count(b"\n")
    return EPISODES if (evaluation / "summary.json").exists() else 0


def different(folder: Path, name: str) -> list[str]:
    played = json.loads((folder / f"{name}.counts").read_text()).get("eval", 0)
    again = [f"{played} episodes played"] if played != EPISODES - STARTS[name][-1] else []
    return again + [file for file in FILES if content(folder, name, file) != content(folder, "whole", file)]


def content(folder: Path, name: str, file: str) -> bytes:
    return (folder / "evals" / name / file).read_bytes().replace(name.encode(), b"")


def main() -> int:
    code = runs.kill_at_random(__doc__, job, different)
    kills = [found for starts in STARTS.values() for found in starts[1:]]
    print(f"{sum(0 < found < EPISODES for found in kills)} kills between two episodes")
    return code


if __name__ == "__main__":
    sys.exit(main())
