"""Runs of a mixture of experts: routes go from the engine through turns and files into updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from tests.moe import folder
from tests.runs import metrics

import silva
from silva.cli import main
from silva.config.sections import PretrainedModel
from silva.models.loading import load_model
from silva.models.routing import Routing
from silva.orchestrator.replay import encode_rollouts
from silva.rollouts.samples import trajectory_samples
from silva.storage.rollouts import ROUTED, SCHEMA, decode_rollouts, read_rollouts

LAKE = {"type": "frozen_lake", "size": 3, "style": "compact", "think": False, "answer_tags": False,
        "max_actions_per_turn": 1, "max_actions": 4, "eval_size": 2}  # fmt: skip


def keys(base: Path, output: Path, name: str) -> dict[str, Any]:
    return {
        "name": name, "output_dir": str(output), "steps": 2, "environments": [LAKE],
        "model": {"type": "pretrained", "name": str(base)},
        "rollout": {"groups_per_step": 2, "group_size": 3,
                    "limits": {"max_turns": 3, "max_turn_tokens": 8, "max_episode_tokens": 120}},
        "algorithm.drop_zero_variance": False, "trainer.optimizer.lr": 1e-3, "checkpoint.every": 0,
        "eval": {"every": 0, "tasks": 1},
        "monitoring": {"terminal": "off", "tensorboard": False, "report": False},
    }  # fmt: skip


@pytest.mark.slow
def test_a_run_trains_on_the_experts_that_it_sampled_with(tmp_path: Path) -> None:
    base = folder(tmp_path / "base", max_position_embeddings=256)
    for name in ("free", "replayed"):
        silva.train(keys(base, tmp_path, name) | {"trainer.replay_routing": name == "replayed"})
    files = [tmp_path / name / "rollouts" / "step_1.parquet" for name in ("free", "replayed")]
    assert [pq.read_schema(file).remove_metadata() for file in files] == [SCHEMA, ROUTED]
    plain, rows = (read_rollouts(file) for file in files)
    assert [row.trajectory for row in plain] == [row.trajectory for row in rows]  # only routes differ
    model = load_model(PretrainedModel(name=str(base)), seed=0).model
    routing, turns = Routing(model), 0
    for row in rows:
        for sample in trajectory_samples(row.trajectory, row.group):
            with torch.no_grad(), routing.recorded() as own:
                model.get_decoder()(input_ids=torch.tensor(sample.tokens)[None], use_cache=False)
            expected = np.sort(torch.stack(own, 1).numpy())[:-1]
            assert sample.routes is not None and (sample.routes[0] == 255).all()
            assert np.array_equal(np.sort(sample.routes[1:]), expected)
            turns = max(turns, len(sample.turn_ids))
    assert turns == 3
    (again,) = decode_rollouts(
        encode_rollouts(rows[:1]), "replay.parquet"
    )  # as a checkpoint keeps them for replay
    kept, was = (each.trajectory.turns[1].segments[0].routes for each in (again, rows[0]))
    assert was is not None and was.shape[1:] == (2, 2) and np.array_equal(kept, was)
    assert "routing/entropy" not in metrics(tmp_path / "free")[1]
    for step in metrics(tmp_path / "replayed")[1:]:
        assert 0.25 <= step["routing/busiest_expert"] <= 0.5 and step["routing/entropy"] <= np.log(4)
    assert all(step["train/mismatch_kl"] < 1e-8 for step in metrics(tmp_path / "replayed")[1:])


def test_a_model_without_experts_is_refused_at_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--environments.0.type", "bandit", "--model.type", "tiny", "--output_dir", str(tmp_path)]
    assert main(["rl", *arguments, "--trainer.replay_routing", "true"]) != 0
    said = capsys.readouterr()
    assert "family llama has no experts" in said.err + said.out
