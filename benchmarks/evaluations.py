"""Kill `silva eval` at random times, give the same command again, and compare with one that was left alone.

    evaluation ──> episodes.parquet, summary.json
    evaluation, SIGKILL, (again, SIGKILL,)* again ──> the same bytes? each episode played to its end once?

    python benchmarks/evaluations.py --kills 20 --seed 0

Exit code 1 unless every end is the same, and no episode that had been written was played again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
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
FILES = ("episodes.parquet", "summary.json")


def job(folder: Path, name: str) -> runs.Job:
    argv = ["eval", "@", "eval.toml", "--name", name]
    return runs.Job(
        argv, str(folder / f"{name}.log"), counts=str(folder / f"{name}.counts"), folder=str(folder)
    )


def end_state(folder: Path, name: str) -> list[bytes]:
    return [(folder / "evals" / name / file).read_bytes().replace(name.encode(), b"") for file in FILES]


def written(folder: Path, name: str, total: int) -> int:
    """Episodes that need not be played again."""
    path = folder / "evals" / name
    if (path / "journal.jsonl").exists():
        return (path / "journal.jsonl").read_bytes().count(b"\n")
    return total if (path / "summary.json").exists() else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng, folder = random.Random(given.seed), Path(tempfile.mkdtemp(prefix="silva-evals-"))
    (folder / "eval.toml").write_text(CONFIG)
    runs.prepare()
    began = time.monotonic()
    assert runs.wait(runs.start(job(folder, "whole"))) == 0, (folder / "whole.log").read_text()
    seconds, total = time.monotonic() - began, json.loads((folder / "whole.counts").read_text())["eval"]
    print(f"alone: {total} episodes in {seconds:.1f} s")
    kills = wrong = trials = during = 0
    while kills < given.kills:
        name, trials = f"trial-{trials}", trials + 1
        while True:
            before = written(folder, name, total)
            pid = runs.start(job(folder, name))
            if kills < given.kills and rng.random() < 0.75:
                time.sleep(rng.uniform(0, seconds))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            status = runs.wait(pid)
            if status == 0:
                break
            assert status == -signal.SIGKILL, (folder / f"{name}.log").read_text()
            kills, during = kills + 1, during + (before < written(folder, name, total) < total)
        played = json.loads((folder / f"{name}.counts").read_text()).get("eval", 0)
        good = end_state(folder, name) == end_state(folder, "whole") and played == total - before
        wrong += not good
        print(f"{name}: {'the same' if good else 'DIFFERENT'}; {kills} kills so far", flush=True)
    print(f"{kills} kills in {trials} evaluations, {during} of them between two episodes; {wrong} differ")
    shutil.rmtree(folder)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
