"""Updates that begin while the last groups of their step are played: time, order, rows, interrupts."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests import virtual_clock
from tests.algorithms.by_hand import group, one_turn
from tests.orchestrator.test_async_level import loop, sampled, trained

from silva.commands.checks import check_parts
from silva.config.load import load
from silva.errors import CapabilityError, NoSignalError
from silva.protocols import EngineCapabilities, TrainerCapabilities, Work
from silva.registries import REGISTRIES
from silva.signals import Interrupted
from silva.storage.ledger import audit, read
from silva.types import Group, LossSpec, Sample


class Slower:
    """Work number i of a step takes 1 + 2 i seconds; `equal`: all of its rewards are."""

    def __init__(self, engine: Any, equal: Sequence[str] = ()) -> None:
        self.engine, self.equal, self.running = engine, equal, 0

    async def run(self, work: Work) -> AsyncIterator[Group]:
        version = self.engine.version
        self.running += 1
        await asyncio.sleep(1 + 2 * int(work.id.rpartition("g")[2]))
        self.running -= 1
        rewards = (1.0, 1.0) if work.id in self.equal else (0.0, 1.0)
        yield group(
            work.id, *(sampled(one_turn(f"{work.id}/{i}", 2, r), version) for i, r in enumerate(rewards))
        )


class Recorded:
    """Remembers when it trained which groups, and how many rollouts ran then. Three seconds an update."""

    def __init__(self, made: Any, rollout: Slower) -> None:
        self.updates: list[tuple[float, list[str], int]] = []
        self._rollout = rollout
        made.parts.trainer.forward_backward = self

    async def __call__(self, samples: Sequence[Sample], loss: LossSpec) -> dict[str, float]:
        groups = list(dict.fromkeys(sample.group for sample in samples))
        self.updates.append((virtual_clock.now(), groups, self._rollout.running))
        await asyncio.sleep(3)
        return {}


def prepared(
    path: Path, *, overlap: bool, steps: int = 2, equal: Sequence[str] = ()
) -> tuple[Any, Recorded, Slower]:
    keys = {"rollout.overlap_training": overlap, "trainer.updates_per_step": 2}
    made: Any = loop(path, 0, steps=steps, keys=keys)
    rollout = Slower(made.parts.engine, equal)
    made.parts.buffer.work.rollout = rollout
    return made, Recorded(made, rollout), rollout


def test_the_first_update_runs_while_the_rest_is_played(tmp_path: Path) -> None:
    """Rollouts end after 1, 3, 5 and 7 s, an update takes 3 s: 13 s a step in turn, 10 s overlapped."""
    for overlap, began, ends in ((False, [7, 10, 20, 23], 26), (True, [3, 7, 13, 17], 20)):
        made, recorded, _ = prepared(tmp_path / f"{overlap}", overlap=overlap)

        async def run(made: Any = made) -> float:
            await made.run()
            return virtual_clock.now()

        assert virtual_clock.run(run()) == pytest.approx(ends)
        assert [time for time, _, _ in recorded.updates] == pytest.approx(began)
        assert [groups for _, groups, _ in recorded.updates] == [
            ["s1g0", "s1g1"], ["s1g2", "s1g3"], ["s2g0", "s2g1"], ["s2g2", "s2g3"],
        ]  # fmt: skip
        assert [running for _, _, running in recorded.updates] == ([2, 0, 2, 0] if overlap else [0] * 4)
        records = read(tmp_path / f"{overlap}" / "ledger.jsonl")
        assert [r.event for r in records].count("published") == 2
        assert audit(records, finished=True) == []


def test_a_share_without_a_signal_makes_no_update(tmp_path: Path) -> None:
    made, recorded, _ = prepared(tmp_path, overlap=True, steps=1, equal=["s1g0", "s1g1", "s1g2"])
    state = virtual_clock.run(made.run())
    assert [groups for _, groups, _ in recorded.updates] == [["s1g3"]] and state.updates == 1
    assert trained(tmp_path) == ["s1g3"] and audit(read(tmp_path / "ledger.jsonl"), finished=True) == []


def test_a_step_without_a_result_is_an_error(tmp_path: Path) -> None:
    made, _, rollout = prepared(tmp_path, overlap=True)

    async def nothing(work: Work) -> AsyncIterator[Group]:
        yield group(work.id)

    rollout.run = nothing  # type: ignore[method-assign]
    with pytest.raises(NoSignalError, match="step 1: all 0 episodes failed"):
        virtual_clock.run(made.run())


@pytest.mark.parametrize(("seconds", "steps", "updates"), [(2.0, 0, 0), (4.0, 1, 2)])
def test_an_interrupt_never_leaves_half_a_step(
    tmp_path: Path, seconds: float, steps: int, updates: int
) -> None:
    """Before the first update it ends the step at once; after it, the step is played to its end."""
    made, recorded, _ = prepared(tmp_path, overlap=True, steps=3)

    async def run() -> None:
        asyncio.get_running_loop().call_later(seconds, os.kill, os.getpid(), signal.SIGINT)
        with pytest.raises(Interrupted):
            await made.run()

    virtual_clock.run(run())
    assert (made.state.step, len(recorded.updates)) == (steps, updates)
    assert made.parts.store.newest()[0] == steps
    again: Any = loop(tmp_path, 0, steps=3)
    assert again.state.step == steps


def refused(trainer: dict[str, Any] | None = None, rollout: Any = None, publishes: Any = "parameters",
            **algorithm: Any) -> str:  # fmt: skip
    values = {
        "environments": [{"type": "bandit"}],
        "rollout": {"overlap_training": True, **(rollout or {})},
        "trainer": {"updates_per_step": 2, **(trainer or {})},
        "algorithm": {"type": "grpo", "max_refills": 0, **algorithm},
    }
    config = load([], REGISTRIES, values=values, env={}).config
    able = TrainerCapabilities(frozenset({"logprobs", "reference_logprobs", "values"}), publishes)
    parts: Any = (SimpleNamespace(capabilities=EngineCapabilities(64)), SimpleNamespace(capabilities=able))
    try:
        check_parts(config, *parts)
    except CapabilityError as error:
        return str(error)
    return ""


def test_what_depends_on_all_groups_is_refused() -> None:
    assert refused() == ""
    assert refused(kl_coef=0.1) == ""
    start = "rollout.overlap_training = true: "
    assert refused({"updates_per_step": 1}) == start + (
        "trainer.updates_per_step = 1 leaves no update to begin with; expected more"
    )
    assert "'local' shares its weights with the engine" in refused(publishes="shared")
    for key, value in (
        ("max_refills", 1), ("oversample", 1.5), ("whiten", "tokens"), ("entropy_advantage", 0.2),
        ("advantage_over", "batch"),
    ):  # fmt: skip
        assert f"algorithm.{key}" in refused(drop_zero_variance=False, **{key: value}), key
    assert "rollout.max_async_level = 1: expected 0" in refused(rollout={"max_async_level": 1})
    assert "scores all groups before the first update" in refused(type="ppo")


def test_shares_are_cut_in_the_order_of_issue_whatever_ends_first(tmp_path: Path) -> None:
    made, recorded, rollout = prepared(tmp_path, overlap=True, steps=1)

    async def any_time(work: Work) -> AsyncIterator[Group]:
        await asyncio.sleep(Random(work.id).uniform(0, 9))
        yield group(work.id, *(sampled(one_turn(f"{work.id}/{i}", 2, float(i)), 0) for i in (0, 1)))

    rollout.run = any_time  # type: ignore[method-assign]
    virtual_clock.run(made.run())
    assert [groups for _, groups, _ in recorded.updates] == [["s1g0", "s1g1"], ["s1g2", "s1g3"]]
    assert cast(Any, made.parts.engine).version == 1
