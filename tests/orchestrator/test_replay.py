"""Groups that are trained again: which ones, how stale, and the same after a file."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from tests.algorithms.by_hand import group, one_turn

from silva.algorithms.recipes import ActPrm, Grpo
from silva.algorithms.settings import ReplaySettings
from silva.orchestrator.replay import Replay
from silva.storage.ledger import Ledger, audit, read
from silva.types import Group, Trajectory


def sampled(key: str, version: int) -> Group:
    made = group(key, one_turn(f"{key}/0", 2, 1.0), one_turn(f"{key}/1", 1, 0.0))

    def older(trajectory: Trajectory) -> Trajectory:
        turns = tuple(
            dataclasses.replace(turn, segments=tuple(
                dataclasses.replace(s, versions=(version,) * len(s.versions)) for s in turn.segments))
            for turn in trajectory.turns
        )  # fmt: skip
        return dataclasses.replace(trajectory, turns=turns)

    return dataclasses.replace(made, trajectories=tuple(map(older, made.trajectories)))


def filled(**keys: Any) -> Replay:
    """Two groups of each of the versions 0 to 4, which steps 1 to 5 have trained."""
    replay = Replay(ReplaySettings(**keys), seed=3)
    for version in range(5):
        replay.add(version + 1, [sampled(f"s{version}g{i}", version) for i in range(2)])
    return replay


def keys(groups: list[Group]) -> list[str]:
    return [group.key for group in groups]


def test_only_groups_that_are_not_too_stale_are_drawn() -> None:
    replay = filled(groups=9, max_staleness=2)
    assert keys(replay.draw(6, version=5)) == ["s3g0", "s3g1", "s4g0", "s4g1"]
    assert keys(replay.draw(6, version=7)) == []
    assert replay.staleness(replay.draw(6, version=5), version=5) == 1.5
    assert replay.staleness([], version=5) == 0


def test_the_seed_and_the_step_decide_what_is_drawn() -> None:
    drawn = [keys(filled(groups=3, max_staleness=9).draw(step, version=5)) for step in range(40)]
    assert drawn == [keys(filled(groups=3, max_staleness=9).draw(step, version=5)) for step in range(40)]
    assert len({tuple(each) for each in drawn}) > 20
    counts = {key: sum(key in each for each in drawn) for each in drawn for key in each}
    assert len(counts) == 10 and sum(counts.values()) == 120


def test_the_oldest_make_room() -> None:
    replay = filled(groups=9, max_staleness=9, capacity=3)
    assert replay.size == 3 and keys(replay.draw(6, version=5)) == ["s3g1", "s4g0", "s4g1"]


def test_a_file_holds_all_that_training_reads() -> None:
    replay = filled(groups=4, max_staleness=9)
    again = Replay(replay.settings, 3)
    again.load(replay.state())
    assert again.size == replay.size
    for mine, other in zip(replay.draw(6, 5), again.draw(6, 5), strict=True):
        assert (mine.key, mine.trajectories) == (other.key, other.trajectories)
        assert mine.task.environment == other.task.environment
    again.load(Replay(replay.settings, 3).state())
    assert again.size == 0


def test_a_loss_without_a_ratio_needs_a_correction() -> None:
    with pytest.raises(ValueError, match="which takes stale samples for its own"):
        ActPrm(replay=ReplaySettings())
    ActPrm(replay=ReplaySettings(), rollout_correction={})
    Grpo(replay=ReplaySettings())


def test_the_audit_knows_what_may_be_replayed(tmp_path: Any) -> None:
    def problems(*groups: str) -> list[str]:
        ledger = Ledger.create(tmp_path / f"{'_'.join(groups)}.jsonl")
        for step, name in ((1, "a"), (2, "b")):
            ledger.record("issued", work=name, task="t", environment="e", step=step, attempt=0)
            ledger.record("sealed", work=name, step=step, groups={name: {"trajectories": [], "rewards": []}})
            ledger.record("trained", step=step, update=0, groups=[name])
        ledger.record("replayed", step=2, update=0, groups=list(groups))
        ledger.commit()
        return audit(read(ledger.path), finished=True)

    assert problems("a") == []
    assert problems("b") == [
        "seq 6: group b replayed, but trained in step 2, expected trained in an earlier step"
    ]
    assert problems("c") == ["seq 6: group c replayed, but never sealed, expected trained in an earlier step"]
