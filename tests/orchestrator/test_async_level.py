"""The loop with rollouts in flight over updates: its parts are doubles, its clock is virtual."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
from tests import virtual_clock
from tests.algorithms.by_hand import group, one_turn, recipe
from tests.orchestrator.test_work import Tasks

from silva.commands.common import as_resolved
from silva.errors import RecordError
from silva.evaluation.evaluator import Evaluation
from silva.orchestrator import rl
from silva.orchestrator.buffer import Buffer
from silva.orchestrator.notices import Notices
from silva.orchestrator.phases import Phases
from silva.orchestrator.probe import WeightSync
from silva.orchestrator.state import restore
from silva.orchestrator.tasks import Source, TaskStream
from silva.orchestrator.work import WorkQueue
from silva.protocols import TrainerCapabilities, Work
from silva.rollouts.settings import LinearRolloutSettings
from silva.storage.checkpoints import CheckpointStore
from silva.storage.ledger import Ledger, audit, history, read
from silva.types import Group, LossSpec, OptimParams, Sample, Signals, Snapshot, Trajectory


class Engine:
    """Elsewhere: it samples while the trainer computes."""

    capabilities = SimpleNamespace(context=99)

    def __init__(self, stuck: bool = False) -> None:
        self.version, self.stuck, self.slept = 0, stuck, 0

    async def load(self, snapshot: Snapshot) -> None:
        if not self.stuck:
            self.version = snapshot.version

    async def sleep(self) -> None:
        self.slept += 1

    def counts(self) -> dict[str, float]:
        return {}


class Trainer:
    """Three seconds an update; `trained`: by step, the versions its rows were sampled with."""

    capabilities = TrainerCapabilities()

    def __init__(self, version: int = 0) -> None:
        self.version, self.trained = version, []

    async def score(self, samples: Sequence[Sample], needs: frozenset[str]) -> Signals:
        return Signals()

    async def forward_backward(self, samples: Sequence[Sample], loss: LossSpec) -> dict[str, float]:
        await asyncio.sleep(3)
        self.trained.append({int(v) for s in samples for v in s.versions[s.versions >= 0]})
        return {}

    async def optim_step(self, policy: OptimParams, critic: OptimParams | None = None) -> dict[str, float]:
        return {}

    async def publish(self) -> Snapshot:
        self.version += 1
        return Snapshot(self.version)

    async def save(self, path: Path) -> None:
        path.mkdir()
        (path / "version.json").write_text(json.dumps(self.version))


class Rollout:
    """Two episodes of one to five seconds, of which one is solved."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.played = engine, []

    async def run(self, work: Work) -> AsyncIterator[Group]:
        self.played.append(work.id)
        version = self.engine.version
        await asyncio.sleep(Random(work.id).uniform(1, 5))
        yield group(work.id, *(sampled(one_turn(f"{work.id}/{i}", 2, float(i)), version) for i in (0, 1)))


def sampled(trajectory: Trajectory, version: int) -> Trajectory:
    (turn,) = trajectory.turns
    shown, said = turn.segments
    said = dataclasses.replace(said, versions=(version,) * said.count)
    return dataclasses.replace(trajectory, turns=(dataclasses.replace(turn, segments=(shown, said)),))


def loop(
    path: Path, level: int, *, steps: int = 5, stuck: bool = False, keys: Mapping[str, Any] | None = None
) -> rl.Loop:
    path.mkdir(exist_ok=True)
    ledger_path = path / "ledger.jsonl"
    ledger = Ledger.open(ledger_path) if ledger_path.exists() else Ledger.create(ledger_path)
    store = CheckpointStore(path / "checkpoints")
    state, checkpoint = restore(store, ledger)
    version = json.loads((checkpoint / "trainer" / "version.json").read_text()) if checkpoint else 0
    trainer, engine, made, monitor = Trainer(version), Engine(stuck), recipe("grpo"), MagicMock()
    engine.version = version
    stream = TaskStream([Source("w", Tasks(), 1.0)], 0)  # type: ignore[arg-type]
    work = WorkQueue(stream, Rollout(engine), ledger, batch=4, steps=steps, level=level)

    async def evaluate(when: str) -> list[Evaluation]:
        return [Evaluation("w", {}, {}, ())]

    usual = {"steps": steps, "checkpoint.every": 1, "eval.every": 0, "rollout.max_failed": 1.0}
    config = as_resolved({"environments": [{"type": "bandit"}], **usual, **(keys or {})}).config
    config = config.model_copy(update={"algorithm": made})
    parts = rl.Parts(
        config=config,
        sync=WeightSync(cast(Any, trainer), cast(Any, engine), None),
        buffer=Buffer(work, made, ledger, LinearRolloutSettings(groups_per_step=4)),
        evaluate=evaluate,
        ledger=ledger,
        store=store,
        monitor=monitor,
        notices=Notices(monitor, made),
        phases=Phases(),
    )
    return rl.Loop(parts, state)


def trained(path: Path) -> list[str]:
    records = history(read(path / "ledger.jsonl"))
    return [group for r in records if r.event == "trained" for group in r.fields["groups"]]


@pytest.mark.parametrize(
    ("level", "versions"),
    [(0, [{0}, {1}, {2}, {3}, {4}]), (1, [{0}, {0}, {1}, {2}, {3}]), (2, [{0}, {0}, {0}, {1}, {2}])],
)
def test_rows_are_as_stale_as_the_level_allows(tmp_path: Path, level: int, versions: list[set[int]]) -> None:
    made = loop(tmp_path, level)
    state = virtual_clock.run(made.run())
    assert cast(Any, made.parts.trainer).trained == versions
    assert state.step == 5 and state.parts["in_flight"] == []
    assert len(trained(tmp_path)) == 20 and audit(read(tmp_path / "ledger.jsonl"), finished=True) == []


@pytest.mark.slow
@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("killed_at", [1, 2, 3, 4, 5])
def test_a_killed_run_trains_every_group_once(tmp_path: Path, level: int, killed_at: int) -> None:
    """Killed in the update of a step: what was in flight at its checkpoint is played again, under its id."""
    whole = loop(tmp_path / "whole", level)
    virtual_clock.run(whole.run())

    killed = loop(tmp_path / "killed", level)

    async def die(samples: Sequence[Sample], loss: LossSpec) -> dict[str, float]:
        if killed.state.step + 1 == killed_at:
            raise KeyboardInterrupt
        return {}

    cast(Any, killed.parts.trainer).forward_backward = die
    with pytest.raises(KeyboardInterrupt):
        virtual_clock.run(killed.run())
    again = loop(tmp_path / "killed", level)
    in_flight = [entry["id"] for entry in again.state.parts.get("in_flight", [])]
    assert again.state.step == killed_at - 1
    assert len(in_flight) == (4 * min(level, 5 - again.state.step) if again.state.step else 0)
    virtual_clock.run(again.run())
    assert cast(Any, again.parts.buffer.work.rollout).played[: len(in_flight)] == in_flight
    assert trained(tmp_path / "killed") == trained(tmp_path / "whole")
    assert audit(read(tmp_path / "killed" / "ledger.jsonl"), finished=True) == []


def test_the_engine_sleeps_only_while_nothing_is_in_flight(tmp_path: Path) -> None:
    for level, sleeps in ((0, 5), (1, 1), (2, 1)):  # in the last step nothing is ahead
        made = loop(tmp_path / f"{level}", level)
        virtual_clock.run(made.run())
        assert cast(Any, made.parts.engine).slept == sleeps


def test_an_error_leaves_nothing_in_flight(tmp_path: Path) -> None:
    made = loop(tmp_path, 2)

    async def fail(samples: Sequence[Sample], loss: LossSpec) -> dict[str, float]:
        raise RuntimeError("the trainer is gone")

    async def run() -> None:
        cast(Any, made.parts.trainer).forward_backward = fail
        with pytest.raises(RuntimeError, match="the trainer is gone"):
            await made.run()
        assert len(asyncio.all_tasks()) == 1

    virtual_clock.run(run())


def test_an_engine_that_stays_behind_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        RecordError, match="got one of versions 0 to 0 of the policy while version 1 is trained"
    ):
        virtual_clock.run(loop(tmp_path, 0, stuck=True).run())
