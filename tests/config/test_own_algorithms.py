"""Losses, advantages, credit, recipes and strategies of a user's own, named by file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import silva
from silva.algorithms.objective import parse
from silva.config.load import load
from silva.errors import ConfigError
from silva.registries import REGISTRIES
from silva.storage.metrics import read_metrics

OWN = '''
import numpy as np
import torch

from silva.algorithms.assign import assign
from silva.algorithms.losses import Loss, LossSettings
from silva.algorithms.recipes import Grpo
from silva.rollouts.settings import LinearRolloutSettings


class DppoSettings(LossSettings):
    """Leaves out tokens whose probability has moved by more than max_tv."""

    max_tv: float = 0.2


def dppo(*, settings, logprobs, old_logprobs, advantages):
    moved = (logprobs.exp() - old_logprobs.exp()).abs() > settings.max_tv
    ratio = (logprobs - old_logprobs).exp()
    return torch.where(moved, 0.0, -ratio * advantages), {"moved": moved.to(ratio.dtype)}


loss = Loss(DppoSettings, dppo)


def centred(scores):
    return scores.rewards - scores.group_mean()


def later(samples, groups, recipe):
    """Only the second half of a row."""
    rows = assign(samples, groups, recipe.advantage, over=recipe.advantage_over)
    return [r.replace(advantages=np.where(np.arange(len(r)) < len(r) // 2, 0.0, r.advantages)) for r in rows]


class Mine(Grpo):
    """GRPO with a key more."""

    boldness: float = 1.0


class Straight(LinearRolloutSettings):
    """Linear, by another name."""
'''
KEYS: dict[str, Any] = {
    "steps": 2, "model": {"type": "tiny", "layers": 1, "context": 256},
    "environments": [{"type": "guess_number", "eval_size": 4, "train_size": 32}],
    "rollout": {"groups_per_step": 2, "group_size": 2, "limits": {"max_turns": 2, "max_turn_tokens": 4}},
    "algorithm": {"drop_zero_variance": False}, "trainer": {"updates_per_step": 1, "optimizer": {"lr": 1e-3}},
    "eval": {"every": 0, "tasks": 2}, "checkpoint.every": 0,
    "monitoring": {"terminal": "off", "tensorboard": False, "report": False},
}  # fmt: skip


@pytest.fixture
def own(tmp_path: Path, adopted: None) -> str:
    """The file."""
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return str(path)


def resolved(*options: str, cwd: Path | None = None, own_code: bool = True) -> Any:
    line = ["--environments.0.type=bandit", *options]
    return load(line, REGISTRIES, env={}, cwd=cwd, own_code=own_code).config


@pytest.mark.slow
def test_a_run_with_parts_of_ones_own(own: str, tmp_path: Path) -> None:
    """All five at once; the metrics of the loss are its own."""
    algorithm = {"type": f"{own}:Mine", "boldness": 2.0, "advantage": f"{own}:centred",
                 "credit": f"{own}:later", "loss": {"type": f"{own}:loss", "max_tv": 0.5}}  # fmt: skip
    rollout = {"type": f"{own}:Straight", **KEYS["rollout"]}
    keys = KEYS | {"algorithm": KEYS["algorithm"] | algorithm, "rollout": rollout}
    outcome = silva.train(keys | {"name": "own", "output_dir": str(tmp_path)})
    rows = list(read_metrics(outcome.directory / "metrics.jsonl"))
    assert rows[-1]["step"] == 2 and "train/moved" in rows[-1]
    saved = (outcome.directory / "config.toml").read_text()
    assert f"{json.dumps(f'{own}:later')}" in saved and "boldness = 2.0" in saved


@pytest.mark.slow
def test_files_are_relative_to_the_folder(own: str, tmp_path: Path) -> None:
    config = resolved("--algorithm.loss", "own.py:loss", "--algorithm.credit=own.py:later", cwd=tmp_path)
    assert (config.algorithm.loss.type, config.algorithm.loss.max_tv) == (f"{own}:loss", 0.2)
    assert config.algorithm.type == "grpo" and config.algorithm.credit == f"{own}:later"
    assert resolved("--algorithm", f"{own}:Mine").algorithm.boldness == 1.0
    assert resolved("--rollout", f"{own}:Straight").rollout.group_size == 8


def test_what_crosses_to_a_trainer_is_checked_there(own: str) -> None:
    config = resolved("--algorithm.loss.type", f"{own}:loss", "--algorithm.loss.max_tv=0.1")
    loss, settings, _ = parse(config.algorithm.loss_spec())
    assert settings.model_dump() == {"type": f"{own}:loss", "max_tv": 0.1}
    half = torch.full((2,), 0.5).log()
    found, metrics = loss.function(
        settings=settings,
        logprobs=torch.tensor([0.5, 0.7]).log(),
        old_logprobs=half,
        advantages=torch.ones(2),
    )
    assert found.tolist() == [-1.0, 0.0] and metrics["moved"].tolist() == [0.0, 1.0]


@pytest.mark.slow
def test_a_process_loads_no_code_that_others_name(own: str) -> None:
    for key, name in (("algorithm.loss", "loss"), ("algorithm", "Mine"), ("rollout", "Straight")):
        with pytest.raises(ConfigError, match="loads no code that others name"):
            resolved(f"--{key}", f"{own}:{name}", own_code=False)
    resolved("--algorithm.loss", f"{own}:loss")
    assert resolved("--algorithm.loss", f"{own}:loss", own_code=False).algorithm.loss.type == f"{own}:loss"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--algorithm.loss {own}:gone", "own.py has no gone; it defines loss"),
        ("--algorithm.loss {own}:centred", "centred in .* is not a Loss: it is a function"),
        ("--algorithm.credit {own}:loss", "loss in .* is not a function"),
        ("--algorithm {own}:Straight", "Straight in .* is not a subclass of Algorithm"),
        ("--algorithm.loss.type {own}:loss --algorithm.loss.max_tx 1", "did you mean algorithm.loss.max_tv"),
        ("--rollout nope", 'known: .*"linear".*your own as "file.py:Class"'),
    ],
)
def test_what_does_not_fit_is_named(own: str, options: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolved(*options.format(own=own).split())
