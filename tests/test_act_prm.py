"""The files of configs/act_prm, run from end to end with a tiny model in worlds that are made up."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from silva.commands.sft import supervise
from silva.commands.train import train
from silva.config.load import Resolved, load
from silva.config.sections import TinyModel
from silva.conversion.rows import convert_rows
from silva.models.loading import load_tokenizer
from silva.registries import REGISTRIES
from silva.storage.rollouts import RolloutRow, read_rollouts

pytestmark = pytest.mark.slow
FILES = Path(__file__).parents[1] / "configs" / "act_prm"
PAGE = FILES.parents[1] / "docs" / "act_prm.md"
TINY = """
steps = 1
[model]
type = "tiny"
context = 8192
lora.rank = 4
[rollout]
groups_per_step = 2
group_size = 2
[rollout.limits]
max_turns = 2
max_turn_tokens = 160
max_episode_tokens = 7000
[eval]
tasks = 1
[monitoring]
terminal = "off"
tensorboard = false
report = false
[placement]
threads = 1
"""
BRIEF = [f"--environments.0.{key}" for key in ("style=compact", "think=false", "answer_tags=false")]
KEYS = [*BRIEF, "--rollout.limits.max_turn_tokens=40", "--trainer.optimizer.lr=1e-3"]
MADE_UP = ["--environments.0.path="]


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A file of configs/act_prm, made small."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(TINY)

    def made(name: str, *more: str) -> Resolved:
        return load([f"@{FILES / name}.toml", "@tiny.toml", *more], REGISTRIES, env={}, cwd=tmp_path)

    return made


def rows_of(name: str, step: int = 1) -> list[RolloutRow]:
    return read_rollouts(Path(f"runs/{name}/rollouts/step_{step}.parquet"))


def metrics_of(name: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in Path(f"runs/{name}/metrics.jsonl").read_text().splitlines()]


def states(name: str) -> list[RolloutRow]:
    """The thoughts that were trained, whole episodes apart."""
    return [row for row in rows_of(name) if row.status == "trained" and "/t" in row.group]


def read_as_the_page_says(name: str) -> tuple[int, list[RolloutRow]]:
    """The step of the best checkpoint, and what was played until then."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    found: dict[str, Any] = {}
    exec(code.replace("runs/thoughts", f"runs/{name}"), found)
    return found["best"], found["buffer"]


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("thoughts", []),
        ("hotpotqa_mc", MADE_UP),
        ("longbench_v2", [*MADE_UP, "--environments.0.words=400", "--environments.0.part_words=80",
                          "--environments.0.overlap=0"]),
        ("browsecomp_plus_search", []),
        ("textworld", [f"--environments.0.{key}=1" for key in ("games", "eval_size", "level")]),
    ],
)  # fmt: skip
def test_thoughts_for_each_state_of_an_expert_s_episode(name, more, small):
    config = small(name, *more)
    if missing := config.config.environments[0].packages:
        pytest.importorskip(missing[0])
    train(config)
    thoughts, last = states(name), metrics_of(name)[-1]
    (world,) = config.config.environments
    assert thoughts and len(thoughts) == 2 * len({row.group for row in thoughts})
    assert all(0 < row.trajectory.raw_reward < 1 for row in thoughts)
    # Shares of the group (`em`).
    assert sum(row.advantage for row in thoughts) == pytest.approx(len(thoughts) / 2)
    assert f"eval/{world.label}/success" in last and 0 <= last[f"eval/{world.label}/thoughts"] <= 1
    if getattr(world, "prefill", False):  # the policy thinks in evaluations
        assert last[f"eval/{world.label}/thoughts"] == last["response/thoughts"] == 1.0


def test_told_the_action_thoughts_are_trained_where_they_are_sampled_and_played_where_they_are_not(small):
    train(small("action_prompted", *KEYS))
    decode = load_tokenizer(TinyModel()).decode
    for row in states("action_prompted"):
        (turn,) = row.trajectory.turns
        shown, thought = turn.segments
        assert (shown.source, thought.source) == ("environment", "policy")
        assert "The next action is: " in decode(shown.tokens)
        assert "next action" not in "".join(message.content for message in turn.messages)


def test_a_demonstration_with_its_best_thoughts_is_trained_beside_them(small):
    train(small("joint", *KEYS))
    whole = [row for row in rows_of("joint") if row.group.endswith("/demonstration")]
    assert {row.status for row in whole} == {"trained"} and {row.advantage for row in whole} == {1.0}
    best = {}
    for row in states("joint"):
        best[row.group] = max(best.get(row.group, 0.0), row.trajectory.raw_reward)
    for row in whole:
        episode = row.group.removesuffix("demonstration")
        expected = [p for group, p in best.items() if group.startswith(f"{episode}t")]
        assert [turn.rewards["action_prob"] for turn in row.trajectory.turns] == pytest.approx(expected)


def test_from_relabelled_demonstrations_to_rl(small, tmp_path):
    train(small("action_prompted", *KEYS, "--steps=2"))
    best, buffer = read_as_the_page_says("action_prompted")
    assert {row.step for row in buffer} == set(range(1, best + 1))
    found = convert_rows("runs/action_prompted", "messages", tmp_path / "relabelled.jsonl", overwrite=False,
                         on_row=lambda rows, size: None, best=True, min_reward=1e-6)  # fmt: skip
    rows = [json.loads(line) for line in found.path.read_text().splitlines()]
    assert rows and {row["messages"][-1]["role"] for row in rows} == {"assistant"}
    assert all(row["advantage"] > 0 for row in rows)
    data = '--data.sources=[{"path": "relabelled.jsonl", "weigh_by": "advantage"}]'
    supervise(small("sft_relabelled", *KEYS, data, "--data.validation=0", "--data.early_stop=0",
                    "--data.dialogues_per_step=4", "--steps=8", "--trainer.optimizer.lr=1e-2"))  # fmt: skip
    losses = [row["train/nll"] for row in metrics_of("sft_relabelled") if "train/nll" in row]
    assert losses[-1] < losses[0]
    more = ["--model.type=pretrained", "--model.name=runs/sft_relabelled", "--model.lora.rank=4"]
    train(small("rl", *KEYS, *more))
    assert metrics_of("rl")[0]["eval/key_door/reward"] >= 0


def test_a_world_that_is_only_evaluated_while_demonstrations_of_a_file_are_learned(small, tmp_path):
    """Act-PRM's evaluation: success in the environment itself, held out."""
    said = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "Left"}]
    lines = [json.dumps({"messages": [{**said[0], "content": f"Where, {i}?"}, said[1]]}) for i in range(12)]
    (tmp_path / "demonstrations.jsonl").write_text("\n".join(lines))
    itself = {"type": "key_door", "weight": 0, "style": "compact", "think": False, "answer_tags": False}
    worlds = [{"type": "demonstrations", "path": "demonstrations.jsonl"}, itself]
    train(small("thoughts", f"--environments={json.dumps(worlds)}", *KEYS[3:]))
    assert {row.environment for row in rows_of("thoughts") if row.status != "eval"} == {"demonstrations"}
    first, last = metrics_of("thoughts")
    for key in ("eval/key_door/success", "eval/key_door/thoughts", "eval/demonstrations/success"):
        assert key in first and key in last
