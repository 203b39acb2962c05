"""What failures cost: the share of useful time of a run that loses a part every ten steps.

    undisturbed    the run is left alone                                  t seconds
    parts          every ten steps another one of its parts is killed: `silva rl` starts that one again
    restart        at the same moments all of it is killed, and `silva rl --resume` started, as a
                   launcher would that sees only that the job has ended

    python benchmarks/useful.py --steps 40 --seconds 10 --json useful.json           half an hour

The parts are inference, trainer, orchestrator and, with --ranks 2, the trainer's second rank, in turn. A step
is made of waiting (`delay` of the environments, as for slow tools), so that it takes `--seconds` on any
machine; a checkpoint is written after each. Useful is t over the seconds that the same steps take with kills.
Exit code 1 if a run does not come to its end, or if the shares are not what is asked for.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from common import Row, parser, results, write
from supervised_run import LIMIT, RANK, ROLES, SERVICES, Supervised, supervised, wait_for

import runs

EVERY = 10  # steps from one kill to the next
TARGET = 0.9
TURNS = 4.0  # about so many turns that wait make a step, as the slowest episodes are waited for


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=40, help="of each run (default 40)")
    options.add_argument("--seconds", type=float, default=10.0, help="of a step, about (default 10)")
    options.add_argument("--ranks", type=int, default=2, help="of the trainer (default 2)")
    options.add_argument("--seed", type=int, default=0, help="of when in a step kills come (default 0)")
    given = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="silva-useful-") as name:
        folder = Path(name)
        (folder / "run.toml").write_text(runs.CONFIG)
        delay = f"{given.seconds * 1000 / TURNS:.0f}"
        argv = [
            "rl", f"@{folder / 'run.toml'}", f"--steps={given.steps}", "--output_dir", str(folder), *SERVICES,
            f"--environments.0.delay={delay}", f"--environments.1.delay={delay}", "--eval.every=0",
            "--checkpoint.every=1", f"--trainer.ranks={given.ranks}",
        ]  # fmt: skip
        rng = random.Random(given.seed)
        phases = [rng.random() for _ in range(given.steps // EVERY)]
        victims = [*ROLES, RANK] if given.ranks > 1 else [*ROLES]
        alone = played([*argv, "--name=undisturbed"], folder / "undisturbed", [], [], given.seconds)
        parts = played([*argv, "--name=parts"], folder / "parts", phases, victims, given.seconds)
        restart = played([*argv, "--name=restart"], folder / "restart", phases, [], given.seconds)
    kills = f"{len(phases)} kills in {given.steps} steps"
    rows = [
        Row("undisturbed", "a step", alone / given.steps, "s"),
        Row("plain restart", "useful time", alone / restart, "", kills),
        Row("a part started again", "useful time", alone / parts, "", kills, target=f">= {TARGET}"),
        Row("a part started again", "lost a kill", (parts - alone) / len(phases), "s", "plain restart",
            (restart - alone) / max(1e-9, parts - alone)),
    ]  # fmt: skip
    print(results(rows))
    write(rows, given.json)
    return int(alone / parts < TARGET or parts > restart)


def played(
    argv: Sequence[str], run: Path, phases: Sequence[float], victims: Sequence[str], step: float
) -> float:
    """Seconds from the first step's end to the last one's, with a kill in the middle of each ten steps.

    `phases`: when in a step each comes, 0 to 1. `victims`: who, in turn; nobody: everyone.
    """
    with ExitStack() as stack:
        process = stack.enter_context(supervised(argv))
        wait_or_fail(process, run, 1)
        began = time.monotonic()
        for number, phase in enumerate(phases):
            wait_or_fail(process, run, number * EVERY + EVERY // 2)
            time.sleep(phase * step)
            if victims:
                victim = victims[number % len(victims)]
                if (pid := process.pid(victim)) is None:
                    sys.exit(f"{victim} is not there:\n{process.output}")
                os.kill(pid, signal.SIGKILL)
            else:
                process.kill()
                process = stack.enter_context(supervised([*argv, "--resume"]))
        try:
            code = process.wait(LIMIT + step * 10 * EVERY)
        except subprocess.TimeoutExpired:
            code = -1
        took = time.monotonic() - began
        if code:
            sys.exit(f"the run {run.name} ended with {code}:\n{process.output}")
    return took


def wait_or_fail(process: Supervised, run: Path, steps: int) -> None:
    """Until so many steps have been trained."""
    ledger = run / "ledger.jsonl"

    def done() -> bool:
        trained = ledger.exists() and ledger.read_text().count('"event": "trained"') >= steps
        return trained or process.process.poll() is not None

    wait_for(done, LIMIT)
    if process.process.poll() is not None:
        sys.exit(f"the run {run.name} ended before step {steps}:\n{process.output}")


if __name__ == "__main__":
    sys.exit(main())
