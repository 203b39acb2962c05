"""What tests of several commands begin with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
from tests.engines.chat_server import Server, said, serving
from tests.runs import WORLDS

from silva.cli import main

MODEL = 'model = {type = "tiny", layers = 1, width = 32, heads = 2, kv_heads = 1, context = 256}\n'
PARITY = (
    MODEL
    + f"""
environments = [{{type = "{WORLDS}:Parity", eval_size = 16, turns = 1}}]
rollout = {{limits = {{max_turn_tokens = 4, max_episode_tokens = 128}}}}
eval = {{tasks = 16, samples_per_task = 4}}
monitoring = {{tensorboard = false, report = false}}
"""
)
ROWS = [{"prompt": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(12)]
SUMS = (
    MODEL
    + f"""
rollout = {{limits = {{max_turn_tokens = 16, max_episode_tokens = 256}}}}
eval = {{samples_per_task = 3}}
monitoring = {{tensorboard = false, report = false}}
[[environments]]
type = "dataset"
name = "sums"
rows = {json.dumps(ROWS).replace('":', '" =')}
reward = "exact_match"
eval_share = 1.0
"""
)

API = """
environments = [{{type = "guess_number", numbers = 3, guesses = 3, eval_size = 12}}]
rollout = {{limits = {{max_turn_tokens = 8}}}}
synth = {{tasks = 12, samples_per_task = 1}}
monitoring = {{tensorboard = false, report = false}}
[engine]
type = "openai"
model = "m"
base_url = "{url}"
input_price = 1.0
output_price = 2.0
max_concurrent = 1
"""
"""A request costs 18e-6: 10 tokens of input, 4 of output."""


class Silva(Protocol):
    """Runs `silva eval`, or another command, with these arguments; what it writes to standard output, and to
    standard error as one line."""

    def __call__(self, *arguments: object, code: int = 0, command: str = "eval") -> tuple[str, str]: ...


@pytest.fixture
def silva(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Silva:
    """In a folder of its own, which holds two configurations."""
    monkeypatch.chdir(tmp_path)
    Path("parity.toml").write_text(PARITY)
    Path("sums.toml").write_text(SUMS)

    def call(*arguments: object, code: int = 0, command: str = "eval") -> tuple[str, str]:
        capsys.readouterr()
        returned = main([command, *map(str, arguments)])
        out, err = capsys.readouterr()
        assert returned == code, err
        return out, " ".join(err.split())

    return call


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A chat API that guesses the lowest number, then the next ones: always right at last."""
    pytest.importorskip("openai")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-test-123456")

    def script(number: int, body: dict[str, Any]) -> Any:
        lowest = int(body["messages"][0]["content"].split()[4])
        return said(str(lowest + sum(message["role"] == "assistant" for message in body["messages"])))

    with serving(script) as found:
        yield found
