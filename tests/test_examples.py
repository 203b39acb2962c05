"""The examples that are programs do what they say; configurations are loaded in test_configs.py."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
import torch

from silva.compute import ComputeThread
from silva.config.plugins import load_object

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_every_example_is_listed() -> None:
    page = (EXAMPLES / "README.md").read_text()
    names = {path.name for path in EXAMPLES.iterdir() if path.name not in ("README.md", "__pycache__")}
    assert set(re.findall(r"^- \[(\S+?)/?\]", page, re.MULTILINE)) == names


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
