"""Kill `silva sft` at random times, go on with --resume, and compare with a run that was left alone.

    run ──> end state: metrics outside perf/, weights, optimiser, place in the data
    run, SIGKILL, (--resume, SIGKILL,)* --resume ──> the same end state, to the last bit?

    python benchmarks/sft_killed.py --kills 20 --seed 0

Exit code 1 unless every end is the same.
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


def write_rows(folder: Path, rng: random.Random) -> None:
    for name, count in (("a.jsonl", 150), ("b.jsonl", 60)):
        said = [(f"{rng.randrange(1000)}?", "x" * rng.randrange(1, 30)) for _ in range(count)]
        rows = [
            {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]}
            for asked, answer in said
        ]
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng, folder = random.Random(given.seed), Path(tempfile.mkdtemp(prefix="silva-sft-"))
    (folder / "sft.toml").write_text(CONFIG)
    write_rows(folder, rng)
    runs.prepare()

    def job(name: str) -> runs.Job:
        begun = (folder / "runs" / name / "metrics.jsonl").exists()
        again = ["--resume", "--name", name] if begun else ["@", "sft.toml", "--name", name, "--overwrite"]
        return runs.Job(["sft", *again], str(folder / f"{name}.log"), folder=str(folder))

    began = time.monotonic()
    assert runs.wait(runs.start(job("whole"))) == 0, (folder / "whole.log").read_text()
    seconds, kills, wrong, trials = time.monotonic() - began, 0, 0, 0
    reference = runs.end_state(folder / "runs" / "whole")
    print(f"alone: {seconds:.1f} s")
    while kills < given.kills:
        name, trials = f"trial-{trials}", trials + 1
        while True:
            pid = runs.start(job(name))
            if kills < given.kills and rng.random() < 0.8:
                time.sleep(rng.uniform(0, seconds))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            status = runs.wait(pid)
            if status == 0:
                break
            assert status == -signal.SIGKILL, (folder / f"{name}.log").read_text()
            kills += 1
        different = runs.differences(folder / "runs" / name, reference)
        wrong += bool(different)
        print(f"{name}: {', '.join(different) or 'the same'}; {kills} kills so far", flush=True)
    print(f"{kills} kills in {trials} runs; {wrong} differ")
    shutil.rmtree(folder)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
