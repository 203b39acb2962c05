"""The examples that are programs do what they say; configurations are loaded in test_configs.py."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from tests.fenced import ROOT, blocks, commands
from tests.runs import metrics

from silva.cli import main
from silva.compute import ComputeThread
from silva.config.load import load
from silva.config.plugins import load_object
from silva.registries import REGISTRIES
from silva.storage.rollouts import read_rollouts, rollouts_in

EXAMPLES = ROOT / "examples"
CHAIN = ["sft", "rl", "eval"]


class Shortest(NamedTuple):
    """The example of a system that takes least, and what a step of a model that knows nothing must show."""

    name: str
    turns: set[int]
    """Of its held-out episodes."""
    metrics: set[str]
    """What its world and its recipe log, beside the metrics of every run."""
    tools: frozenset[str] = frozenset()
    branches: bool = False
    advantages: float = 0.0
    """Their sum in each group."""
    flags: tuple[str, ...] = ()


SHORTEST = {
    "MinRL": Shortest("hanoi", {10}, {"environment/hanoi/action_is_effective", "train/clipped"}),
    "RAGEN": Shortest("countdown", {1}, {"environment/countdown/action_is_valid", "train/clipped"}),
    "PRIME-RL": Shortest("alphabet_sort", {1, 2}, {"environment/alphabet_sort/exact", "train/clipped"}),
    "ARPO": Shortest(
        "branching",
        {3},
        {"environment/calculator/answered", "forest/branches", "train/clipped"},
        frozenset({"calculator"}),
        branches=True,
        flags=("--rollout.initial_rollouts", "1"),
    ),
    "Act-PRM": Shortest("act_prm", {9}, {"environment/key_door/action_prob", "train/kl"}, advantages=1.0),
}
FEW = shlex.split(
    "--steps 1 --rollout.groups_per_step 2 --rollout.group_size 4 --eval.tasks 2 --eval.every 0 "
    "--model.type tiny --model.layers 1 --model.width 32 --model.heads 2 --model.kv_heads 2 "
    "--rollout.limits.max_turn_tokens 48 --rollout.limits.max_episode_tokens 2048 "
    "--trainer.self_check false --checkpoint.every 0 --algorithm.drop_zero_variance false "
    "--monitoring.terminal off --monitoring.report false --monitoring.tensorboard false"
)
SHORT_WARM_START = shlex.split("--warm_start.steps 1 --warm_start.episodes_per_step 2")


def test_every_example_is_listed() -> None:
    page = (EXAMPLES / "README.md").read_text()
    names = {path.name for path in EXAMPLES.iterdir() if path.name not in ("README.md", "__pycache__")}
    assert set(re.findall(r"^- \[(\S+?)/?\]", page, re.MULTILINE)) == names


@pytest.mark.slow
def test_the_app_of_modal_has_its_functions() -> None:
    """Modal reads the definition of an app without an account."""
    modal = pytest.importorskip("modal", reason="pip install modal")
    app = load_object(
        f"{EXAMPLES / 'modal' / 'app.py'}:app", lambda found: isinstance(found, modal.App), "app"
    )
    assert app.name == "silva"
    for name in ("train", "evaluate", "serve"):
        load_object(
            f"{EXAMPLES / 'modal' / 'app.py'}:{name}",
            lambda found: isinstance(found, modal.Function),
            "function",
        )


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_images_copy_files_that_exist(kind: str) -> None:
    text = (EXAMPLES / "docker" / f"Dockerfile.{kind}").read_text()
    copied = [file for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE) for file in line.split()]
    assert len(copied) > 5
    assert [file for file in copied if not (EXAMPLES.parent / file).exists()] == []


@pytest.mark.slow
@pytest.mark.parametrize("system", SHORTEST)
def test_the_command_of_an_example_plays_learns_and_evaluates(
    system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first run of its page, with a model that has learned nothing: so it may end with 3."""
    example = SHORTEST[system]
    page = EXAMPLES / example.name / "README.md"
    shown = next(words for block in blocks(page) for words in commands(block) if words[1:2] == ["rl"])
    monkeypatch.chdir(ROOT)
    warm = SHORT_WARM_START if load(shown[2:], REGISTRIES, env={}).config.warm_start else []
    few = [*FEW, *warm, *example.flags, "--name", "run", "--output_dir", str(tmp_path)]
    assert main([*shown[1:], *few]) in (0, 3)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert all(each["n"] == 2 for key in ("eval_before", "eval_after") for each in summary[key])
    last = metrics(tmp_path / "run")[-1]
    assert last["step"] == 1 and last["train/trained_tokens"] > 0 and example.metrics <= last.keys()
    rows = list(read_rollouts(rollouts_in(tmp_path / "run" / "rollouts")[1]))
    assert {len(row.trajectory.turns) for row in rows if row.status == "eval"} <= example.turns
    assert {tool.name for row in rows for tool in row.trajectory.observation.tools} == example.tools
    trained = [row for row in rows if row.status == "trained"]
    assert any(row.trajectory.parent for row in trained) == example.branches
    for group in {row.group for row in trained}:
        advantages = [row.advantage for row in trained if row.group == group]
        assert len(advantages) == 4 and sum(advantages) == pytest.approx(example.advantages, abs=1e-6)


@pytest.mark.slow
def test_a_supervised_run_then_rl_from_it_then_the_series(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The three commands of a page, each of which takes over from the one before it."""
    page = EXAMPLES / "alphabet_sort" / "README.md"
    lines = next(lines for lines in map(commands, blocks(page)) if [line[1] for line in lines] == CHAIN)
    for folder in ("examples", "benchmarks", "configs"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    monkeypatch.chdir(tmp_path)
    small = "--eval.tasks 2 --eval.every 0 --monitoring.terminal off --monitoring.report false "
    few = {
        "sft": f"--warm_start.steps 2 --warm_start.episodes_per_step 2 --checkpoint.every 0 {small}",
        "rl": f"--steps 2 --rollout.groups_per_step 1 --rollout.group_size 2 --checkpoint.every 1 {small}",
        "eval": "--tasks 2 --name series",
    }
    for words in lines:
        assert main([*words[1:], *shlex.split(few[words[1]])]) in (0, 3)
    supervised, begun = (played(tmp_path / "runs" / f"alphabet_sort_{name}") for name in ("sft", "rl"))
    assert begun[0] == supervised[2] != supervised[0]
    series = json.loads((tmp_path / "evals" / "series" / "summary.json").read_text())
    assert list(series["models"]) == ["1", "2"]


def played(run: Path) -> dict[int, list[tuple[int, ...]]]:
    """The tokens of the held-out episodes by step."""
    return {
        step: [
            segment.tokens
            for row in read_rollouts(file)
            if row.status == "eval"
            for turn in row.trajectory.turns
            for segment in turn.segments
        ]
        for step, file in rollouts_in(run / "rollouts").items()
    }


@pytest.mark.slow
def test_grpo_trains_and_shows_held_out_rewards(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two small steps at a rate so high that they must move the policy."""
    train = load_object(f"{EXAMPLES / 'grpo.py'}:train", callable, "function")
    grpo = train.__globals__
    monkeypatch.setitem(grpo, "GROUP", 32)
    monkeypatch.setitem(grpo, "TASKS", 4)
    compute = ComputeThread(1)
    parts = grpo["build"](0, compute)
    before = [p.clone() for p in parts.trainer.learner.loaded.model.parameters()]
    asyncio.run(train(parts, 0, 2))
    after = list(parts.trainer.learner.loaded.model.parameters())
    compute.shutdown()
    said = re.findall(
        r"^held-out reward (?:before training|after 2 steps): (0\.\d{3})$", capsys.readouterr().out, re.M
    )
    assert len(said) == 2
    assert parts.engine.version == 2 and not all(map(torch.equal, before, after))
