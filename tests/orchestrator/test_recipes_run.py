"""Every recipe through whole runs of two steps, in two worlds, from one warm-started tiny model."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.algorithms.by_hand import recipe
from tests.runs import metrics

import silva
from silva.algorithms import ALGORITHMS
from silva.commands.sft import supervise
from silva.storage.ledger import audit, read

GROUPS = 4
GAME = {"style": "compact", "think": False, "answer_tags": False, "eval_size": 4}
LAKE = {"type": "frozen_lake", "size": 3, "frozen": 0.9, "random_start": True, "max_actions_per_turn": 1,
        "max_actions": 4}  # fmt: skip
KEYS = {
    "steps": 2, "environments": [GAME | LAKE, GAME | {"type": "bandit", "train_size": 32}],
    "rollout": {"groups_per_step": GROUPS, "group_size": 4,
                "limits": {"max_turns": 4, "max_turn_tokens": 14, "max_episode_tokens": 128}},
    "trainer": {"updates_per_step": 2, "micro_batch_tokens": 512, "optimizer": {"lr": 1e-3}},
    "trainer.critic.optimizer.lr": 1e-3, "eval": {"every": 0, "tasks": 4}, "checkpoint.every": 0,
    "monitoring": {"terminal": "off", "tensorboard": False, "report": False},
}  # fmt: skip
WARM = {
    "name": "warm", "model": {"type": "tiny", "layers": 1, "context": 256},
    "warm_start": {"steps": 240, "episodes_per_step": 16, "noise": 0.3, "optimizer": {"lr": 1e-2}},
}  # fmt: skip

# Of a group's rewards as training saw them and its raw ones; recipes whose tokens differ within a trajectory,
# or that scale the batch, are left out.
BY_HAND: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "mean": lambda r, raw: r - r.mean(),
    "mean_std": lambda r, raw: (r - r.mean()) / (r.std(ddof=1) + 1e-4),
    "leave_one_out": lambda r, raw: r - (r.sum() - r) / (len(r) - 1),
    "max_rl": lambda r, raw: divided(raw - raw.mean(), abs(raw).mean()) + (r - raw) - (r - raw).mean(),
    "share": lambda r, raw: divided(raw, abs(raw).sum()) + (r - raw) - (r - raw).mean(),
    "reward": lambda r, raw: r,
}


def divided(values: np.ndarray, size: float) -> np.ndarray:
    return values / size if size > 0 else 0 * values


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights that play: some episodes succeed, some do not."""
    outcome = supervise(KEYS | WARM | {"output_dir": str(tmp_path_factory.mktemp("start"))})
    assert outcome.weights is not None
    return outcome.weights


@pytest.fixture(scope="module")
def other_model(start: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights."""
    folder = tmp_path_factory.mktemp("other_model")
    shutil.copytree(start, folder, dirs_exist_ok=True)
    weights, generator = load_file(start / "model.safetensors"), torch.Generator().manual_seed(0)
    other = {n: w * (1 + 0.1 * torch.randn(w.shape, generator=generator)) for n, w in weights.items()}
    save_file(other, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def train(name: str, start: Path, folder: Path, **algorithm: Any) -> Path:
    """The folder of a run from these weights."""
    recipe = {"algorithm": {"type": name, **algorithm}, "model": {"name": str(start)}}
    return silva.train(KEYS | recipe | {"name": name, "output_dir": str(folder)}).directory


def trained_groups(run: Path, step: int) -> dict[str, np.ndarray]:
    """Rewards that training saw, raw rewards, and advantages of last tokens, [3, size] by group."""
    rows = pq.read_table(run / "rollouts" / f"step_{step}.parquet").to_pylist()
    groups: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    for row in rows:
        if row["status"] == "trained":
            groups[row["group"]].append((row["reward_shaped"], row["reward_raw"], row["advantage"]))
    return {key: np.array(columns).T for key, columns in groups.items()}


def moved(before: dict[str, torch.Tensor], after: Path) -> set[str]:
    weights = load_file(after)
    return {name for name in before if not torch.equal(before[name], weights[name])}


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_run(tmp_path: Path, start: Path, other_model: Path, name: str) -> None:
    given = {"reference": {"name": str(other_model)}} if name == "distillation" else {}
    run, made = train(name, start, tmp_path, **given), recipe(name)
    rows, begun = metrics(run)[1:], load_file(start / "model.safetensors")
    assert [row["step"] for row in rows] == [1, 2]
    assert not any("nonfinite" in row or row["train/nonfinite"] for row in rows)
    assert audit(read(run / "ledger.jsonl"), finished=True) == []
    assert rows[0]["train/grad_norm"] > 1e-3 and 0 < rows[0]["groups/trained"] <= GROUPS
    assert moved(begun, run / "weights/step_2/model.safetensors") == begun.keys()

    if made.critic:
        critic = run / "checkpoints/step_2/trainer/critic/weights.safetensors"
        assert moved(begun, critic) == begun.keys()
        assert load_file(critic)["value_head.linear.weight"].abs().min() > 0
        assert all(row["train/critic/loss"] > 0 and not row["train/critic/nonfinite"] for row in rows)
        explained = [row.get("critic/explained_variance") for row in rows]  # None: all returns were equal
        assert not explained[0] and explained[1] != 0
    if made.oversample > 1:
        left_out = sum(rows[0].get(f"groups/{why}", 0) for why in ("low_variance", "zero_variance"))
        assert (rows[0]["groups/trained"], left_out) == (GROUPS, (made.oversample - 1) * GROUPS)
    assert ("train/kl" in rows[0]) == (made.kl_coef > 0)

    by_token = made.critic or made.whiten or made.entropy_advantage or made.kl_reward_coef
    if made.advantage in BY_HAND and made.advantage_over == "group" and not by_token:
        for row in rows:
            groups = trained_groups(run, row["step"])
            assert len(groups) == row["groups/trained"]
            for rewards, raw, advantages in groups.values():
                expected = BY_HAND[made.advantage](rewards, raw)
                np.testing.assert_allclose(advantages, expected, rtol=1e-5, atol=1e-6)


def test_the_runs_above_have_something_to_compare(tmp_path: Path, start: Path) -> None:
    """Rewards differ within the groups of both worlds, and penalties are among what training sees."""
    run = train("grpo", start, tmp_path, length_penalty=0.25, overlong_buffer=0.5)
    rows = pq.read_table(run / "rollouts/step_1.parquet").to_pylist()
    groups = trained_groups(run, 1)
    assert len(groups) > 1 and all(len(set(rewards)) > 1 for rewards, _, _ in groups.values())
    assert any(dict(row["shaped"])["length"] < 0 for row in rows if row["status"] == "trained")
    assert {row["environment"] for row in rows} == {"frozen_lake", "bandit"}
