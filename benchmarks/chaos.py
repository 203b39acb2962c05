"""Kill a run again and again, resume it, and compare what comes out with a run that was left alone.

    reference run ──> end state: metrics outside perf/, weights, rollouts, optimiser, who was trained
    run, SIGKILL, (run --resume, SIGKILL,)* run --resume ──> the same end state, to the last bit?

Kills come at the named crash points of silva/ports.py (each at least once; proof is asked for) and at
random times. Before every restart the checkpoints are verified here: a restart that goes on from another
one than the newest whole one, or from one that is torn, is a wrong load.

    python benchmarks/chaos.py --kills 200 --seed 0 --json chaos.json

Exit code 1 unless every kill happened where it says, every end state is the same and no load was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import runs
from silva.errors import CheckpointError
from silva.ports import CRASH_POINTS
from silva.storage.checkpoints import verify
from silva.storage.ledger import Record, read

OPTIONS = ["--steps=6", "--eval.every=3", "--eval.tasks=12", "--checkpoint.keep=1"]
AGAIN = ("ledger", "checkpoint_file", "rename", "latest", "prune")
"""Crash points that any resumed run comes through once more, wherever it stands."""
Lives = Generator[tuple[runs.Job, float | None], int | None, None]
LIMIT = 300.0  # seconds for one run, many times what it needs


@dataclass(frozen=True)
class Kill:
    """At the `count`-th time at a crash point, or (`point` "time") after a share of the run's duration."""

    point: str
    count: int = 1
    share: float = 0.0

    def __str__(self) -> str:
        return f"after {self.share:.0%}" if self.point == "time" else f"{self.point}:{self.count}"


@dataclass
class Trial:
    """One run with all that befell it."""

    name: str
    kills: list[Kill]
    missed: list[str] = field(default_factory=list)  # kills that did not happen where they say
    wrong_loads: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    restarts: int = 0


def life(trial: Trial, folder: Path, duration: float) -> Lives:
    """The jobs of a trial; each is sent back its exit status. A number of seconds means: kill it then."""
    run, log = folder / trial.name, folder / f"{trial.name}.log"
    argv = ["rl", f"@{folder / 'chaos.toml'}", "--name", trial.name, "--output_dir", str(folder), *OPTIONS]
    for number, kill in enumerate(trial.kills):
        proof = folder / f"{trial.name}.proof{number}"
        crash = "" if kill.point == "time" else f"{kill.point}:{kill.count}"
        before = _standing(run)
        for attempt in range(6):
            delay = None if crash else kill.share * duration * 0.9**attempt
            began = time.monotonic()
            status = yield runs.Job(argv, str(log), crash, proof=str(proof)), delay
            if crash or status == -signal.SIGKILL:
                break
            duration = time.monotonic() - began  # the machine is faster than it was: again, killed earlier
            shutil.rmtree(run, ignore_errors=True)
        _check_load(trial, run, before)
        proven = not crash or (proof.exists() and proof.read_text() == kill.point)
        if status != -signal.SIGKILL or not proven:
            trial.missed.append(f"{kill}: exit status {status}, {'proven' if proven else 'no proof'}")
            return
        argv = [*argv, "--resume"] if number == 0 else argv
    before = _standing(run)
    status = yield runs.Job(argv, str(log)), None
    _check_load(trial, run, before)
    if status != 0:
        trial.differences.append(f"the resumed run ended with {status}: {log.read_text()[-400:]}")


def _standing(run: Path) -> tuple[int, list[str], int]:
    """Before a (re)start: newest whole checkpoint (0: none), what is torn, records in the ledger."""
    whole, torn = [0], []
    for path in (run / "checkpoints").glob("step_*"):
        try:
            whole.append(verify(path).step)
        except CheckpointError as error:
            torn.append(str(error))
    return max(whole), torn, len(_records(run))


def _records(run: Path) -> list[Record]:
    return read(run / "ledger.jsonl") if (run / "ledger.jsonl").exists() else []


def _check_load(trial: Trial, run: Path, before: tuple[int, list[str], int]) -> None:
    """A restart rolls the ledger back to the checkpoint it goes on from: was it the right one?"""
    expected, torn, known = before
    trial.restarts += known > 0
    trial.wrong_loads += [f"torn checkpoint under its final name: {text}" for text in torn]
    steps = [r.fields["step"] for r in _records(run)[known:] if r.event == "rolled_back"]
    if steps not in ([], [expected]):
        trial.wrong_loads.append(f"went on after step {steps}, the newest whole checkpoint is {expected}")


def plan(kills: int, seed: int, counts: dict[str, int]) -> list[Trial]:
    """Every crash point once; then, at random: points, times, and up to three kills of one run."""
    rng = random.Random(seed)
    trials = [[Kill(point, rng.randint(1, counts[point]))] for point in CRASH_POINTS[:kills]]
    left = kills - len(trials)
    while left:
        point = rng.choice(CRASH_POINTS)
        first = (
            Kill("time", share=rng.random())
            if rng.random() < 0.5
            else Kill(point, rng.randint(1, counts[point]))
        )
        again = [Kill(rng.choice(AGAIN)) for _ in range(rng.choice((0, 0, 1, 2)))]
        trials.append([first, *again][:left])
        left -= len(trials[-1])
    return [Trial(f"trial-{number}", kills) for number, kills in enumerate(trials)]


def perform(trials: list[Trial], folder: Path, duration: float, reference: dict[str, Any], jobs: int) -> None:
    """Run all trials, `jobs` at a time, and fill in what came of them."""
    waiting, running = list(reversed(trials)), {}

    def send(trial: Trial, lives: Lives, status: int | None) -> None:
        try:
            job, delay = lives.send(status)
        except StopIteration:
            if not trial.missed and not trial.differences:
                trial.differences = runs.differences(folder / trial.name, reference)
            print(
                "." if not (trial.missed or trial.differences or trial.wrong_loads) else "F",
                end="",
                flush=True,
            )
            shutil.rmtree(folder / trial.name, ignore_errors=True)
        else:
            deadline = time.monotonic() + (LIMIT if delay is None else delay)
            running[runs.start(job)] = trial, lives, deadline, delay is None

    while waiting or running:
        while waiting and len(running) < jobs:
            trial = waiting.pop()
            send(trial, life(trial, folder, duration), None)
        for pid, (trial, lives, deadline, stuck) in list(running.items()):
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                if stuck and not trial.missed:
                    trial.missed.append(f"no end within {LIMIT:g} s")
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del running[pid]
                send(trial, lives, os.waitstatus_to_exitcode(status))
        time.sleep(0.002)
    print()


def refer(folder: Path) -> tuple[dict[str, Any], dict[str, int], float]:
    """The run that is left alone: its end state, how often it comes to each crash point, its seconds."""
    argv = ["rl", f"@{folder / 'chaos.toml'}", "--name", "reference", "--output_dir", str(folder), *OPTIONS]
    log, counts, began = folder / "reference.log", folder / "counts.json", time.monotonic()
    status = runs.wait(runs.start(runs.Job(argv, str(log), counts=str(counts))))
    if status != 0:
        sys.exit(f"the reference run ended with {status}:\n{log.read_text()}")
    duration = time.monotonic() - began
    if problems := runs.differences(folder / "reference", state := runs.end_state(folder / "reference")):
        sys.exit("the reference run itself is not right:\n" + "\n".join(problems))
    return state, json.loads(counts.read_text()), duration


def result(trials: list[Trial], seed: int) -> dict[str, Any]:
    finished = [t for t in trials if not t.missed]
    points: dict[str, dict[str, int]] = defaultdict(lambda: {"kills": 0, "runs": 0, "identical": 0})
    for trial in trials:
        for kill in trial.kills:
            points[kill.point]["kills"] += 1
        for point in {kill.point for kill in trial.kills}:
            points[point]["runs"] += 1
            points[point]["identical"] += not trial.missed and not trial.differences
    return {
        "seed": seed,
        "kills": sum(len(t.kills) for t in trials),
        "missed": sum(len(t.missed) for t in trials),
        "runs": len(trials),
        "restarts": sum(t.restarts for t in trials),
        "identical": sum(not t.differences for t in finished),
        "wrong_loads": sum(len(t.wrong_loads) for t in trials),
        "points": points,
        "faults": [
            {"kills": [str(k) for k in t.kills], "missed": t.missed, "wrong_loads": t.wrong_loads,
             "differences": t.differences}
            for t in trials if t.missed or t.wrong_loads or t.differences
        ],
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    options = parser.parse_args()
    runs.prepare()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="silva-chaos-") as name:
        folder = Path(name)
        (folder / "chaos.toml").write_text(runs.CONFIG)
        reference, counts, duration = refer(folder)
        trials = plan(options.kills, options.seed, counts)
        perform(trials, folder, duration, reference, options.jobs)
    found = result(trials, options.seed) | {"seconds": round(time.monotonic() - began)}
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{'point':<16}{'kills':>6}{'runs':>6}{'identical':>11}")
    for point, row in found["points"].items():
        print(f"{point:<16}{row['kills']:>6}{row['runs']:>6}{row['identical']:>11}")
    print(
        f"{found['kills']} kills ({found['missed']} did not happen), {found['restarts']} restarts of "
        f"{found['runs']} runs, {found['identical']} identical, {found['wrong_loads']} wrong loads, "
        f"{found['seconds']} s"
    )
    for fault in found["faults"]:
        print(json.dumps(fault))
    return int(bool(found["faults"]))


if __name__ == "__main__":
    sys.exit(main())
