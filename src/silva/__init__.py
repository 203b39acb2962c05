"""Silva: reinforcement learning of LLM agents. A batch of rollouts is a forest."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

TORCH_CAME_FIRST = "torch" in sys.modules and "MKL_CBWR" not in os.environ
"""Whether MKL has missed what is set here, so that runs repeat within rounding and not bit for bit."""

# Read by MKL when torch loads: rows of a matrix product get the same bits whatever rows are beside them.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Read by OpenMP (libgomp): how long threads that wait for work keep their core busy. By default it is some
# milliseconds, in which other processes on the same cores stand still; here some 50 microseconds.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")

__version__ = "0.1.0"

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from silva.commands.outcome import RunOutcome
    from silva.config.load import Resolved

__all__ = ["__version__", "train"]


def train(
    config: str | Path | Mapping[str, Any] | Resolved,
    *,
    resume: bool = False,
    overwrite: bool = False,
    accept_files: bool = False,
) -> RunOutcome:
    """Run reinforcement learning: what `silva rl` does, from Python, in scripts and in notebooks.

        outcome = silva.train("configs/smoke.toml")
        outcome = silva.train({"model": {"type": "tiny"}, "environments": [{"type": "bandit"}], "steps": 5})
        outcome.summary["eval_after"], outcome.report, outcome.weights

    Args:
        config: a TOML file, keys (nested or dotted) with their values, or a resolved configuration.
        resume: go on with the run in output_dir/name from its last checkpoint.
        overwrite: replace the run in output_dir/name; the old run is removed when the new one begins.
        accept_files: go on though files that the configuration points at have changed since.

    Raises:
        SilvaError: the one of errors.py that fits; Interrupted after Ctrl-C.
    """
    from silva.commands.train import train  # loads torch

    return _beside_loop(lambda: train(config, resume=resume, overwrite=overwrite, accept_files=accept_files))


def _beside_loop(work: Callable[[], RunOutcome]) -> RunOutcome:
    """Call `work`, which runs an event loop of its own: in a thread where one runs here (a notebook)."""
    import asyncio
    import ctypes
    import threading
    from concurrent.futures import Future

    if asyncio._get_running_loop() is None:
        return work()
    result: Future[RunOutcome] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    thread = threading.Thread(target=run, name="silva.train", daemon=True)
    thread.start()
    try:
        return result.result()
    except KeyboardInterrupt:  # reaches only this thread; the run must not go on behind its back
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident or 0), ctypes.py_object(KeyboardInterrupt)
        )
        thread.join()
        raise
