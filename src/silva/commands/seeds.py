"""`silva rl --seeds 0-7`: several runs that differ in their seed only, at once in this process.

    RUN/seed_0 ... RUN/seed_7    each a run of its own, as `--seed 0` alone makes it
    RUN/report.html              mean and interval over the seeds
    RUN/summary.json             the same of the held-out tasks

The runs are tasks of one event loop over one base model (seeds.py). A run that fails is told, and the others
go on.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO, cast

from rich.console import Console

from silva import process
from silva.aio import gather
from silva.commands.checks import check
from silva.commands.command import Given
from silva.commands.outcome import RunOutcome, earlier
from silva.commands.train import train_in
from silva.config.load import Resolved
from silva.config.schema import RunConfig
from silva.config.sections import TinyModel
from silva.config.sources import command_line, variables
from silva.config.tree import typed
from silva.errors import CapabilityError, ConfigError, RunFolderError, SilvaError
from silva.evaluation.over_seeds import over_seeds
from silva.monitoring.alerts.fall import with_interval
from silva.monitoring.report_seeds import before_and_after, write_seeds_report
from silva.ports import FILES
from silva.run import claimed, say
from silva.seeds import SharedBase
from silva.signals import Interrupted
from silva.storage.layout import Layout
from silva.storage.metrics import read_metrics
from silva.storage.run_folder import RunFolder
from silva.storage.summary import finite

EXPECTED = "numbers such as 0-7 or 0,3,7"
MOST = 1000  # at once; more are a slip of a finger, and would fill the memory before they are told so


def seeds_of(text: str) -> list[int]:
    """Those that `--seeds` names, in its order.

    Raises:
        ConfigError: it is not of the form, names one twice, or more than MOST.
    """
    found: list[int] = []
    for part in text.split(","):
        if not (match := re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part.strip())):
            raise ConfigError(f"--seeds {text}: got {part.strip()!r}, expected {EXPECTED}")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ConfigError(f"--seeds {text}: {part.strip()} ends before it begins; expected {EXPECTED}")
        if len(found) + last - first >= MOST:
            raise ConfigError(
                f"--seeds {text}: got {len(found) + last - first + 1:,}, expected at most {MOST:,}"
            )
        found += range(first, last + 1)
    if twice := [seed for seed in found if found.count(seed) > 1]:
        raise ConfigError(f"--seeds {text}: got {twice[0]} twice, expected each seed once")
    return found


def check_seeds(config: RunConfig) -> None:
    """Refuse what several seeds cannot share.

    Raises:
        CapabilityError: with the key to change.
    """
    model = config.model
    if model.lora is None:
        raise CapabilityError(
            "model.lora: got none with --seeds, which trains adapters of each seed on one base model; "
            "expected LoRA, as in --model.lora.rank 16"
        )
    if isinstance(model, TinyModel):
        raise CapabilityError(
            'model.type = "tiny" with --seeds: its weights are drawn from the seed, so seeds would have no '
            "base model in common; expected model.name: a hub id, or a folder such as a run's weights/step_N"
        )
    for key, part, shared in (
        ("placement", config.placement, not config.placement.processes),
        ("engine", config.engine, config.engine.shares),
        ("trainer", config.trainer, config.trainer.shares),
    ):
        if not shared:
            raise CapabilityError(
                f'{key}.type = "{part.type}" with --seeds, whose runs share one process; expected "local"'
            )
    if config.replays_routing:
        raise CapabilityError(
            "trainer.replay_routing = true with --seeds: experts have no adapters there; expected false"
        )
    if config.monitoring.terminal == "live":
        raise CapabilityError(
            'monitoring.terminal = "live" with --seeds: several runs write lines there; expected "auto"'
        )


def resolved_seeds(given: Given, resolve: Callable[[Given], Resolved]) -> list[Resolved]:
    """The configuration of each seed of `--seeds`; their runs are in the folder that one alone would have.

    Args:
        resolve: a command line.

    Raises:
        ConfigError: `--seeds` is wrong, or what it cannot go with.
    """
    seeds, (files, command) = seeds_of(given.options["--seeds"]), command_line(given.rest)
    if any(path == ("seed",) for path, _ in command):
        raise ConfigError("--seeds and --seed: got both, expected one")
    layers = [*variables(os.environ, tuple(RunConfig.model_fields)), *command]
    named: dict[Any, Any] = {path[0]: typed(node.value) for path, node in layers}
    if files:  # they may name it
        named |= vars(given.resolve(given.rest).config)
    parent, name = (named.get(key, RunConfig.model_fields[key].default) for key in ("output_dir", "name"))
    folder = Path(parent) / name
    own = [[f"--seed={seed}", f"--name=seed_{seed}", f"--output_dir={folder}"] for seed in seeds]
    return [resolve(replace(given, rest=[*given.rest, *each])) for each in own]


def train_seeds(
    runs: Sequence[Resolved],
    *,
    resume: bool = False,
    overwrite: bool = False,
    accept_files: bool = False,
    output: TextIO | None = None,
) -> list[RunOutcome]:
    """Run reinforcement learning with several configurations at once, which differ in seed and name only.

    Raises:
        SilvaError: none of them can begin; or some have failed, and then the others are whole. Interrupted
            after Ctrl-C.
    """
    for resolved in runs:
        check(resolved.config)
        check_seeds(resolved.config)
    folder = Path(runs[0].config.output_dir)
    if Layout(folder).ledger.exists():
        raise RunFolderError(
            f"{folder} holds a run already, and the seeds would replace its summary: choose another --name"
        )
    consoles = [_console(resolved.config.name, output or sys.stdout) for resolved in runs]
    with ExitStack() as stack:
        folders = [
            stack.enter_context(
                claimed(resolved, "--resume goes on", resume=resume, overwrite=overwrite,
                        accept_files=accept_files, console=console)
            )
            for resolved, console in zip(runs, consoles, strict=True)
        ]  # fmt: skip
        found = asyncio.run(_all(runs, folders, consoles))
    process.forget()
    if any(isinstance(each, Interrupted) for each in found):
        raise Interrupted
    done = {r.config.seed: each for r, each in zip(runs, found, strict=True) if isinstance(each, RunOutcome)}
    failed = [f"{resolved.config.seed}" for resolved in runs if resolved.config.seed not in done]
    if done:
        report(folder, done, failed)
    if failed:
        others = "The others are done; --resume" if done else "--resume"
        raise SilvaError(
            f"{len(failed)} of {len(runs)} seeds have failed ({', '.join(failed)}), as was said above. "
            f"{others} goes on with these"
        )
    return [*done.values()]


def report(folder: Path, done: Mapping[int, RunOutcome], failed: Sequence[str]) -> None:
    """Write the report and the summary over the seeds, and say what came of them."""
    metrics = over_seeds([read_metrics(Layout(each.directory).metrics) for each in done.values()])
    warnings = [f"left out, as they have failed: seeds {', '.join(failed)}"] if failed else []
    page = write_seeds_report(folder, metrics, {n: each.summary for n, each in done.items()}, warnings)
    before, after = before_and_after(metrics)
    summary = {"seeds": [*done], "failed": failed, "eval_before": before, "eval_after": after}
    text = json.dumps(finite(summary), indent=2, sort_keys=True, allow_nan=False)
    FILES.write_atomic(Layout(folder).summary, f"{text}\n".encode())
    for first, last in zip(before, after, strict=True):
        form = ".1%" if last["metric"] == "success" else ".3f"
        ends = " -> ".join(with_interval(row, form) for row in (first, last))
        say(f"held-out {last['metric']}, {last['environment']}, mean of {len(done)} seeds: {ends}", None)
    say(f"report: {page}", None)


async def _all(
    runs: Sequence[Resolved], folders: Sequence[RunFolder], consoles: Sequence[Console]
) -> list[RunOutcome | Exception]:
    """What each comes to. They take their first step when all are prepared: from then on Ctrl-C is theirs."""
    process.prepare()
    base, gate, wait = SharedBase(runs[0].config, len(runs)), _Gate(len(runs)), True
    try:
        with process.loaded():
            ones = zip(runs, folders, consoles, strict=True)
            return await gather(_one(*one, base, gate) for one in ones)
    except asyncio.CancelledError:
        wait = False
        raise
    finally:
        base.close(wait=wait)


async def _one(
    resolved: Resolved, folder: RunFolder, console: Console, base: SharedBase, gate: _Gate
) -> RunOutcome | Exception:
    async def prepared() -> None:
        await gate.wait(folder)

    try:
        if before := earlier(folder, console):
            return before
        return await train_in(resolved, folder, console, parts=base.of_run, prepared=prepared)
    except Interrupted as stop:
        return stop
    except (SilvaError, OSError) as error:
        say(f"failed: {error}", console)
        return error
    except Exception as error:  # the others have none of it
        say(f"failed: {''.join(traceback.format_exception(error))}", console)
        return error
    finally:
        gate.arrived(folder)


class _Gate:
    """Opens when so many have arrived, each once."""

    def __init__(self, count: int) -> None:
        self._count, self._there, self._open = count, set[int](), asyncio.Event()

    def arrived(self, who: object) -> None:
        self._there.add(id(who))
        if len(self._there) == self._count:
            self._open.set()

    async def wait(self, who: object) -> None:
        self.arrived(who)
        await self._open.wait()


def _console(name: str, output: TextIO) -> Console:
    """Each of its lines begins with the name."""
    return Console(file=cast(TextIO, _NamedLines(name, output)))


class _NamedLines(io.TextIOBase):
    def __init__(self, name: str, output: TextIO) -> None:
        self._name, self._output, self._line = name, output, ""

    def write(self, text: str) -> int:
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._output.write(f"{self._name}: {line}\n")
        return len(text)

    def flush(self) -> None:
        self._output.flush()
