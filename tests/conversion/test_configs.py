"""`silva import`: configurations in the shapes of other frameworks, and what becomes of their keys."""

from __future__ import annotations

import importlib
import json
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
from tests.conversion import supervised_configs

from silva.cli import main
from silva.commands.import_config import convert, problems, written
from silva.conversion.configs import READERS
from silva.conversion.configs.carried import Carried, Computed, Found
from silva.conversion.configs.source import read
from silva.errors import ConfigError

pytestmark = pytest.mark.slow

TRL = """
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

raise SystemExit("it must not run")
LONGEST, PROMPT = 1024, 256
longest = 1024

def right(completions, answer, **kwargs):
    return [float(c == a) for c, a in zip(completions, answer)]

data = load_dataset("openai/gsm8k", "main", split="train")
args = GRPOConfig(
    output_dir="out/sums", max_steps=40, learning_rate=5e-6, warmup_ratio=0.1, lr_scheduler_type="cosine",
    per_device_train_batch_size=4, gradient_accumulation_steps=8, num_generations=8, beta=0.04,
    max_prompt_length=256, max_completion_length=longest - 256, loss_type="dr_grpo", scale_rewards=False,
    epsilon_high=0.28, report_to=["wandb"], logging_steps=1, mask_truncated_completions=True,
)
GRPOTrainer(model="Qwen/Qwen2.5-0.5B", reward_funcs=[right], args=args, train_dataset=data)
"""
VERL = """
BATCH=64
REPLY=512
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files=gsm8k/train.parquet \\
    data.val_files="[gsm8k/test.parquet]" \\
    data.train_batch_size=${BATCH} \\
    data.max_prompt_length=256 \\
    data.max_response_length=$REPLY \\
    actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct \\
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \\
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$((2 * (REPLY + 256))) \\
    actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \\
    actor_rollout_ref.actor.clip_ratio_high=0.28 \\
    actor_rollout_ref.rollout.n=5 \\
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \\
    trainer.experiment_name=sums \\
    trainer.test_freq=5 trainer.save_freq=-1 \\
    trainer.total_epochs=2 $@
"""
ARPO = """
actor_rollout_ref:
  model: {path: Qwen/Qwen2.5-3B}
  actor: {ppo_mini_batch_size: 16, optim: {lr: 1e-6}}
  rollout:
    n: 16
    mode: sync_with_tool
    initial_rollouts: 8
    beam_size: 2
    branch_probability: 0.5
    entropy_weight: 0.2
    tools:
      call_limit: 3
      tool_instances:
        python: {class_path: verl.workers.agent.tools.PythonTool}
data: {train_batch_size: 128, max_prompt_length: 1536, max_response_length: 4096, train_files: train.parquet}
algorithm: {adv_estimator: grpo}
trainer: {total_training_steps: 30}
"""
RAGEN = {
    "base.yaml": """
model_path: Qwen/Qwen2.5-0.5B-Instruct
ppo_mini_batch_size: 32
actor_rollout_ref:
  model: {path: "${model_path}"}
  actor: {ppo_mini_batch_size: "${ppo_mini_batch_size}", use_kl_loss: False, clip_ratio_low: 0.2,
          clip_ratio_high: 0.28}
  rollout: {response_length: 400, max_model_len: 3600, rollout_filter_ratio: 0.25, rollout_filter_type: std}
algorithm: {adv_estimator: gae, gamma: 1.0, lam: 1.0, high_level_gamma: 0.95, bi_level_gae: False}
trainer: {total_training_steps: 200, test_freq: 10}
agent_proxy: {max_turn: 5, max_actions_per_turn: 5, enable_think: True, action_sep: "||"}
es_manager:
  format_penalty: -0.1
  train: {env_groups: 8, group_size: 16, env_configs: {tags: [SimpleSokoban], n_groups: [8]}}
  val: {env_groups: 256, group_size: 1, env_configs: {tags: [SimpleSokoban], n_groups: [256]}}
custom_envs:
  SimpleSokoban: {env_type: sokoban, max_actions_per_traj: 10, env_config: {dim_x: 6, dim_y: 6,
                  num_boxes: 1, max_steps: 100}}
  CoordFrozenLake: {env_type: frozen_lake, max_actions_per_traj: 8, env_config: {size: 4, p: 0.8}}
""",
    "lake.yaml": """
defaults:
  - ppo_trainer
  - base
algorithm: {bi_level_gae: True}
es_manager:
  train: {env_configs: {tags: [CoordFrozenLake]}}
  val: {env_configs: {tags: [CoordFrozenLake]}}
""",
}
PRIME = """
max_steps = 20
seq_len = 2048
[model]
name = "Qwen/Qwen3-0.6B"
[monitors.wandb]
project = "reverse"
[orchestrator]
batch_size = 128
group_size = 16
max_off_policy_steps = 4
[orchestrator.train.sampling]
max_completion_tokens = 128
[[orchestrator.train.source]]
name = "mine"
[orchestrator.train.source.env.taskset]
id = "someone/their-env"
[[orchestrator.train.source]]
name = "reverse"
[orchestrator.train.source.env.taskset]
id = "reverse-text"
[orchestrator.eval]
interval = 5
[trainer.optim]
lr = 3e-6
[deployment]
num_train_gpus = 2
"""
MINRL = """
from dataclasses import dataclass
SMALL = "HuggingFaceTB/SmolLM2-135M-Instruct"
@dataclass
class TrainerConfig:
    model_id: str = SMALL
    groups_per_batch: int = 8
    task: str = "connections"
    micro_batch_size: int = 2
"""
ACT_PRM = """
trainer_name: act_prm
model_name: Qwen/Qwen3-4B-Instruct-2507
lora_rank: 32
num_batches: 1000
batch_size: 16
group_size: 8
max_tokens: 512
learning_rate: 4e-5
eval_every: 4
renderer_name: null
"""
CASES: dict[str, Any] = {
    **supervised_configs.CASES,
    "trl": ({"grpo.py": TRL}, {
        "name": "sums", "steps": 40, "model.name": "Qwen/Qwen2.5-0.5B", "environments.0.hub": "openai/gsm8k",
        "environments.0.subset": "main", "environments.0.reward": "grpo.py:right", "rollout.group_size": 8,
        "rollout.groups_per_step": 4, "rollout.limits.max_turn_tokens": 768,
        "rollout.limits.max_episode_tokens": 1024,
        "algorithm.kl_coef": 0.04, "algorithm.aggregation": "constant", "algorithm.advantage": "mean",
        "algorithm.loss.clip_low": 0.2, "algorithm.loss.clip_high": 0.28, "trainer.updates_per_step": 1,
        "trainer.optimizer.warmup": 4, "trainer.optimizer.schedule": "cosine",
        "monitoring.sinks.0.type": "wandb",
    }, ["mask_truncated_completions"]),
    "verl": ({"run.sh": VERL}, {
        "name": "sums", "environments.0.path": "gsm8k/train.parquet",
        "environments.0.eval_path": "gsm8k/test.parquet",
        "rollout.groups_per_step": 64, "rollout.group_size": 5, "trainer.updates_per_step": 4,
        "trainer.micro_batch_tokens": 1536, "trainer.optimizer.lr": 1e-6, "algorithm.type": "grpo",
        "algorithm.kl_coef": 0.001, "algorithm.kl_estimator": "k3", "algorithm.aggregation": "token_mean",
        "algorithm.loss.clip_high": 0.28, "algorithm.loss.clip_dual": 3.0, "eval.every": 5,
        "checkpoint.every": 0,
        "eval.sampling.temperature": 0.0, "rollout.limits.max_episode_tokens": 768,
    }, ["trainer.total_epochs", "actor_rollout_ref.rollout.gpu_memory_utilization"]),
    "arpo": ({"arpo.yaml": ARPO}, {
        "rollout.type": "branching", "rollout.variant": "code", "rollout.beam_size": 2,
        "algorithm.type": "arpo",
        "rollout.initial_rollouts": 8, "rollout.entropy_weight": 0.2, "environments.0.tools.0.type": "python",
        "environments.0.max_tool_calls": 3, "steps": 30, "trainer.updates_per_step": 8,
    }, ["actor_rollout_ref.rollout.tools.tool_instances.python.class_path"]),
    "ragen": (RAGEN, {
        "algorithm.type": "bi_level_gae", "algorithm.turn_gamma": 0.95, "environments.0.type": "frozen_lake",
        "environments.0.size": 4, "environments.0.frozen": 0.8, "environments.0.max_actions": 8,
        "environments.0.max_actions_per_turn": 5, "environments.0.format_penalty": -0.1,
        "rollout.group_size": 16,
        "rollout.groups_per_step": 8, "trainer.updates_per_step": 1, "algorithm.variance_filter.value": 0.25,
        "model.name": "Qwen/Qwen2.5-0.5B-Instruct", "rollout.limits.max_turns": 5, "eval.tasks": 256,
    }, []),
    "prime-rl": ({"rl.toml": PRIME}, {
        "steps": 20, "rollout.groups_per_step": 8, "rollout.group_size": 16,
        "rollout.max_off_policy_steps": 4,
        "rollout.limits.max_turn_tokens": 128, "rollout.limits.max_episode_tokens": 2048,
        "algorithm.type": "aipo", "algorithm.loss.kl_tau": 1e-3, "trainer.optimizer.weight_decay": 0.01,
        "rollout.max_async_level": 1, "placement.type": "services", "checkpoint.every": 0,
        "environments.0.taskset_id": "someone/their-env", "environments.1.type": "reverse_text",
        "eval.every": 5,
        "environments.1.name": "reverse", "trainer.optimizer.lr": 3e-6,
        "monitoring.sinks.0.project": "reverse",
    }, ["deployment.num_train_gpus"]),
    "minrl": ({"constants.py": MINRL}, {
        "model.name": "HuggingFaceTB/SmolLM2-135M-Instruct", "rollout.groups_per_step": 8,
        "rollout.group_size": 4,
        "environments.0.type": "connections", "rollout.sampling.temperature": 1.2,
        "trainer.optimizer.lr": 5e-6,
    }, ["micro_batch_size"]),
    "act-prm": ({"aprm.yaml": ACT_PRM}, {
        "rollout.type": "thoughts", "algorithm.type": "act_prm", "model.lora.rank": 32, "steps": 1000,
        "trainer.optimizer.lr": 4e-5, "eval.every": 4, "trainer.optimizer.betas": [0.9, 0.95],
    }, []),
}  # fmt: skip

BOMB = "x0: &x0 [1]\n" + "".join(f"x{n}: &x{n} [*x{n - 1}, *x{n - 1}]\n" for n in range(1, 40))


def at(table: object, path: str) -> object:
    for part in path.split("."):
        table = table[int(part)] if isinstance(table, list) else table[part]  # type: ignore[index]
    return table


def files(folder: Path, contents: dict[str, str]) -> list[Path]:
    for name, text in contents.items():
        (folder / name).write_text(text)
    return [folder / name]


def test_every_framework_has_a_case():
    assert CASES.keys() == READERS.keys()


@pytest.mark.parametrize("system", CASES)
def test_it_is_recognised_and_becomes_a_configuration_that_silva_accepts(tmp_path, system):
    contents, expected, told = CASES[system]
    found, draft = convert(files(tmp_path, contents))
    table = draft.table()
    assert found == system
    assert {path: at(table, path) for path in expected} == expected
    assert problems(table) == ""
    assert set(told) <= {note.key for note in draft.notes}


def test_the_command_that_plans_it_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for system, command in (("trl", "rl"), ("trl-sft", "sft")):
        (path,) = files(tmp_path, CASES[system][0])
        assert main(["import", path.name, "--output", f"{system}.toml"]) == 0
        assert f"silva {command} @ {system}.toml --dry-run" in capsys.readouterr().out


UNKNOWN = {
    **supervised_configs.UNKNOWN,
    "grpo.py": ("logging_steps=1,", "logging_steps=1, frobnicate=7,"),
    "run.sh": ("algorithm.adv_estimator=grpo", "algorithm.adv_estimator=grpo trainer.frobnicate=7"),
    "arpo.yaml": ("\ntrainer: {", "\ntrainer: {frobnicate: 7, "),
    "lake.yaml": ("\nalgorithm: {", "\nalgorithm: {frobnicate: 7, "),
    "rl.toml": ("lr = 3e-6", "lr = 3e-6\nfrobnicate = 7"),
    "constants.py": ("micro_batch_size: int = 2", "micro_batch_size: int = 2\n    frobnicate: int = 7"),
    "aprm.yaml": ("\nlora_rank", "\nfrobnicate: 7\nlora_rank"),
}
"""A key that nobody knows, put into the file of each framework."""


@pytest.mark.parametrize("system", CASES)
def test_no_key_is_lost_without_a_word(tmp_path, system):
    (path,) = files(tmp_path, CASES[system][0])
    old, new = UNKNOWN[path.name]
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    _, draft = convert([path])
    (note,) = [note for note in draft.notes if note.key.endswith("frobnicate")]
    line = next(n for n, text in enumerate(path.read_text().splitlines(), 1) if "frobnicate" in text)
    assert (note.value, note.place, note.dropped) == (7, f"{path.name}:{line}", True)


def read_as(folder: Path, name: str, text: str) -> dict[str, Any]:
    """Silva's table of a file with this text, which Silva accepts."""
    table = convert(files(folder, {name: text}))[1].table()
    assert problems(table) == ""
    return table


def test_a_script_takes_variables_with_defaults_and_dapos_overlong_replies(tmp_path):
    script = """
DATA=${DATA:-"${HOME}/verl"}
MODEL=${MODEL:-"${DATA}/models/seven"}
buffer=256
python3 -m recipe.dapo.main_dapo actor_rollout_ref.model.path="${MODEL}" \\
    data.train_files=train.parquet data.train_batch_size=8 data.max_response_length=1024 \\
    reward_model.overlong_buffer.enable=True reward_model.overlong_buffer.len=${buffer}
"""
    found = read_as(tmp_path, "run.sh", script)
    assert found["model"]["name"] == "${HOME}/verl/models/seven"
    assert found["algorithm"]["overlong_buffer"] == 0.25


def test_a_file_of_verls_evaluation_is_no_run(tmp_path):
    with pytest.raises(ConfigError, match="--from"):
        convert(files(tmp_path, {"evaluation.yaml": "data: {response_key: responses, path: test.parquet}\n"}))


def test_the_toml_says_where_values_come_from_and_what_has_no_equal(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    files(tmp_path, {"rl.toml": PRIME})
    assert main(["import", "rl.toml", "--output", "mine.toml"]) == 0
    text = (tmp_path / "mine.toml").read_text()
    assert "lr = 3e-6  # trainer.optim.lr (rl.toml:25)\n" in text
    assert "#   rl.toml:27  deployment.num_train_gpus = 2: placement, trainer.ranks" in text
    assert tomllib.loads(text)["steps"] == 20
    assert "silva rl @ mine.toml --dry-run" in capsys.readouterr().out
    assert main(["import", "rl.toml", "--output", "mine.toml"]) == 2
    assert "--overwrite" in capsys.readouterr().err


def test_as_json(tmp_path, capsys):
    (path,) = files(tmp_path, {"aprm.yaml": ACT_PRM})
    assert main(["import", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["system"], found["config"]["steps"], found["wrong"]) == ("act-prm", 1000, "")


def test_what_silva_would_refuse_is_said_and_still_written(tmp_path, capsys):
    (path,) = files(tmp_path, {"a.yaml": ACT_PRM.replace("num_batches: 1000", "num_batches: many")})
    assert main(["import", str(path)]) == 2
    out = capsys.readouterr().out
    assert "Has to be changed, or Silva refuses it" in out
    line = ACT_PRM.splitlines().index("num_batches: 1000") + 1
    assert f"num_batches (a.yaml:{line}): steps = " in out and "Python" not in out


def test_a_pipe_is_not_waited_for(tmp_path, capsys):
    os.mkfifo(tmp_path / "a.toml")
    assert main(["import", str(tmp_path / "a.toml")]) == 2
    assert "got no regular file" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "text", "words"), [
    ("a.yaml", "a: [1", "a.yaml: while parsing"),
    ("a.yaml", "a: !!python/object/apply:os.system ['touch x']", "could not determine a constructor"),
    ("a.yaml", BOMB, "more than 20,000 keys"),
    ("a.yaml", "x: &x [*x]", "a.yaml"),
    ("a.yaml", "a: 1", "got a, expected keys of verl-sft, ragen"),
    ("a.toml", "", "got no key, expected keys of verl-sft, ragen"),
    ("a.toml", "a = ", "a.toml: Invalid value"),
    ("a.py", "def (", "a.py:1: no valid Python"),
    ("a.py", "x = " + "(" * 5000, "no valid Python"),
    ("a.json", "{}", "got .json, expected .toml"),
])  # fmt: skip
def test_what_cannot_be_read_is_said_with_its_place(tmp_path, monkeypatch, capsys, name, text, words):
    monkeypatch.chdir(tmp_path)
    files(tmp_path, {name: text})
    assert main(["import", name]) in (1, 2)
    err = capsys.readouterr().err
    assert words in err
    assert "Traceback" not in err
    assert [path.name for path in tmp_path.iterdir()] == [name]


ODD = ([1], ["a"], "x", "", -1, True, 1.5, float("nan"), Computed("f(x)"), None, [])


@pytest.mark.parametrize("system", CASES)
def test_no_value_however_odd_breaks_it(tmp_path, system):
    (path,) = files(tmp_path, CASES[system][0])
    flat = read(path)
    module, _, function = READERS[system].partition(":")
    for number, (key, found) in enumerate(flat.items()):
        odd = {key: Found(ODD[number % len(ODD)], found.place)}
        draft = Carried({**flat, **odd})
        getattr(importlib.import_module(module), function)(draft)
        assert written(system, [path], draft, draft.table(), "").startswith("# From ")


def test_a_framework_that_is_not_known(tmp_path, capsys):
    (path,) = files(tmp_path, {"a.yaml": "a: 1"})
    assert main(["import", str(path), "--from", "nemo"]) == 2
    assert "--from: got 'nemo', expected trl, verl" in capsys.readouterr().err
    assert main(["import"]) == 2
