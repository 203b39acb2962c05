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
from functools import partial
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
synth = {{tasks = 64, samples_per_task = 4, best = 2, only_solved = false}}
monitoring = {{tensorboard = false}}
"""
EPISODES = 512
FILES = {
    "eval": ("evals", ("episodes.parquet", "summary.json")),
    "synth": ("synth", ("episodes.parquet", "summary.json", "dialogues.jsonl")),
}
"""Where each command keeps its results, and which of them never differ."""
STARTS: dict[str, list[int]] = defaultdict(list)
"""By trial, how many episodes each of its starts found written, so that they need not be played again."""


def job(command: str, folder: Path, name: str) -> runs.Job:
    (folder / "eval.toml").write_text(CONFIG)
    STARTS[name].append(written(folder / FILES[command][0] / name))
    argv = [command, "@", "eval.toml", "--name", name]
    return runs.Job(
        argv, str(folder / f"{name}.log"), counts=str(folder / f"{name}.counts"), folder=str(folder)
    )


def written(evaluation: Path) -> int:
    if (evaluation / "journal.jsonl").exists():
        return (evaluation / "journal.jsonl").read_bytes().count(b"\n")
    return EPISODES if (evaluation / "summary.json").exists() else 0


def different(command: str, folder: Path, name: str) -> list[str]:
    played = json.loads((folder / f"{name}.counts").read_text()).get("eval", 0)
    again = [f"{played} episodes played"] if played != EPISODES - STARTS[name][-1] else []
    found, whole = (end_state(command, folder, each) for each in (name, "whole"))
    return again + [file for file in found if found[file] != whole[file]]


def end_state(command: str, folder: Path, name: str) -> dict[str, bytes]:
    """What must not depend on what befell it, by file."""
    place, files = FILES[command]
    return {file: (folder / place / name / file).read_bytes().replace(name.encode(), b"") for file in files}


def main(doc: str | None = __doc__, command: str = "eval") -> int:
    code = runs.kill_at_random(doc, partial(job, command), partial(different, command))
    kills = [found for starts in STARTS.values() for found in starts[1:]]
    print(f"{sum(0 < found < EPISODES for found in kills)} kills between two episodes")
    return code


if __name__ == "__main__":
    sys.exit(main())
