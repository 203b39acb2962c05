"""Warm starts without enough to imitate: an error with its reason, never a loss of 0."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file
from tests.runs import small

import silva
from silva.errors import NoSignalError


def train(folder, world, **more):
    keys = small(folder, warm_start={"steps": 4, "episodes_per_step": 8}, **more)
    keys["environments"][0] |= world
    return silva.train(keys)


def log(folder):
    return (folder / "run" / "run.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "more", "reason"),
    [
        ({"share": 1.0}, {},
         r"16 of 16 scripted episodes .* 16 x step: ValueError: .* \(tests/worlds.py:\d+\)"),
        ({}, {"rollout.limits.max_episode_tokens": 6},
         r"16 x the first observation .*max_episode_tokens = 6"),
        ({}, {"rollout.limits.max_turns": 1},
         r"the expert solved none of 16 tasks.*silva eval --policy expert"),
        ({}, {"warm_start.mistakes": 1.0}, r"nothing to imitate.*warm_start.mistakes = 1, expected less"),
    ],
)  # fmt: skip
def test_too_little_to_imitate_is_an_error_with_its_reason(tmp_path, world, more, reason):
    with pytest.raises(NoSignalError, match=f"warm start: .*{reason}"):
        train(tmp_path, world, **more)
    assert log(tmp_path).count("Traceback (most recent call last)") == len(world)
    assert "warm start: 4 supervised steps" not in log(tmp_path)


@pytest.mark.slow
def test_a_few_failed_episodes_are_counted_and_shown(tmp_path):
    train(tmp_path, {"share": 0.2})
    text = log(tmp_path)
    assert "warm start: 4 supervised steps" in text
    line = next(line for line in text.splitlines() if "were not imitated" in line)
    failed, played = map(int, re.search(r"(\d+) of (\d+) episodes", line).groups())
    assert 0 < failed < played == 32 and f"{failed} x step: ValueError: the step is broken" in line


def test_the_weights_after_a_warm_start_are_on_disk_before_anything_else(tmp_path, monkeypatch):
    """Whatever ends the run from then on, a resume does not do the warm start again."""
    from silva.orchestrator import rl

    async def fail(self, step):
        raise RuntimeError("in the first evaluation")

    with monkeypatch.context() as patch:
        patch.setattr(rl.Loop, "_evaluate", fail)
        with pytest.raises(RuntimeError, match="in the first evaluation"):
            train(tmp_path, {})
    state = json.loads((tmp_path / "run" / "checkpoints" / "step_0" / "state.json").read_text())
    assert state["step"] == 0 and state["eval_before"] is None
    assert log(tmp_path).count("supervised steps") == 1


@pytest.mark.slow
@pytest.mark.parametrize("lora", [{}, {"model.lora.rank": 2}])
def test_the_reference_is_the_policy_after_its_warm_start(tmp_path, lora):
    """And stays it. Before the warm start the adapters are the identity: their B is 0."""
    more = {"algorithm.kl_coef": 0.1, "checkpoint.every": 1,
            "trainer.optimizer.lr": 1e-2, "warm_start.optimizer.lr": 1e-2}  # fmt: skip
    train(tmp_path, {}, **more, **lora)
    checkpoints = tmp_path / "run" / "checkpoints"

    def tensors(step, name):
        return load_file(checkpoints / f"step_{step}" / "trainer" / f"{name}.safetensors")

    warm, reference = tensors(0, "weights"), tensors(1, "reference")
    assert warm.keys() == reference.keys() and all(torch.equal(reference[n], warm[n]) for n in warm)
    assert all(reference[n].any() for n in reference)
    trained = tensors(1, "weights")
    assert any(not torch.equal(reference[n], trained[n]) for n in trained)
