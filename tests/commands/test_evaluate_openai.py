"""`silva eval` with `[engine] type = "openai"`: no model is loaded; what needs one is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.engines.chat_server import Server

from silva import assembly
from silva.cli import main

CONFIG = """
environments = [{{type = "guess_number", numbers = 3, guesses = 3, eval_size = 12}}]
eval = {{tasks = 12}}
[engine]
type = "openai"
model = "m"
base_url = "{url}"
input_price = 1.0
output_price = 2.0
"""


@pytest.fixture(autouse=True)
def _config(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("api.toml").write_text(CONFIG.format(url=server.url))


def test_an_evaluation_needs_no_model(server: Server, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("a model or tokenizer is loaded")

    monkeypatch.setattr(assembly, "load_model", never)
    monkeypatch.setattr(assembly, "Renderer", never)
    assert main(["eval", "@", "api.toml", "--json"]) == 0
    shown = capsys.readouterr()
    rows = {row["metric"]: row for row in json.loads(shown.out)}
    assert (rows["success"]["mean"], rows["success"]["n"], rows["success"]["left_out"]) == (1.0, 12, 0)
    count = len(server.bodies)
    assert (
        f"m: {count} requests (0 retries, 0 without a reply); {10 * count} tokens of input (0 cached), "
        f"{4 * count} of output; cost {18e-6 * count:.4g}" in " ".join(shown.err.split())
    )


@pytest.mark.parametrize(
    "command",
    [["rl", "@", "api.toml"], ["rl", "@", "api.toml", "--dry-run"], ["sft", "@", "api.toml"]],
    ids=str,
)
def test_training_is_refused_at_the_start(server: Server, capsys, command: list[str]) -> None:
    assert main(command) == 2
    assert (
        'silva: engine.type = "openai": a chat API gives no token ids, no log-probabilities and no weights, '
        "so it cannot be trained" in capsys.readouterr().err
    )
    assert not Path("runs").exists() and server.bodies == []


def test_an_api_that_is_down_is_told_at_once_with_its_address(server: Server, capsys) -> None:
    """Nobody listens at port 9 of this machine: one request is enough to know."""
    assert main(["eval", "@", "api.toml", "--engine.base_url=http://127.0.0.1:9/v1"]) == 1
    shown = " ".join(capsys.readouterr().err.split())
    assert "m: 0 requests (0 retries" in shown
    assert "silva: engine.base_url = http://127.0.0.1:9/v1: nobody answers" in shown


def test_more_tasks_than_are_held_out_are_named(server: Server, capsys) -> None:
    assert main(["eval", "@", "api.toml", "--eval.tasks=20", "--json"]) == 0
    said_ = " ".join(capsys.readouterr().err.split())
    assert "12 held-out tasks, all of which are played at each evaluation (eval.tasks = 20)" in said_


def test_weights_are_refused(server: Server, capsys) -> None:
    Path("w").mkdir()
    assert main(["eval", "@", "api.toml", "--weights", "w"]) == 2
    assert "its servers have weights of their own" in capsys.readouterr().err


def test_scripted_play_asks_no_api(server: Server, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    small = ["--model.type", "tiny", "--model.layers", "1", "--model.width", "32", "--model.context", "256"]
    assert main(["eval", "@", "api.toml", "--policy", "expert", "--json", *small]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows[0]["mean"] == 1.0 and server.bodies == []
