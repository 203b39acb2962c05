"""`silva eval` and `silva synth`, killed anywhere, go on with the same command, repeat nothing,
and end with the same bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from evaluations import FILES, end_state
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
synth = {{tasks = 10, samples_per_task = 2, best = 0, only_solved = false}}
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
    yield lambda name, command="eval", **job: server.rl(name, command=command, folder=str(folder), **job)
    server.close()


@pytest.fixture(scope="module")
def whole(folder: Path, play: Any) -> dict[str, dict[str, bytes]]:
    found = {}
    for command in FILES:
        assert play("whole", command).status == 0
        found[command] = end_state(command, folder, "whole")
    return found


@pytest.mark.parametrize(
    ("command", "place"),
    [("eval", place) for place in ("eval:1", "eval:33", "kept:17", "kept:40", "episodes:1", "report:1")]
    + [("synth", place) for place in ("eval:1", "kept:17", "kept:40", "rows:1", "episodes:1")],
)
def test_it_goes_on_where_it_was_killed(
    folder: Path, play: Any, whole: dict[str, dict[str, bytes]], command: str, place: str
) -> None:
    name = f"{command}-{place.replace(':', '-')}"
    killed = play(name, command, interrupt=place, signal="SIGKILL")
    assert (killed.status, killed.proof) == (-9, place.partition(":")[0])
    journal = folder / FILES[command][0] / name / "journal.jsonl"
    kept = journal.read_bytes().count(b"\n") if journal.exists() else 0
    counts = folder / f"{name}.counts"
    again = play(name, command, counts=str(counts))
    assert again.status == 0, again.output
    assert json.loads(counts.read_text()).get("eval", 0) == TOTAL - kept
    assert not journal.exists() and end_state(command, folder, name) == whole[command]


def test_ctrl_c_ends_it_and_says_how_to_go_on(
    folder: Path, play: Any, whole: dict[str, dict[str, bytes]]
) -> None:
    ended = play("ctrl-c", interrupt="kept:9")
    said = " ".join(ended.output.split())
    assert ended.status == 130 and "Traceback" not in said
    assert "of 40 episodes are kept; the same command goes on with the others silva: interrupted" in said
    assert play("ctrl-c").status == 0 and end_state("eval", folder, "ctrl-c") == whole["eval"]
