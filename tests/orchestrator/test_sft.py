"""Warm starts without enough to imitate: an error with its reason, never a loss of 0."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file
from tests.runs import WORLDS

import silva
from silva.errors import NoSignalError


def train(folder, world, **more):
    keys = {
        "name": "run", "steps": 1, "output_dir": str(folder), "eval": {"tasks": 2},
        "model": {"type": "tiny", "layers": 1, "width": 32, "heads": 2, "kv_heads": 1},
        "environments": [{"type": f"{WORLDS}:Parity", "eval_size": 4, **world}],
        "rollout": {"groups_per_step": 2, "group_size": 3, "limits": {"max_turn_tokens": 4}},
        "warm_start": {"steps": 4, "episodes_per_step": 8}, "trainer.self_check": False,
        "monitoring": {"terminal": "off", "tensorboard": False, "report": False},
    }  # fmt: skip
    return silva.train(keys | more)


def log(folder):
    return (folder / "run" / "run.log").read_text()


def test_an_expert_whose_episodes_all_fail_is_an_error_with_file_and_line(tmp_path):
    reason = r"warm start: 16 of 16 scripted episodes .* 16 x step: ValueError: .* \(tests/worlds.py:\d+\)"
    with pytest.raises(NoSignalError, match=reason):
        train(tmp_path, {"share": 1.0})
    assert log(tmp_path).count("Traceback (most recent call last)") == 1
    assert "warm start: 4 supervised steps" not in log(tmp_path)


def test_a_prompt_that_has_no_room_is_named(tmp_path):
    with pytest.raises(NoSignalError, match=r"16 x the first observation .*max_episode_tokens = 6"):
        train(tmp_path, {}, **{"rollout.limits.max_episode_tokens": 6})


def test_an_expert_that_solves_nothing_is_not_imitated(tmp_path):
    with pytest.raises(
        NoSignalError, match=r"the expert solved none of 16 tasks.*silva eval --policy expert"
    ):
        train(tmp_path, {}, **{"rollout.limits.max_turns": 1})


def test_nothing_but_mistakes_is_nothing_to_imitate(tmp_path):
    with pytest.raises(NoSignalError, match=r"nothing to imitate.*warm_start.mistakes = 1, expected less"):
        train(tmp_path, {}, **{"warm_start.mistakes": 1.0})


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


@pytest.mark.parametrize("lora", [{}, {"model.lora.rank": 2}])
def test_the_reference_is_the_policy_after_its_warm_start(tmp_path, lora):
    """And stays it. Before the warm start the adapters are the identity: their B is 0."""
    more = {"algorithm.kl_coef": 0.1, "algorithm.drop_zero_variance": False, "checkpoint.every": 1,
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
