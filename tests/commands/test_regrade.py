"""`silva eval --regrade`: the same reward gives the same bits, another one those of its own evaluation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from silva.actors.script import Script
from silva.storage.rollouts import read_rollouts


def bits(name: str) -> bytes:
    return (Path("evals") / name / "episodes.parquet").read_bytes()


def no_call(*_: object) -> None:
    raise AssertionError("the model was called")


@pytest.mark.slow
def test_the_same_reward_gives_the_same_bits_and_another_those_of_its_own_evaluation(silva, monkeypatch):
    silva("@", "sums.toml", "--policy", "random", "--name", "before")
    silva("@", "sums.toml", "--policy", "random", "--name", "by-f1", "--environments.0.reward",
          '{"type": "token_f1", "solved_at": 0.5}')  # fmt: skip
    monkeypatch.setattr(Script, "reply", no_call)
    silva("--regrade", "before", "--reward", "exact_match", "--name", "same")
    assert bits("same") == bits("before")
    out, _ = silva("--regrade", "before", "--reward", "token_f1", "--solved_at", "0.5")
    assert bits("before-token_f1") == bits("by-f1")
    assert "36 episodes: 0 are solved now, 0 no longer" in " ".join(out.split())
    again, _ = silva("--regrade", "before", "--reward", "token_f1", "--solved_at", "0.5")
    assert again == out and len([*Path("evals").glob("before*")]) == 2


def test_it_says_what_changes_sides(silva):
    Path("mine.py").write_text("def lenient(attempt):\n    return float(attempt.reply != attempt.answer)\n")
    silva("@", "sums.toml", "--policy", "expert", "--name", "before")
    out, err = silva("--regrade", "before", "--reward", "mine.py:lenient", "--name", "after", "--json")
    (found,) = json.loads(out)
    assert len(found["changes"]) == 12 and found["differences"][0]["mean"] == -1
    assert "36 episodes, graded without a call of the model" in err
    rows = read_rollouts(Path("evals/after/episodes.parquet"))
    assert {row.trajectory.raw_reward for row in rows} == {0.0}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["before"], "--regrade: with which reward?"),
        (["before", "--reward", "exat_match"], "exat_match"),
        (["before", "--reward", "exact_match", "--extrakt", "boxed"], "extrakt"),
        (["nothing", "--reward", "math"], "nothing: no evaluation of that name"),
        (
            ["before", "--reward", "math", "--name", "a/b"],
            "--name: got 'a/b', expected the name of one folder",
        ),
        (
            ["before", "--reward", "math", "--name", "before", "--overwrite"],
            "before: holds the episodes that",
        ),
        (["world", "--reward", "math"], "environment parity: its own rules grade it, so it takes no reward"),
    ],
)
def test_what_cannot_be_regraded_is_said(silva, arguments, words):
    silva("@", "sums.toml", "--policy", "expert", "--name", "before", "--tasks", 2)
    if "world" in arguments:
        silva("@", "parity.toml", "--name", "world", "--tasks", 1)
    _, err = silva("--regrade", *arguments, code=2)
    assert words in err


def test_other_rows_are_refused(silva):
    silva("@", "sums.toml", "--policy", "expert", "--name", "before", "--tasks", 3)
    saved = Path("evals/before/config.toml")
    saved.write_text(
        saved.read_text().replace('answer = "0"', 'answer = "7"').replace('answer = "8"', 'answer = "9"')
    )
    changed = saved.read_text()
    assert 'answer = "7"' in changed
    _, err = silva("--regrade", "before", "--reward", "math", code=2)
    assert "are gone or have other contents now" in err
