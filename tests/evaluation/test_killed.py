"""`silva eval` killed anywhere goes on with the same command, repeats nothing, ends with the same bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.runs import WORLDS, Server

pytestmark = pytest.mark.slow

CONFIG = f"""
environments = [
    {{type = "{WORLDS}:Parity", eval_size = 10, delay = 3.0}},
    {{type = "{WORLDS}:Letters", eval_size = 10, delay = 3.0}},
]
model = {{type = "tiny", layers = 1, width = 32, heads = 2, kv_heads = 1, context = 128}}
rollout = {{limits = {{max_turn_tokens = 4, max_episode_tokens = 128}}}}
eval = {{tasks = 10, samples_per_task = 2}}
monitoring = {{tensorboard = false}}
"""
TOTAL = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("evals")
    (found / "eval.toml").write_text(CONFIG)
    return found


@pytest.fixture(scope="module")
def play(folder: Path) -> Iterator[Any]:
    """Plays the evaluation called `name` in a process that may be killed; gives what became of it."""
    server = Server(folder)
    server.config = folder / "eval.toml"
    yield lambda name, **job: server.rl(name, command="eval", folder=str(folder), **job)
    server.close()


def state(folder: Path, name: str) -> list[bytes]:
    files = [folder / "evals" / name / file for file in ("episodes.parquet", "summary.json")]
    return [file.read_bytes().replace(name.encode(), b"") for file in files]


@pytest.fixture(scope="module")
def whole(folder: Path, play: Any) -> list[bytes]:
    assert play("whole").status == 0
    return state(folder, "whole")


@pytest.mark.parametrize("place", ["eval:1", "eval:33", "kept:17", "kept:40", "episodes:1", "report:1"])
def test_it_goes_on_where_it_was_killed(folder: Path, play: Any, whole: list[bytes], place: str) -> None:
    name = place.replace(":", "-")
    killed = play(name, interrupt=place, signal="SIGKILL")
    assert (killed.status, killed.proof) == (-9, place.partition(":")[0])
    journal = folder / "evals" / name / "journal.jsonl"
    kept = journal.read_bytes().count(b"\n") if journal.exists() else 0
    counts = folder / f"{name}.counts"
    again = play(name, counts=str(counts))
    assert again.status == 0, again.output
    assert json.loads(counts.read_text()).get("eval", 0) == TOTAL - kept
    assert not journal.exists() and state(folder, name) == whole


def test_ctrl_c_ends_it_and_says_how_to_go_on(folder: Path, play: Any, whole: list[bytes]) -> None:
    ended = play("ctrl-c", interrupt="kept:9")
    said = " ".join(ended.output.split())
    assert ended.status == 130 and "Traceback" not in said
    assert "of 40 episodes are kept; the same command goes on with the others silva: interrupted" in said
    assert play("ctrl-c").status == 0 and state(folder, "ctrl-c") == whole
