"""The examples that are programs do what they say; configurations are loaded in test_configs.py."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from tests.fenced import ROOT, blocks, commands
from tests.runs import metrics

from silva.cli import main
from silva.compute import ComputeThread
from silva.config.load import load
from silva.config.plugins import load_object
from silva.registries import REGISTRIES

EXAMPLES = ROOT / "examples"
SHORTEST = {
    "MinRL": "hanoi",
    "RAGEN": "countdown",
    "PRIME-RL": "alphabet_sort",
    "ARPO": "branching",
    "Act-PRM": "act_prm",
}
"""The example of each system that takes least."""
FEW = shlex.split(
    "--steps 1 --rollout.groups_per_step 2 --rollout.group_size 4 --eval.tasks 2 --eval.every 0 "
    "--model.type tiny --model.layers 1 --model.width 32 --model.heads 2 --model.kv_heads 2 "
    "--rollout.limits.max_turn_tokens 48 --rollout.limits.max_episode_tokens 2048 "
    "--trainer.self_check false --checkpoint.every 0 "
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
    """The first run of its page, with a model that has learned nothing: so rewards may teach it nothing."""
    page = EXAMPLES / SHORTEST[system] / "README.md"
    shown = next(words for block in blocks(page) for words in commands(block) if words[1:2] == ["rl"])
    monkeypatch.chdir(ROOT)
    warm = SHORT_WARM_START if load(shown[2:], REGISTRIES, env={}).config.warm_start else []
    assert main([*shown[1:], *FEW, *warm, "--name", "run", "--output_dir", str(tmp_path)]) in (0, 3)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [row["step"] for row in metrics(tmp_path / "run")][-1] == 1
    assert all(each["n"] == 2 for key in ("eval_before", "eval_after") for each in summary[key])


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
