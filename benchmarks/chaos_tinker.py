"""Kill a Tinker server, its clients, or its database, and compare what was learned with runs of their own.

    PostgreSQL <── silva serve tinker, a tiny model <── programs with the real SDK: STEPS steps each, a state
    every SAVE; SIGKILL at a random step and time in it ──> started again ──> weights and moments equal,
    byte for byte?

A program that is killed begins again from the last state that it has written down. The moments hold the
number of steps that were made, so a step too many or too few cannot go unseen. The file of SQLite is the
server's own, and killed with it; kinds `database` (all its processes) and `connection` (closed by the
database, which goes on) are of PostgreSQL, in which the server then has its tables.

    python benchmarks/chaos_tinker.py --kills 20 --seed 0 --json chaos_tinker.json
    python benchmarks/chaos_tinker.py --kinds database connection --kills 40 --a-run 5
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from postgres_server import PostgresServer

STEPS, SAVE = 24, 4
SEEDS = (1, 2, 3)  # of the programs
FULL = 3  # that of the one which trains all weights
LIMIT = 900.0  # seconds without an end, many times what a run needs
TINY = 'model = {type = "tiny", layers = 1, width = 64, context = 128}\n'
KINDS = ("server", "client", "both")
OF_DATABASE = ("database", "connection")


@dataclass(frozen=True)
class Fault:
    """SIGKILL `delay` seconds after the program with `seed` has begun `step`; no later step begins before."""

    kind: str
    seed: int
    step: int
    delay: float = 0.0


def free_port() -> int:
    """None of those that the system gives to clients: while a server is away, a client that tries its port
    could get that port for its own end, and be connected to itself. Nor of those of a test in a process
    beside this one, whose server may be away just now."""
    for port in count(20_000 + os.getpid() % 500 * 20):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("unreachable")


class Serving:
    """A server that can be killed and started again at the same port.

    Args:
        folder: is made.
        options: of `silva serve tinker`.
        database: the address of one in PostgreSQL; "" for a file.
    """

    def __init__(self, folder: Path, *options: str, database: str = "") -> None:
        self.folder, self._database = folder, database
        self._options = [*options, *(["--database", database] if database else [])]
        self.port = free_port()
        self.address = f"http://127.0.0.1:{self.port}"
        self.log = folder / "log"
        folder.mkdir()
        (folder / "tiny.toml").write_text(TINY)

    def __enter__(self) -> Serving:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "silva", "serve", "tinker", "@", "tiny.toml", "--state", "state",
                 "--port", str(self.port), *self._options],
                cwd=self.folder, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        request = urllib.request.Request(f"{self.address}/api/v1/healthz", headers={"X-API-Key": "tml-a"})
        end = time.monotonic() + LIMIT
        while time.monotonic() < end:
            try:
                urllib.request.urlopen(request, timeout=5).close()
                return
            except OSError:
                assert self.process.poll() is None, self.log.read_text()
                time.sleep(0.1)
        raise AssertionError("the server does not listen")

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def files(self, path: str) -> dict[str, bytes]:
        """The tensors of a checkpoint, when the server has ended."""
        model, _, name = path.removeprefix("tinker://").partition("/")
        query = f"SELECT folder FROM checkpoints WHERE model = '{model}' AND name = '{name}'"
        if self._database:
            import psycopg

            opened: Any = psycopg.connect(self._database)
        else:
            opened = sqlite3.connect(f"file:{self.folder}/state/tinker.sqlite?mode=ro", uri=True)
        with opened as db:
            (folder,) = db.execute(query).fetchone()
        found = (self.folder / "state" / "weights" / folder).glob("*.safetensors")
        return {file.name: file.read_bytes() for file in found}


class Program:
    """A program that trains, which can be killed and started again. `stop`: as of `wait_at`."""

    def __init__(self, serving: Serving, seed: int, stop: int = STEPS) -> None:
        self.seed, self._serving = seed, serving
        self._place = serving.folder / f"place-{seed}.json"
        self._log = serving.folder / f"log-{seed}"
        self._begun = serving.folder / f"begun-{seed}"
        self._waits = serving.folder / f"waits-{seed}"
        self.wait_at(stop)
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, __file__, "--program", self._serving.address, str(self.seed),
                 str(self._place), str(self._begun), str(self._waits)],
                stdout=log, stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TINKER_TELEMETRY": "0"},
            )  # fmt: skip

    def wait_at(self, step: int) -> None:
        """Let it begin no step from this one on."""
        written = self._waits.with_suffix(".tmp")
        written.write_text(str(step))
        written.replace(self._waits)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    @property
    def step(self) -> int:
        """What it has begun."""
        return int(self._begun.read_text() or "-1") if self._begun.exists() else -1

    @property
    def ended(self) -> bool:
        """Whether it has made all its steps.

        Raises:
            AssertionError: it failed.
        """
        code = self.process.poll()
        assert not code, self._log.read_text()[-2000:]
        return code == 0

    def files(self) -> dict[str, bytes]:
        """What it has learned, when the server has ended."""
        return self._serving.files(json.loads(self._place.read_text())["path"])


def program(address: str, seed: int, place: Path, begun: Path, waits: Path) -> None:
    """Train as a careful user does: whatever has been written down is not done again."""
    import numpy as np
    import tinker
    from tinker import types

    service = tinker.ServiceClient(base_url=address, api_key=f"tml-{seed}")
    if place.exists():
        last = json.loads(place.read_text())
        run = service.create_training_client_from_state_with_optimizer(last["path"]).result()
    else:
        last = {"step": 0}
        rank = 0 if seed == FULL else 4
        run = service.create_lora_training_client(base_model="tiny", rank=rank, seed=seed).result()
    for step in range(last["step"], STEPS):
        while step >= int(waits.read_text()):
            time.sleep(0.01)
        begun.write_text(str(step))
        rows = np.random.default_rng([seed, step]).integers(0, 60, (3, 9))
        inputs: list[Any] = [
            {"target_tokens": row[1:].copy(), "weights": np.ones(8, np.float32)} for row in rows
        ]
        data = [
            types.Datum(model_input=types.ModelInput.from_ints(row[:-1].tolist()), loss_fn_inputs=each)
            for row, each in zip(rows, inputs, strict=True)
        ]
        passed = run.forward_backward(data, "cross_entropy")
        stepped = run.optim_step(types.AdamParams(learning_rate=1e-2))
        if (step + 1) % SAVE == 0:
            path = run.save_state(f"step_{step + 1}").result().path
            assert (
                passed.result().metrics["loss:sum"] > 0 and (stepped.result().metrics or {})["grad_norm"] > 0
            )
            written = place.with_suffix(".tmp")
            written.write_text(json.dumps({"step": step + 1, "path": path}))
            written.replace(place)
    os._exit(0)  # the SDK's threads do not end


def alone(folder: Path) -> dict[int, dict[str, bytes]]:
    """What each program learns on a server that it shares with nobody."""
    programs = list[Program]()
    with Serving(folder) as serving:
        for seed in SEEDS:
            programs.append(each := Program(serving, seed))
            _wait(lambda: each.ended)
    return {each.seed: each.files() for each in programs}


def together(folder: Path, faults: Sequence[Fault]) -> dict[int, dict[str, bytes]]:
    """What they learn together, with one fault after the other."""

    def stop(seed: int, coming: Sequence[Fault]) -> int:
        return min([fault.step + 1 for fault in coming if fault.seed == seed], default=STEPS)

    with ExitStack() as stack:
        database = None
        if any(fault.kind in OF_DATABASE for fault in faults):
            database = stack.enter_context(PostgresServer(folder.with_suffix(".log")))
        address = database.database() if database else ""
        serving = stack.enter_context(Serving(folder, database=address))
        programs = {seed: Program(serving, seed, stop(seed, faults)) for seed in SEEDS}
        for number, fault in enumerate(faults, 1):
            each = programs[fault.seed]
            _wait(lambda: each.step >= fault.step)  # noqa: B023
            time.sleep(fault.delay)
            assert not each.ended
            if database and fault.kind == "database":
                database.kill()
                database.start()
            if database and fault.kind == "connection":
                database.disconnect()
            if fault.kind in ("server", "both"):
                serving.kill()
            if fault.kind in ("client", "both"):
                each.kill()
                each.start()
            if fault.kind in ("server", "both"):
                serving.start()
            each.wait_at(stop(fault.seed, faults[number:]))
        _wait(lambda: all([each.ended for each in programs.values()]))
        serving.kill()
        return {seed: each.files() for seed, each in programs.items()}


def plan(kinds: Sequence[str], kills: int, seed: int) -> list[Fault]:
    """One after the other of each kind, at random."""
    rng = random.Random(seed)
    return [
        Fault(kinds[number % len(kinds)], rng.choice(SEEDS), rng.randrange(STEPS - 1), rng.random() * 0.3)
        for number in range(kills)
    ]


def _wait(done: Any) -> None:
    end = time.monotonic() + LIMIT
    while not done():
        assert time.monotonic() < end, f"no end within {LIMIT:g} s"
        time.sleep(0.01)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--a-run", type=int, default=1, help="kills in one run (default 1)")
    parser.add_argument("--kinds", nargs="+", choices=(*KINDS, *OF_DATABASE), default=KINDS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the result to this file")
    parser.add_argument("--program", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.program:
        address, seed, *files = options.program
        program(address, int(seed), *map(Path, files))
    began, rows = time.monotonic(), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory(prefix="silva-chaos-") as name:
        expected = alone(Path(name) / "alone")
        planned = plan(options.kinds, options.kills, options.seed)
        for first in range(0, options.kills, options.a_run):
            faults = sorted(planned[first : first + options.a_run], key=lambda fault: fault.step)
            row: dict[str, Any] = {"faults": [*map(vars, faults)], "right": False}
            try:
                row["right"] = together(Path(name) / f"trial-{first}", faults) == expected
            except AssertionError as error:
                row["error"] = str(error)
            rows.append(row)
            print(json.dumps(row), flush=True)
    right = sum(row["right"] for row in rows)
    result = {
        "kills": options.kills, "runs": len(rows), "right": right, "seconds": round(time.monotonic() - began)
    }  # fmt: skip
    if options.json:
        options.json.write_text(
            json.dumps({"kinds": options.kinds, "seed": options.seed, **result, "rows": rows}, indent=1)
            + "\n"
        )
    print("{kills} kills in {runs} runs, {right} right ends, {seconds} s".format(**result))
    return int(result["right"] < len(rows))


if __name__ == "__main__":
    sys.exit(main())
