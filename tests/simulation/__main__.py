"""Play seeds of the simulation, on all cores, or one of them to read what happens: docs/simulation.md.

    python -m tests.simulation --seeds 100000        make simulate ARGS="--seeds 100000"
    python -m tests.simulation --seed 4711           what befell it, life by life

Exit code 1 if a seed hangs, ends with neither progress nor a named error, or trains a group other than once.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from silva.process import PARENT, tie_to_parent

CHUNK = 25  # seeds that a process plays at a time
SHOWN = 10  # faults that are shown in full


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--seeds", type=int, default=1000, help="how many to play")
    parser.add_argument("--start", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="play this one alone and print what happens")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: nothing here computes
    memory = Path("/dev/shm")
    base = memory if os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="silva-simulation-", dir=base) as folder:
        if options.seed is not None:
            return replay(options.seed, Path(folder))
        found = play(range(options.start, options.start + options.seeds), options.jobs, Path(folder))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    report(found)
    return int(bool(found["faults"]))


def replay(seed: int, folder: Path) -> int:
    from tests.simulation.world import simulate

    verdict = simulate(seed, folder / "run", print)
    print(f"seed {seed}: {verdict.end or 'no end'} after {len(verdict.lives)} lives, "
          f"{verdict.seconds:.1f} virtual seconds, {verdict.turns} turns of the loop")  # fmt: skip
    for problem in verdict.problems:
        print(f"WRONG: {problem}")
    return int(bool(verdict.problems))


def play(seeds: range, jobs: int, folder: Path) -> dict[str, Any]:
    """Play them in `jobs` processes; progress goes to standard error."""
    import tests.simulation.world  # noqa: F401 (once, before the forks)

    chunks = [seeds[i : i + CHUNK] for i in range(0, len(seeds), CHUNK)]
    sums = {
        "seeds": 0,
        "ends": Counter[str](),
        "lives": Counter[str](),
        "fired": Counter[str](),
        "compared": 0,
    }
    found: dict[str, Any] = {**sums, "faults": {}}
    began = time.monotonic()
    os.environ[PARENT] = str(os.getpid())  # nobody is left if this process is killed
    with ProcessPoolExecutor(jobs, get_context("fork"), tie_to_parent) as pool:
        waiting = {pool.submit(_chunk, chunk, folder): chunk for chunk in chunks}
        for each in as_completed(waiting):
            try:
                part = each.result()
            except BrokenProcessPool:
                found["faults"][waiting[each][0]] = [
                    "a process that played this seed or one of the next died"
                ]
                break
            for name in sums:
                found[name] += part[name]
            found["faults"] |= part["faults"]
            for seed, problems in part["faults"].items():
                print(f"\rseed {seed}: {problems[0][:200]}", file=sys.stderr)
            seconds = time.monotonic() - began
            print(
                f"\r{found['seeds']:,} of {len(seeds):,} seeds, {found['seeds'] / seconds:.0f}/s, "
                f"{len(found['faults'])} faults ",
                end="", file=sys.stderr, flush=True,
            )  # fmt: skip
    print(file=sys.stderr)
    return found | {"seconds": round(time.monotonic() - began, 1)}


def _chunk(seeds: range, folder: Path) -> dict[str, Any]:
    from tests.simulation.world import simulate

    root = folder / f"{os.getpid()}"
    ends, lives, fired = Counter[str](), Counter[str](), Counter[str]()
    faults, compared = dict[int, list[str]](), 0
    for seed in seeds:
        verdict = simulate(seed, root)
        ends[verdict.end or "none"] += 1
        lives.update(end.partition(":")[0] for end in verdict.lives)
        fired += verdict.fired
        compared += verdict.compared
        if verdict.problems:
            faults[seed] = verdict.problems
    shutil.rmtree(root, ignore_errors=True)
    return {"seeds": len(seeds), "ends": ends, "lives": lives, "fired": fired, "compared": compared,
            "faults": faults}  # fmt: skip


def report(found: dict[str, Any]) -> None:
    print(f"{found['seeds']:,} seeds in {found['seconds']:g} s: "
          + ", ".join(f"{count:,} {end}" for end, count in found["ends"].most_common())
          + f"; {found['compared']:,} ended as the undisturbed run, to the bit")  # fmt: skip
    print("lives ended: " + ", ".join(f"{name} {count:,}" for name, count in found["lives"].most_common()))
    print("happened: " + ", ".join(f"{name} {count:,}" for name, count in found["fired"].most_common()))
    for seed, problems in sorted(found["faults"].items())[:SHOWN]:
        print(f"\nseed {seed} (python -m tests.simulation --seed {seed}):")
        for problem in problems[:5]:
            print(f"  {problem}")
    if found["faults"]:
        print(
            f"\n{len(found['faults'])} seeds went wrong: {', '.join(map(str, sorted(found['faults'])[:50]))}"
        )


if __name__ == "__main__":
    sys.exit(main())
