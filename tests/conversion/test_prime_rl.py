"""`silva import` of PRIME-RL: its algorithms, levels, groups, evaluations and tasks."""

from __future__ import annotations

import pytest
from tests.conversion.test_configs import PRIME, files, read_as

from silva.cli import main

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("kind", "ours"), [
    ("grpo", {"type": "aipo", "advantage": "mean"}),
    ("max_rl", {"type": "aipo", "advantage": "max_rl"}),
    ("rae", {"type": "aipo", "advantage": "running", "drop_zero_variance": False}),
    ("opd", {"type": "distillation", "reference": {"name": "their/teacher"}}),
])  # fmt: skip
def test_algorithms_of_prime_rl_keep_their_advantage(tmp_path, kind, ours):
    teacher = '[orchestrator.algo.teacher]\nname = "their/teacher"\n' if kind == "opd" else ""
    found = read_as(tmp_path, "rl.toml", f'{PRIME}[orchestrator.algo]\ntype = "{kind}"\n{teacher}')[
        "algorithm"
    ]
    assert {key: found.get(key) for key in ours} == ours


def test_no_level_no_stale_rollouts_and_two_places_for_one_algorithm_of_prime_rl(tmp_path):
    algo = "".join(
        f'[{at}.algo]\ntype = "opd"\n[{at}.algo.teacher]\nname = "their/teacher"\n'
        for at in ("orchestrator", "orchestrator.train")
    )
    found = read_as(tmp_path, "rl.toml", f"max_async_level = 0\n{PRIME}{algo}")
    assert found["rollout"]["max_async_level"] == 0 and "max_off_policy_steps" not in found["rollout"]
    assert "placement" not in found
    assert found["algorithm"] == {"type": "distillation", "reference": {"name": "their/teacher"}}


def test_a_group_of_one_has_to_be_changed(tmp_path, capsys):
    (path,) = files(tmp_path, {"rl.toml": PRIME.replace("group_size = 16\n", "")})
    assert main(["import", str(path)]) == 2
    assert "rollout.group_size = 1 leaves nothing to compare an episode with" in capsys.readouterr().out


def test_evaluations_and_tasks_of_prime_rl_have_their_numbers(tmp_path):
    text = (
        PRIME.replace("interval = 5", "")
        + """
[[orchestrator.train.source]]
name = "sort"
[orchestrator.train.source.env.taskset]
id = "alphabet-sort"
max_turns = 5
[[orchestrator.train.source]]
[orchestrator.train.source.env.taskset]
id = "their/maths"
level = 3
[[orchestrator.train.source.env.taskset.judges]]
model = "large"
[[orchestrator.eval.source]]
num_examples = -1
interval = 20
[orchestrator.eval.source.env.taskset]
id = "reverse-text"
[trainer.scheduler]
type = "cosine"
"""
    )
    found = read_as(tmp_path, "rl.toml", text)
    assert found["eval"] == {"every": 20}
    assert found["environments"][2] == {"type": "alphabet_sort", "name": "sort", "max_turns": 5}
    assert found["environments"][3]["config"] == {"level": 3, "judges": [{"model": "large"}]}
    assert found["trainer"]["optimizer"]["warmup"] == 10  # its default
