"""A run whose contexts are rewritten: the same for all who play, and rows of what was sampled from."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from tests.runs import WORLDS, small

import silva
from silva.commands.evaluate import evaluate_config
from silva.commands.plan import plan_run
from silva.config.load import load
from silva.registries import REGISTRIES
from silva.rollouts import episode


@pytest.fixture
def shown(monkeypatch) -> dict[str, set[str]]:
    """What kind of context episodes had, by the beginning of their ids."""
    found: dict[str, set[str]] = defaultdict(set)
    inner = episode.answered

    def answered(state, reply, message, step, settings):
        found[re.match("[a-z]+", message.id)[0]].add(settings.type)
        return inner(state, reply, message, step, settings)

    monkeypatch.setattr(episode, "answered", answered)
    return found


def keys(folder: Path) -> dict[str, Any]:
    return small(
        folder,
        environments=[{"type": f"{WORLDS}:Parity", "eval_size": 4, "turns": 3}],
        warm_start={"steps": 1, "episodes_per_step": 2},
        **{"model.dtype": "float64", "rollout.groups_per_step": 4, "rollout.group_size": 4,
           "rollout.context": "single_turn"},
    )  # fmt: skip


@pytest.mark.slow
def test_all_who_play_are_shown_the_same_and_rows_are_what_was_sampled_from(tmp_path, shown) -> None:
    """The trainer finds the sampler's log-probabilities: a row of another context would have others."""
    silva.train(keys(tmp_path))
    assert dict(shown) == {kind: {"single_turn"} for kind in ("eval", "w", "s")}
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert (row["rollout/turns"], row["rollout/rows"]) == (3.0, 3.0)
    assert abs(row["train/mismatch_kl"]) < 1e-12 and row["train/ratio"] == pytest.approx(1.0, abs=1e-9)


@pytest.mark.slow
def test_so_do_evaluations_and_plans(tmp_path, shown) -> None:
    config = load([], REGISTRIES, values=keys(tmp_path)).config
    evaluate_config(config, policy="expert")
    assert dict(shown) == {"eval": {"single_turn"}}
    shown.clear()
    plan = plan_run(config)
    assert dict(shown) == {"w": {"single_turn"}, "probe": {"single_turn"}}
    assert plan.probe.rows == 3
