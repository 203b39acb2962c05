"""`silva eval export --to inspect`: what the log holds, and Inspect itself reads it."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from browser import CHROMIUM, browser

from silva.evaluation.inspect_log import _messages
from silva.types import Message, ToolCall

INSPECT = Path(__file__).parents[2] / ".peers/inspect/bin"


def exported(silva) -> Path:
    silva("@", "sums.toml", "--policy", "expert", "--name", "sums", "--tasks", 2)
    silva("export", "sums", "--to", "inspect")
    (path,) = Path("evals/sums/inspect").glob("*.eval")
    return path


def test_the_zip_holds_every_episode(silva):
    path = exported(silva)
    before = path.read_bytes()
    silva("export", "sums", "--to", "inspect")
    assert path.read_bytes() == before
    with zipfile.ZipFile(path) as file:
        names = file.namelist()
        head = json.loads(file.read("header.json"))
        sample = json.loads(file.read(next(name for name in names if name.endswith("_epoch_2.json"))))
    assert sum(name.startswith("samples/") for name in names) == 6
    assert head["version"] == 2 and head["results"]["completed_samples"] == 6
    assert [each["name"] for each in head["results"]["scores"]] == ["success", "reward", "pass@3", "maj@3"]
    assert sample["target"] == sample["messages"][-1]["content"] and sample["scores"]["success"]["value"] == 1


READS = """
import json, sys
from inspect_ai.log import read_eval_log, read_eval_log_sample_summaries
log = read_eval_log(sys.argv[1])
print(json.dumps({
    "status": log.status, "tasks": log.eval.dataset.samples,
    "mean": log.results.scores[0].metrics["mean"].value,
    "samples": [[each.epoch, each.messages[-1].text, each.target] for each in log.samples],
    "summaries": len(read_eval_log_sample_summaries(sys.argv[1])),
}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not INSPECT.exists(), reason="Inspect is not installed (make peers PEERS=inspect)")
def test_inspect_reads_it(silva) -> None:
    path = exported(silva)
    found = json.loads(subprocess.check_output([INSPECT / "python", "-c", READS, path], timeout=300))
    assert (found["status"], found["tasks"], found["mean"], found["summaries"]) == ("success", 2, 1.0, 6)
    assert sorted(epoch for epoch, _, _ in found["samples"]) == [1, 1, 2, 2, 3, 3]
    assert all(said == target for _, said, target in found["samples"])


@pytest.mark.slow
@pytest.mark.skipif(not INSPECT.exists(), reason="Inspect is not installed (make peers PEERS=inspect)")
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (apt-get install chromium)")
def test_inspect_view_shows_it(silva, tmp_path) -> None:
    """Its list has the evaluation, and the evaluation's page its samples with their scores."""
    path = exported(silva)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [INSPECT / "inspect", "view", "start", "--log-dir", path.parent, "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as viewer:
        try:
            url = f"http://127.0.0.1:{port}"
            _until(lambda: not viewer.poll() and _answers(port))
            with browser(tmp_path / "profile") as page:
                page.look(1400, 900)
                page.open(url)
                _until(lambda: "expert" in page.run("document.body.innerText"))
                page.run(f"location.hash = '#/logs/{path.name}'")
                _until(lambda: "What is" in page.run("document.body.innerText"))
                shown = page.run("document.body.innerText")
                assert "sums" in shown and "success" in shown and "6 Samples" in shown
        finally:
            viewer.terminate()


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def _until(true: Callable[[], bool], seconds: float = 120.0) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until
        time.sleep(0.2)


def test_results_answer_their_calls() -> None:
    calls = (ToolCall("search", {"query": "a"}), ToolCall("python", {"code": "1"}, "own"))
    found = _messages([
        Message("user", "?"), Message("assistant", "", "so", calls),
        Message("tool", "one", name="python"), Message("tool", "two", name="search"),
    ])  # fmt: skip
    assert found[1]["content"][0] == {"type": "reasoning", "reasoning": "so"}
    ids = [call["id"] for call in found[1]["tool_calls"]]
    assert ids == ["call_1_0", "own"] and [each["tool_call_id"] for each in found[2:]] == ["own", "call_1_0"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["sums"], "--to: got '', expected inspect"), ([], "expected the name of one evaluation")],
)
def test_what_is_missing_is_said(silva, arguments, words):
    _, err = silva("export", *arguments, code=2)
    assert words in err


def test_a_place_where_no_log_can_be_written_is_said(silva):
    silva("@", "sums.toml", "--policy", "expert", "--name", "sums", "--tasks", 1)
    _, err = silva("export", "sums", "--to", "inspect", "--output", "sums.toml/logs", code=2)
    assert "silva: sums.toml/logs cannot be written: Not a directory" in err
