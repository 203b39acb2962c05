"""`silva eval export --to inspect`: what the log holds, and Inspect itself reads it."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from silva.evaluation.inspect_log import _messages
from silva.types import Message, ToolCall


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


def test_inspect_reads_it(silva):
    log = pytest.importorskip("inspect_ai.log", reason="the package inspect-ai is not installed")
    path = exported(silva)
    found = log.read_eval_log(str(path))
    assert (found.status, len(found.samples), found.eval.dataset.samples) == ("success", 6, 2)
    assert found.results.scores[0].metrics["mean"].value == 1.0
    assert {sample.epoch for sample in found.samples} == {1, 2, 3}
    assert all(sample.messages[-1].text == sample.target for sample in found.samples)
    assert len(log.read_eval_log_sample_summaries(str(path))) == 6


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
