"""Kill and stop the processes of a run at its worst moments, and compare its end with an undisturbed run.

    run in one process ──> end state: metrics outside perf/, weights, rollouts, optimiser, who was trained
    silva rl with placement.type = "services"
        └── inference, trainer, orchestrator: SIGKILL or SIGSTOP for one of them ──> the same, bit for bit?
    the same with --ranks 4, with --workers 1 (each environment plays in a process of its own), and with
    --placement ray (parts and workers are actors of a cluster of the run's own)

Each of these gets both signals at random times, and SIGKILL at the crash points of silva/ports.py that
it comes through (proof is asked for). Silva leaves a stopped orchestrator alone: it is continued from here.
In a few more runs the supervisor itself, `silva rl`, is killed: nothing of it may be left ten seconds later,
and the run is resumed. How long it takes until somebody says what is lost is measured: the supervisor, or,
once a call needs a worker, the orchestrator.

    python benchmarks/chaos_services.py --kills 10 --seed 0 --json chaos_services.json
    python benchmarks/chaos_services.py --kills 10 --level 1
    python benchmarks/chaos_services.py --kills 5 --placement ray --ranks 4 --workers 1 --minutes 60

Ranks of a trainer sum in another order than one process: a run with them is compared with one that has as
many. At level 0 the end must be the same to the last bit. Above it rollouts depend on the clock, so there the
ledger must say that the run went to its end and trained or dropped each group exactly once.

With `--minutes` no trial begins later than that; each kind of fault comes once before any comes again.
A signal that hits nobody, because its process is not there at that time, is tried again in a new run. Exit
code 1 unless every signal has hit, every end state is right and no process is left.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import chaos
import numpy as np
from supervised_run import LIMIT, MARK, PLACED, RANK, ROLES, WORKER, Supervised, state, supervised, wait_for

import runs
from silva.errors import LedgerError
from silva.storage.ledger import audit, read

OF_TRAINER = ("backward", "optim")
OF_ORCHESTRATOR = ("issue", "seal", "publish", "checkpoint_file", "rename", "latest", "prune", "ledger")
ENVIRONMENTS = 2  # of runs.CONFIG
STOPPED = 6.0  # seconds that an orchestrator stays stopped
MOST_TRIES = 8
SUPERVISORS = 3  # runs whose supervisor is killed


@dataclass(frozen=True)
class Fault:
    """A signal for one role: after a share of the run's duration, or SIGKILL at a crash point "optim:2"."""

    role: str
    signal: str
    share: float = 0.0
    point: str = ""

    def __str__(self) -> str:
        return f"{self.role} {self.signal} {f'at {self.point}' if self.point else f'after {self.share:.0%}'}"


@dataclass
class Trial:
    """What came of a fault.

    Attributes:
        tries: runs that were started for it.
        fired: whether it hit.
        seconds: from the signal until that was said; None if nobody has anything to say.
        left: the commands of processes that were left when it had ended.
    """

    name: str
    fault: Fault
    tries: int = 0
    fired: bool = False
    seconds: float | None = None
    left: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)

    @property
    def right(self) -> bool:
        return self.fired and not self.left and not self.differences

    def fault_and_end(self) -> dict[str, Any]:
        end = {"fired": self.fired, "left": self.left, "differences": self.differences}
        return {"trial": self.name, "fault": str(self.fault)} | end


@dataclass(frozen=True)
class Setting:
    """`reference`: the end state that a run must have; None above level 0, or until there is one."""

    folder: Path
    level: int
    reference: dict[str, Any] | None
    ray: bool = False
    ranks: int = 1
    workers: int = 0

    def argv(self, name: str) -> list[str]:
        folder = str(self.folder)
        run = ["rl", f"@{self.folder / 'chaos.toml'}", "--name", name, "--output_dir", folder]
        placed = PLACED["ray" if self.ray else "services"]
        ranks = [f"--trainer.ranks={self.ranks}"] if self.ranks > 1 else []
        workers = [
            option
            for number in range(ENVIRONMENTS if self.workers else 0)
            for option in (f"--environments.{number}.workers={self.workers}",
                           f'--environments.{number}.variables=["{MARK}"]')
        ]  # fmt: skip
        level = f"--rollout.max-async-level={self.level}"
        return [*run, *chaos.OPTIONS, *placed, *ranks, *workers, level]

    @property
    def roles(self) -> tuple[str, ...]:
        return (*ROLES, *[RANK] * (self.ranks > 1), *[WORKER] * (self.workers > 0))

    def words(self, fault: Fault) -> tuple[str, ...]:
        """What is said of it."""
        if fault.role == WORKER:
            return ("a worker of ", " is lost")
        part = "trainer" if fault.role == RANK else fault.role
        stopped = fault.signal == "SIGSTOP"
        if self.ray and part != "orchestrator":
            return f"silva: {part} ", "has not answered for" if stopped else "has died"
        if fault.role == RANK:
            return f"silva: {part} ", "ended with exit code 1"
        return f"silva: {part} ", "was stopped (SIGSTOP)" if stopped else "was killed (SIGKILL)"

    def wrong(self, run: Path) -> list[str]:
        """What of a finished run is not as it must be."""
        if self.reference is not None:
            return runs.differences(run, self.reference)
        try:
            return audit(read(run / "ledger.jsonl"), finished=True)
        except (OSError, LedgerError) as error:
            return [f"unreadable: {error}"]


def perform(trial: Trial, setting: Setting, duration: float, end: float = math.inf) -> None:
    """Run until the fault has hit, and fill in what came of it; nothing after `end`."""
    if time.monotonic() > end:
        return
    fault, rng = trial.fault, random.Random(trial.name)
    while trial.tries < MOST_TRIES and not trial.fired:
        trial.tries += 1
        _once(trial, fault, setting, duration)
        if not fault.point:  # another time: at this one there was nobody to hit
            fault = Fault(fault.role, fault.signal, share=rng.random())
    print("." if trial.right else f"\n{json.dumps(trial.fault_and_end())}", end="", flush=True)


def _once(trial: Trial, fault: Fault, setting: Setting, duration: float) -> None:
    folder = setting.folder
    run, proof = folder / trial.name, folder / f"{trial.name}.proof"
    for path in (run, proof):
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    env = {"SILVA_CRASH_PROOF": str(proof)}
    if fault.point:
        env["SILVA_CRASH" if fault.role == "orchestrator" else f"SILVA_CRASH_{fault.role.upper()}"] = (
            fault.point
        )
    argv = setting.argv(trial.name)
    with supervised(argv, env) as process:
        hit = None if fault.point else _hit(process, fault, fault.share * duration)
        if hit is None and not fault.point:
            return
        try:
            code = process.wait()
        except subprocess.TimeoutExpired:
            trial.fired = True
            trial.differences = [f"no end within {LIMIT:g} s: {process.output[-400:]}"]
            return
        if fault.point:
            proven = proof.exists() and proof.read_text() == fault.point.partition(":")[0]
            hit = proof.stat().st_mtime if proven else None
        told = process.said(*setting.words(fault))
        unsaid = fault.role == "supervisor" or (fault.role, fault.signal) == ("orchestrator", "SIGSTOP")
        if hit is None or (told is None and not unsaid):
            if code:  # it hit something, if not what it was meant for: not to be tried again
                trial.fired, trial.differences = True, [f"exit code {code}: {process.output[-400:]}"]
            return
        trial.fired, trial.seconds = True, told - hit if told is not None else None
        trial.left = process.left()
        output = process.output
    if fault.role == "supervisor":
        with supervised([*argv, "--resume"]) as process:
            code, output = process.wait(), process.output
    trial.differences = [f"exit code {code}: {output[-400:]}"] if code else setting.wrong(run)
    shutil.rmtree(run, ignore_errors=True)


def _hit(process: Supervised, fault: Fault, delay: float) -> float | None:
    """Sends the signal after so many seconds, once somebody has that role: the time; None if nobody has."""
    with suppress(subprocess.TimeoutExpired):
        process.process.wait(delay)

    def found() -> int | None:
        return process.process.pid if fault.role == "supervisor" else process.pid(fault.role)

    wait_for(lambda: found() or process.process.poll() is not None, LIMIT)
    pid = found()
    if pid is None or process.process.poll() is not None:
        return None
    hit = time.time()
    try:
        os.kill(pid, getattr(signal, fault.signal))
        if (fault.role, fault.signal) == ("orchestrator", "SIGSTOP"):
            stopped = wait_for(lambda: state(pid) == "T", 1.0)
            wait_for(lambda: process.process.poll() is not None, STOPPED)
            os.kill(pid, signal.SIGCONT)
            return hit if stopped else None
    except ProcessLookupError:
        return None
    return hit


def plan(
    kills: int,
    seed: int,
    counts: Mapping[str, int],
    only: Sequence[str] = ("",),
    roles: Sequence[str] = ROLES,
) -> list[Trial]:
    """`kills` of each kind for each of the roles; crash points one after the other, at a random count.

    Of these the ones with one of the texts of `only` in "trial-7: trainer SIGKILL at optim:2".
    """
    rng = random.Random(seed)
    faults = []
    for role in roles:
        for name in ("SIGKILL", "SIGSTOP"):
            faults += [Fault(role, name, share=rng.random()) for _ in range(kills)]
        points = {"trainer": OF_TRAINER, "orchestrator": OF_ORCHESTRATOR}.get(role, ())
        for point in (points * kills)[:kills]:
            faults.append(Fault(role, "SIGKILL", point=f"{point}:{rng.randint(1, counts[point])}"))
    faults += [Fault("supervisor", "SIGKILL", share=rng.random()) for _ in range(min(kills, SUPERVISORS))]
    trials = [Trial(f"trial-{number}", fault) for number, fault in enumerate(faults)]
    kinds = Counter[tuple[str, str, bool]]()
    turns = dict[str, int]()  # of its kind
    for trial in trials:
        kind = trial.fault.role, trial.fault.signal, bool(trial.fault.point)
        kinds[kind] += 1
        turns[trial.name] = kinds[kind]
    chosen = [each for each in trials if any(text in f"{each.name}: {each.fault}" for text in only)]
    return sorted(chosen, key=lambda trial: turns[trial.name])


def undisturbed(setting: Setting) -> float:
    """Seconds of a run whose parts nobody hits; its end state must be right."""
    began = time.monotonic()
    with supervised(setting.argv("services")) as process:
        code, duration = process.wait(), time.monotonic() - began
        problems = [] if code else setting.wrong(setting.folder / "services")
        if code or problems:
            sys.exit(
                f"the undisturbed run as services ended with {code}, different: {problems}\n{process.output}"
            )
        if left := process.left():
            sys.exit(f"the undisturbed run left processes: {left}")
    return duration


def result(trials: Sequence[Trial], seed: int) -> dict[str, Any]:
    groups: dict[tuple[str, str], list[Trial]] = defaultdict(list)
    for trial in trials:
        groups[trial.fault.role, f"{trial.fault.signal}{' at a point' if trial.fault.point else ''}"].append(
            trial
        )
    rows = []
    for (role, name), members in groups.items():
        seconds = [trial.seconds for trial in members if trial.seconds is not None]
        p50, p99 = (float(np.percentile(seconds, q)) if seconds else None for q in (50, 99))
        rows.append({
            "role": role, "signal": name, "trials": len(members), "tries": sum(t.tries for t in members),
            "fired": sum(t.fired for t in members),
            "right": sum(t.fired and not t.differences for t in members),
            "seconds_p50": p50, "seconds_p99": p99, "left": sum(len(t.left) for t in members),
        })  # fmt: skip
    return {"seed": seed, "rows": rows, "faults": [t.fault_and_end() for t in trials if not t.right]}


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    print(f"{'role':<14}{'signal':<20}{'tries':>6}{'fired':>6}{'right':>7}{'p50':>9}{'p99':>9}{'left':>6}")
    for row in rows:
        p50, p99 = (f"{s:.2f} s" if (s := row[f"seconds_{q}"]) is not None else "-" for q in ("p50", "p99"))
        print(
            f"{row['role']:<14}{row['signal']:<20}{row['tries']:>6}{row['fired']:>6}{row['right']:>7}"
            f"{p50:>9}{p99:>9}{row['left']:>6}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=10, help="of each kind, for each role")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[""],
        metavar="TEXT",
        help='faults that contain one of these: "trial-7:", orchestrator, "trainer SIGKILL at"',
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--level", type=int, default=0, help="rollout.max_async_level (default 0)")
    parser.add_argument("--placement", choices=("services", "ray"), default="services")
    parser.add_argument("--ranks", type=int, default=1, help="of the trainer (default 1)")
    parser.add_argument("--workers", type=int, default=0, help="of each environment (default 0)")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="runs at a time")
    parser.add_argument("--minutes", type=float, default=math.inf, help="in which trials may begin")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    options = parser.parse_args()
    runs.prepare()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="silva-chaos-") as name:
        folder = Path(name)
        (folder / "chaos.toml").write_text(runs.CONFIG)
        reference, counts, _ = chaos.refer(folder)
        alone = None if options.level or options.ranks > 1 else reference
        on_ray = options.placement == "ray"
        setting = Setting(folder, options.level, alone, on_ray, options.ranks, options.workers)
        duration = undisturbed(setting)
        if options.ranks > 1 and not options.level:
            setting = replace(setting, reference=runs.end_state(folder / "services"))
        trials = plan(options.kills, options.seed, counts, options.only, setting.roles)
        if not trials:
            parser.error(f"argument --only: no fault contains any of {options.only}")
        with ThreadPoolExecutor(options.jobs) as pool:
            end = began + 60 * options.minutes
            list(pool.map(lambda trial: perform(trial, setting, duration, end), trials))
    print()
    trials = [trial for trial in trials if trial.tries]
    found = result(trials, options.seed) | {"seconds": round(time.monotonic() - began)}
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    show(found["rows"])
    fired, same = (sum(row[key] for row in found["rows"]) for key in ("fired", "right"))
    print(f"{len(trials)} faults, {fired} hit, {same} right end states, {found['seconds']} s")
    return int(bool(found["faults"]))


if __name__ == "__main__":
    sys.exit(main())
