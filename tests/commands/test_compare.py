"""`silva eval compare`: whose numbers stand in it, what is refused, and what the page shows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import scipy.stats

from silva.storage.rollouts import read_rollouts


def solved(name: str) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for row in read_rollouts(Path("evals") / name / "episodes.parquet"):
        found.setdefault(row.task, []).append(row.trajectory.metrics["success"])
    return found


@pytest.mark.slow
def test_the_numbers_are_those_of_the_rows(silva):
    for seed in (0, 1):
        silva("@", "parity.toml", "--name", f"seed-{seed}", "--eval.sampling.temperature", 1 + seed,
              "--eval.pass_at=[1,4]")  # fmt: skip
    out, _ = silva("compare", "seed-0", "seed-1", "--json")
    found, a, b = json.loads(out), solved("seed-0"), solved("seed-1")
    rows = {row["metric"]: row for row in found["differences"]}
    deltas = np.array([np.mean(b[task]) - np.mean(a[task]) for task in a])
    assert rows["success"]["mean"] == pytest.approx(deltas.mean()) and deltas.any()
    exact = scipy.stats.permutation_test((deltas,), np.mean, permutation_type="samples", n_resamples=np.inf)
    assert rows["success"]["p"] == pytest.approx(exact.pvalue, rel=1e-9)
    assert rows["pass@1"]["p"] == pytest.approx(exact.pvalue, rel=1e-9)  # by definition
    several = [max(b[task]) - max(a[task]) for task in a]
    better, worse = several.count(1), several.count(-1)
    theirs = scipy.stats.binomtest(better, better + worse).pvalue if better + worse else 1.0
    assert rows["pass@4"]["p"] == pytest.approx(theirs)
    tested = [row for row in found["differences"] if row["p"] is not None]
    assert [row["metric"] for row in tested] == ["success", "pass@1", "pass@4", "reward"]
    assert min(row["p_holm"] for row in tested) == pytest.approx(min(1, 4 * min(row["p"] for row in tested)))
    means = {row["metric"]: [each["mean"] for each in row["estimates"]] for row in found["metrics"]}
    tokens = [row.trajectory.tokens() for row in read_rollouts(Path("evals/seed-0/episodes.parquet"))]
    assert means["turns"] == [1, 1] and means["tokens"][0] == pytest.approx(np.mean(tokens))
    assert means["success"][0] == pytest.approx(np.mean([*a.values()]))
    sides = [task for task in a if (np.mean(a[task]) >= 0.5) != (np.mean(b[task]) >= 0.5)]
    assert sorted(each["task"] for each in found["changes"]) == sorted(sides)
    assert found["notes"] == ["seed-0 and seed-1 also differ in eval.sampling.temperature"]


@pytest.mark.slow
def test_experts_and_random_play_change_sides_with_their_replies(silva):
    silva("@", "sums.toml", "--policy", "random", "--name", "random")
    silva("@", "sums.toml", "--policy", "expert", "--name", "expert")
    out, _ = silva("compare", "random", "evals/expert")
    words = " ".join(out.split())
    assert "12 tasks changed sides from random to expert: 12 are solved now, 0 no longer" in words
    assert "maj@3" in words and "<0.0001" not in words and "evals/compare-random-expert.html" in words
    page = Path("evals/compare-random-expert.html").read_text()
    assert "What is 3 + 3?" in page and "%%" not in page
    out, _ = silva("compare", "random", "expert", "--json")
    rows = {row["metric"]: row for row in json.loads(out)["differences"]}
    assert rows["success"]["mean"] > 0.7
    assert rows["maj@3"]["p"] == pytest.approx(2 / 2**12)  # all 12 tasks better: two of all signs


@pytest.mark.slow
def test_other_tasks_are_refused_and_shared_ones_compared(silva):
    silva("@", "sums.toml", "--policy", "expert", "--name", "all")
    silva("@", "sums.toml", "--policy", "random", "--name", "some", "--tasks", 5)
    silva("@", "parity.toml", "--name", "other")
    _, err = silva("compare", "all", "some", code=2)
    assert "these have different tasks (all: sums 12; some: sums 5 tasks), of which 5 are shared" in err
    assert "--shared compares these" in err
    out, _ = silva("compare", "all", "some", "--shared", "--json")
    found = json.loads(out)
    assert found["differences"][0]["n"] == 5 and "only these are compared" in found["notes"][0]
    _, err = silva("compare", "all", "other", "--shared", code=2)
    assert "these evaluations share no task" in err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["al", "all"], "al: no evaluation of that name, no folder of one and no run; did you mean all?"),
        (["all"], "all is one evaluation; expected another one too"),
        ([], "expected two or more evaluations"),
        (["all", "all@step_7"], "has no episodes of step 7"),
        (["all", "rows"], "rows is a synthesis, of training tasks; expected an evaluation or a run"),
        (["all", "half"], "evals/half is not finished; the same silva eval command goes on with it"),
    ],
)
def test_what_cannot_be_compared_is_said(silva, arguments, words):
    silva("@", "sums.toml", "--policy", "expert", "--name", "all")
    Path("evals/half").mkdir()
    Path("evals/half/journal.jsonl").write_text("")
    Path("rows").mkdir()
    Path("rows/config.json").write_text('{"synthesis": {}}')
    _, err = silva("compare", *arguments, code=2)
    assert words in err
