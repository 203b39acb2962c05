"""`silva rl --dry-run --probe SECONDS`: the run's own loop for that long, and what a step will take.

    scratch folder, the run's placement ──> level 0 ──> level 1 ──> Recording ──> levels 0, 1, 2, ...
                                              steps       steps      rates.py      schedule.py

Level 0 is told as it was measured; the others, and that of the configuration, by the schedule in virtual
time. A step is never cut short, and there are at least two of each level, which may take longer than was
asked for. The run itself is not touched: its folder, its weights and its state are those of another run. Not
here: costs of a service, and what the episodes teach (plan.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from silva.commands.checks import check
from silva.commands.common import as_resolved
from silva.commands.foretelling.rates import fitted
from silva.commands.foretelling.recorded import RecordedEngine, RecordedRollout, TimedStep
from silva.commands.foretelling.schedule import Schedule
from silva.commands.supervise import supervise
from silva.commands.train import prepare
from silva.config.load import Resolved
from silva.config.saved import saved_values, toml
from silva.config.schema import RunConfig
from silva.config.sections import Foretold
from silva.errors import CapabilityError, SilvaError
from silva.monitoring.alerts.foretold import PHASES, found, together
from silva.orchestrator.rl import Loop
from silva.placement.supervisor import INTERRUPTED
from silva.ports import CLOCK
from silva.run import claimed, opened
from silva.scratch import private_folder
from silva.storage.metrics import read_metrics

LEVELS = (0, 1, 2)
AT_LEVEL_0 = 0.4  # of the seconds
LEAST = 2  # steps of a level: the first of the run compiles, and that of level 1 begins two batches at once
PLAYED, LEFT_OUT = 20, 4  # steps in virtual time that are counted, and before them at least
STEPS = 10_000  # of the probe's run, which is ended before
FILE = "foretold.json"
Numbers = Mapping[str, float]


def foretell(config: RunConfig, seconds: float) -> dict[int, Numbers]:
    """What a step will take, by level.

    Raises:
        CapabilityError: the run does not start all of its parts itself, on this machine.
        SilvaError: whatever would stop the run.
    """
    check(config)
    _check_own(config)
    with private_folder("probe") as folder:
        file = folder / "probe.toml"
        file.write_text(toml(saved_values(_in_scratch(config, folder)), {}))
        resolved = as_resolved(file)
        if config.placement.starts:
            code = supervise(resolved, [f"@{file}"], [f"--probe={seconds:g}"])
            if code == INTERRUPTED:
                raise KeyboardInterrupt
            if code:
                raise SilvaError(f"--probe: the probe ended with exit code {code}; its words stand above")
        else:
            play(resolved, seconds)
        told = json.loads((folder / FILE).read_text())
    return {int(level): numbers for level, numbers in told.items()}


def planned(resolved: Resolved, foretold: Mapping[int, Numbers]) -> Resolved:
    """The configuration with what is foretold for its level."""
    numbers = foretold[resolved.config.rollout.max_async_level]
    plan = Foretold(**{name: float(f"{value:.4g}") for name, value in numbers.items()})
    config = resolved.config.model_copy(update={"plan": plan})
    return dataclasses.replace(
        resolved, config=config, provenance={**resolved.provenance, "plan.seconds": "--probe"}
    )


def _check_own(config: RunConfig) -> None:
    placement, engine, trainer = config.placement, config.engine, config.trainer
    others = {
        f'placement.type = "{placement.type}"': placement.clustered,
        "placement.trainer": placement.address_of("trainer"),
        "placement.inference": placement.address_of("inference"),
        f'engine.type = "{engine.type}"': engine.remote and not engine.launched,
        f'trainer.type = "{trainer.type}"': trainer.remote,
    }
    if found := [words for words, holds in others.items() if holds]:
        raise CapabilityError(
            f"--probe: got {', '.join(found)}: parts that others may use, and a probe would train there and "
            'load its weights; expected placement.type = "local", or "services" without addresses, with an '
            "engine and a trainer that `silva rl` starts"
        )


def _in_scratch(config: RunConfig, folder: Path) -> RunConfig:
    """The run in another folder, without what is not part of a step. Its level is refused if the run's is;
    `LoopProbe` begins with 0."""
    monitoring = type(config.monitoring)(
        terminal="off", tensorboard=False, rollouts=config.monitoring.rollouts, report=False, trace=True
    )
    return config.model_copy(update={
        "name": "probe", "output_dir": str(folder), "steps": STEPS, "plan": None,
        "eval": config.eval.model_copy(update={"every": STEPS, "tasks": 1, "samples_per_task": 1}),
        "checkpoint": config.checkpoint.model_copy(update={"every": 0, "keep_best": False}),
        "monitoring": monitoring,
    })  # fmt: skip


def play(resolved: Resolved, seconds: float) -> None:
    """Run the probe in the folder of a configuration, and write what it foretells there."""
    with claimed(resolved, "play the probe again") as folder:
        levels = asyncio.run(_play(resolved, folder, seconds))
    (Path(resolved.config.output_dir) / FILE).write_text(json.dumps(levels))


async def _play(resolved: Resolved, folder: Any, seconds: float) -> dict[int, Numbers]:
    async with opened(resolved, folder, steps=STEPS) as run:
        run.assembly.engine = engine = RecordedEngine(run.assembly.engine)
        loop = await prepare(run)
        probe = LoopProbe(loop, engine, seconds)
        with contextlib.suppress(_Over):
            await loop.run(probe.step)
        return probe.foretold([row for row in read_metrics(folder.metrics) if row["step"] > 0])


class _Over(Exception):
    """The probe has seen enough."""


class LoopProbe:
    """Watches a loop, step by step, and raises its level when level 0 has been seen."""

    def __init__(self, loop: Loop, engine: RecordedEngine, seconds: float) -> None:
        self._loop, self._works, self._seconds = loop, engine.works, seconds
        self._queue = queue = loop.parts.buffer.work
        self._steps = list[TimedStep]()
        queue.rollout = RecordedRollout(queue.rollout, engine.works)
        queue.level, queue.max_updates = 0, None
        config, shared = loop.parts.config, loop.parts.trainer.capabilities.publishes == "shared"
        stale = config.algorithm.on_policy and config.algorithm.rollout_correction is None
        others = () if shared or stale or config.rollout.overlap_training else LEVELS
        self.levels = sorted({0, *others, config.rollout.max_async_level})

    def step(self) -> None:
        """A step is done."""
        now, phases = CLOCK.monotonic(), self._loop.parts.phases.step
        rollout, train, publish = (phases[name] for name in PHASES)
        passed = rollout + train + publish
        began = self._steps[-1].ended if self._steps else now - passed  # an evaluation is before the first
        self._steps.append(TimedStep(
            self._queue.level, began, rollout, train, publish, ended=now,
            rows=self._loop.state.tokens_in_rows - sum(step.rows for step in self._steps),
            issued=len(self._works) - sum(step.issued for step in self._steps),
        ))  # fmt: skip
        if sum(step.level == self._queue.level for step in self._steps) < LEAST:
            return
        elapsed, highest = now - self._steps[0].began, min(1, self.levels[-1])
        if self._queue.level == highest and elapsed + passed / 2 > self._seconds:
            raise _Over  # most of the next step would come too late
        if elapsed > AT_LEVEL_0 * self._seconds:
            self._queue.level = highest

    def foretold(self, rows: Sequence[Mapping[str, Any]]) -> dict[int, Numbers]:
        """By level. `rows`: the metrics of the steps."""
        works, batch = list(self._works.values()), self._queue.batch
        apart = sum(step.level == 0 for step in self._steps)
        first, later = self._steps[1:apart], self._steps[apart:]  # the very first loads and compiles
        told: dict[int, Numbers] = {0: found(rows[1:apart])}
        rates = fitted(self._steps, [request for work in works for request in work.requests])
        for level in self.levels[1:]:
            schedule = Schedule(
                [work for work in works if work.ended is not None],
                rates,
                refills=[max(0, step.issued - batch) for step in first],
                batch=batch,
                level=level,
                publish=fmean(step.publish for step in later),
                rest=fmean(step.rest for step in later),
            )
            begins = max(LEFT_OUT, 2 * level)  # all that began together at first is taken by then
            played = [schedule.step() for _ in range(begins + PLAYED)]
            told[level] = found(rows[1:]) | together(played[begins:])
        return told
