"""Start runs of Silva quickly, end them where one likes, compare them: for the tests and for chaos.py,
evaluations.py and sft_killed.py.

    parent (has imported torch once) --fork--> silva rl ...   killed or interrupted at a named place

A forked child costs a tenth of a second where a new interpreter takes five. `python benchmarks/runs.py`
serves: one JSON object of `Job` a line on standard input, one line `[exit status, proof]` back.
The parent must never have computed anything: a fork of a process with busy threads may hang.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import hashlib
import importlib
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from silva.errors import LedgerError
from silva.storage.ledger import audit, history, read

LIMIT = 900.0  # seconds; a run that hangs ends with status 1 and says where each of its threads stands
WORLDS = Path(__file__).resolve().parents[1] / "tests" / "worlds.py"
CONFIG = f"""
steps = 4

[model]
type = "tiny"
layers = 1
width = 32
heads = 2
kv_heads = 1
context = 256

[[environments]]
type = "{WORLDS}:Parity"
delay = 3.0

[[environments]]
type = "{WORLDS}:Letters"
delay = 3.0

[rollout]
groups_per_step = 5
group_size = 4

[rollout.limits]
max_turn_tokens = 6
max_episode_tokens = 128

[trainer]
updates_per_step = 2
micro_batch_tokens = 256

[trainer.optimizer]
lr = 1e-2

[eval]
every = 2
tasks = 8

[checkpoint]
every = 2

[monitoring]
terminal = "plain"
tensorboard = false
report = false
"""
"""A run of a few seconds: two environments that take their time at random, evaluation, checkpoints."""

LATE = (
    "pyarrow.dataset",
    "silva.commands.evaluate",
    "silva.commands.synth",
    "silva.engines.local.engine",
    "silva.placement.here",
    "silva.rollouts.linear",
    "silva.trainer.local",
    "tomlkit",
)
"""What a run imports only when it needs it."""

SIGNALS_AT = {
    "load": "silva.assembly:load_model",
    "warm_start": "silva.orchestrator.scripted:play",
    "eval": "silva.evaluation.evaluator:play",
    "kept": "silva.evaluation.store:rollout_row",
    "episodes": "silva.evaluation.store:encode_rollouts",
    "rows": "silva.commands.synth:select",
    "report": "silva.commands.evaluate:write_report",
    "rollout": "silva.rollouts.strategy:play",
    "export": "silva.trainer.learner:export_model",
}
"""Places besides the crash points: the k-th call of a function."""


@dataclass(frozen=True)
class Job:
    """`crash` and `interrupt` are "place:k"; `proof` is a file that gets the name of the place reached.

    `signals`: how many are sent at `interrupt`, and `signal` which. A run that stops itself is continued.
    """

    argv: Sequence[str]
    output: str = os.devnull
    crash: str = ""
    interrupt: str = ""
    proof: str = ""
    signals: int = 1
    signal: str = "SIGINT"
    counts: str = ""  # a file that gets how often each place was come through
    folder: str = ""  # where it runs; here if it is not given
    faults: int = 0  # every k-th write to the disk fails; `proof` gets how many did


def prepare() -> None:
    """Import what every child would; one thread each, so that forks are safe."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import silva.commands.train  # noqa: F401
    from silva.config.schema import run_config
    from silva.registries import REGISTRIES

    run_config(REGISTRIES)
    for module in LATE:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    setattr(gc, "unfreeze", lambda: None)  # noqa: B010  (a child's collections leave all of this out)


def start(job: Job) -> int:
    """Fork a child that runs `silva` with `job.argv`; its process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        return pid
    code = 70
    try:
        output = os.open(job.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for stream in (1, 2):
            os.dup2(output, stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        code = _child(job)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait(pid: int) -> int:
    """The exit status as of `subprocess`: negative for a signal."""
    while os.WIFSTOPPED(status := os.waitpid(pid, os.WUNTRACED)[1]):
        os.kill(pid, signal.SIGCONT)
    return os.waitstatus_to_exitcode(status)


def kill_at_random(
    doc: str | None, job: Callable[[Path, str], Job], different: Callable[[Path, str], Sequence[str]]
) -> int:
    """Trial after trial: start a job, perhaps kill it at a random time, and start it again until it ends.

    Args:
        doc: the docstring of the benchmark; its first line is its help.
        job: of a trial, by its name in a folder; asked before each start. The trial "whole" is left alone.
        different: what of a trial that has ended is not as in "whole".

    Returns:
        The exit code: 1 if any trial differs.
    """
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng, kills, wrong, trials = random.Random(given.seed), 0, 0, 0
    prepare()
    with tempfile.TemporaryDirectory(prefix="silva-killed-") as temporary:
        folder, began = Path(temporary), time.monotonic()
        assert wait(start(job(folder, "whole"))) == 0, (folder / "whole.log").read_text()
        seconds = time.monotonic() - began
        print(f"alone: {seconds:.1f} s")
        while kills < given.kills:
            name, trials = f"trial-{trials}", trials + 1
            while True:
                pid = start(job(folder, name))
                if kills < given.kills and rng.random() < 0.75:
                    time.sleep(rng.uniform(0, seconds))
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                status = wait(pid)
                if status == 0:
                    break
                assert status == -signal.SIGKILL, (folder / f"{name}.log").read_text()
                kills += 1
            found = different(folder, name)
            wrong += bool(found)
            print(f"{name}: {', '.join(found) or 'the same'}; {kills} kills so far", flush=True)
    print(f"{kills} kills in {trials} trials; {wrong} differ")
    return 1 if wrong else 0


def _child(job: Job) -> int:
    from silva import cli, ports, signals

    faulthandler.dump_traceback_later(LIMIT, exit=True)
    os.chdir(job.folder or ".")
    for number in signals.NUMBERS:  # whatever this process inherited
        signal.signal(number, signal.SIG_DFL)
    signals.end_at_once()
    if job.crash:
        os.environ["SILVA_CRASH_PROOF"] = job.proof
        os.environ["SILVA_CRASH"] = ports._crash = job.crash  # read at import, which is over
    reached: Counter[str] = Counter()
    if job.counts or job.interrupt:
        ports._crash, reach = "on", _noting(reached, job)
        setattr(ports, "_reach", reach)  # noqa: B010
        for place, target in SIGNALS_AT.items():
            _wrap(target, partial(reach, place))
    disk = ports.FaultyFiles(job.faults) if job.faults else ports.Files()
    with ports.use_files(disk):
        code = cli.main(job.argv)
    if job.counts:
        Path(job.counts).write_text(json.dumps(reached))
    if job.faults:
        Path(job.proof).write_text(str(disk.fired))  # type: ignore[attr-defined]
    return code


def _noting(reached: Counter[str], job: Job) -> Callable[[str], None]:
    """Counts the places gone through, and sends this process a signal at the one asked for."""
    place, _, count = job.interrupt.partition(":")

    def reach(name: str) -> None:
        reached[name] += 1
        if name == place and reached[name] == int(count or 1):
            Path(job.proof).write_text(name)
            for number in range(job.signals):
                time.sleep(0.1 * number)  # the loop has seen the one before
                os.kill(os.getpid(), signal.Signals[job.signal])

    return reach


def _wrap(target: str, before: Callable[[], None]) -> None:
    module, _, name = target.partition(":")
    place = importlib.import_module(module)
    original = getattr(place, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        before()
        return original(*args, **kwargs)

    setattr(place, name, wrapped)


def end_state(run: Path) -> dict[str, Any]:
    """All of a finished run that must not depend on what befell it."""
    metrics = []
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        metrics.append(json.dumps({key: row[key] for key in row if not key.startswith("perf/")}))
    summary = json.loads((run / "summary.json").read_text())
    newest = max((run / "checkpoints").glob("step_*"), key=lambda path: int(path.name[5:]))
    of_trainer = (run / "checkpoints").glob("step_*/trainer/**/*")
    files = [run / "checkpoints" / "best", *sorted(path for path in of_trainer if path.is_file())]
    files += [*sorted((run / "weights").rglob("*.safetensors")), *sorted((run / "rollouts").iterdir())]
    return {
        "metrics": metrics,
        "summary": {k: v for k, v in summary.items() if k not in ("seconds", "peak_memory_bytes")},
        "state": _state(newest / "state.json"),
        "trained": [r.fields for r in history(read(run / "ledger.jsonl")) if r.event == "trained"],
        "sealed": [r.fields for r in history(read(run / "ledger.jsonl")) if r.event == "sealed"],
        "files": {str(f.relative_to(run)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files},
    }


def _state(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text())
    del found["ledger"], found["parts"]["seconds"]
    return found


def differences(run: Path, reference: dict[str, Any]) -> list[str]:
    """What of a finished run is not as in the reference, and what its ledger has to say."""
    try:
        got = end_state(run)
        problems = audit(read(run / "ledger.jsonl"), finished=True)
    except (OSError, ValueError, LedgerError) as error:
        return [f"unreadable: {error}"]
    different = [key for key in reference if key != "files" and got[key] != reference[key]]
    names = {*got["files"], *reference["files"]}
    different += sorted(n for n in names if got["files"].get(n) != reference["files"].get(n))
    return different + problems


def serve() -> None:
    """One job at a time, in order."""
    prepare()
    for line in sys.stdin:
        job = Job(**json.loads(line))
        status = wait(start(job))
        proof = Path(job.proof)
        print(json.dumps([status, proof.read_text() if job.proof and proof.exists() else ""]), flush=True)


if __name__ == "__main__":
    serve()
