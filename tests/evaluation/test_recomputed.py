"""The numbers of summary.json once more, by enumeration from the columns of episodes.parquet alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, pairwise
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
from tests.runs import WORLDS

from silva.cli import main
from silva.config.sections import Eval
from silva.evaluation.evaluator import evaluation
from silva.evaluation.summary import summary as whole_summary
from silva.rewards.exact_match import ExactMatchReward
from silva.types import Segment, Trajectory, Turn

ROWS = [{"prompt": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(12)]
CONFIG = f"""
seed = 3
model = {{type = "tiny", layers = 1, width = 16, heads = 2, kv_heads = 1, context = 128}}
rollout = {{redo = 0, limits = {{max_turn_tokens = 16, max_episode_tokens = 128}}}}
eval = {{samples_per_task = 4, tasks = 12, pass_at = [1, 2, 3, 4]}}
monitoring = {{tensorboard = false, report = false}}
[[environments]]
type = "dataset"
name = "sums"
rows = {json.dumps(ROWS).replace('":', '" =')}
reward = "exact_match"
eval_share = 1.0
[[environments]]
type = "{WORLDS}:Parity"
eval_size = 12
share = 0.25
turns = 2
"""
K = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Random play of two environments in both of which some episodes fail."""
    score = ExactMatchReward.score

    async def fails(self: Any, attempt: Any) -> Any:
        if (int(attempt.reply) + int(attempt.answer)) % 10 == 2:
            raise ValueError("too hard")
        return await score(self, attempt)

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("recomputed"))
        patch.setattr(ExactMatchReward, "score", fails)
        Path("e.toml").write_text(CONFIG)
        assert main(["eval", "@", "e.toml", "--policy", "random", "--name", "e"]) == 0
        yield Path("evals/e").resolve()


@pytest.fixture(scope="module")
def rows(folder: Path) -> list[dict[str, Any]]:
    return pq.read_table(folder / "episodes.parquet").to_pylist()


@pytest.fixture(scope="module")
def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def by_task(rows: Sequence[dict[str, Any]], label: str) -> list[list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["environment"] == label:
            found.setdefault(row["task"], []).append(row)
    assert {len(samples) for samples in found.values()} == {K}
    return [*found.values()]


def right(row: dict[str, Any]) -> float:
    return dict(row["metrics"]).get("success", 0.0)


def passes(successes: Sequence[float], k: int) -> float:
    return fmean(max(subset) for subset in combinations(successes, k))


def majority(samples: Sequence[dict[str, Any]], k: int) -> float:
    """Over all subsets of k: the mean worth of the most frequent answers, which are numbers as they stand."""
    worths = []
    for subset in combinations(samples, k):
        votes = Counter(row["turns"][-1]["messages"][-1]["content"] for row in subset)
        worth = {row["turns"][-1]["messages"][-1]["content"]: right(row) for row in subset}
        most = max(votes.values())
        worths.append(fmean(worth[answer] for answer, count in votes.items() if count == most))
    return fmean(worths)


@pytest.mark.slow
@pytest.mark.parametrize("label", ["sums", "parity"])
def test_means_bounds_and_failures(label: str, rows: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    tasks = by_task(rows, label)
    told = {each["metric"]: each for each in summary["results"] if each["environment"] == label}
    usable = [[row for row in samples if row["failure"] is None] for samples in tasks]
    failed = sum(row["failure"] is not None for samples in tasks for row in samples)
    whole = [samples for samples in usable if len(samples) == K]
    some = [samples for samples in usable if samples]
    assert 0 < len(whole) < len(tasks) and failed > 1  # or this would show nothing
    assert {each["left_out"] for each in told.values()} == {failed}

    def if_failed(value: float, of: Callable[[list[float]], float]) -> float:
        return fmean(of([value if row["failure"] else right(row) for row in samples]) for samples in tasks)

    success = told["success"]
    assert success["mean"] == pytest.approx(fmean(fmean(map(right, samples)) for samples in some))
    assert success["n"] == len(some)
    assert [success["bound_low"], success["bound_high"]] == pytest.approx(
        [if_failed(value, fmean) for value in (0.0, 1.0)]
    )
    assert told["reward"]["mean"] == pytest.approx(
        fmean(fmean(sum(value for turn in row["turns"] for _, value in turn["rewards"]) for row in samples)
              for samples in some)
    )  # fmt: skip
    for k in range(1, K + 1):
        each = told[f"pass@{k}"]
        assert each["mean"] == pytest.approx(fmean(passes([*map(right, samples)], k) for samples in whole))
        assert each["n"] == len(whole)
        assert [each["bound_low"], each["bound_high"]] == pytest.approx(
            [if_failed(value, lambda values, k=k: passes(values, k)) for value in (0.0, 1.0)]
        )
        if label == "sums" and k > 1:
            mean = fmean(majority(samples, k) for samples in whole)
            assert told[f"maj@{k}"]["mean"] == pytest.approx(mean) and told[f"maj@{k}"]["n"] == len(whole)
    assert ("maj@2" in told) == (label == "sums") and "maj@1" not in told


@pytest.mark.parametrize("label", ["sums", "parity"])
def test_how_episodes_ended_and_their_means(
    label: str, rows: list[dict[str, Any]], summary: dict[str, Any]
) -> None:
    (told,) = (each for each in summary["episodes"] if each["environment"] == label)
    own = [row for row in rows if row["environment"] == label]
    usable = [row for row in own if row["failure"] is None]
    assert told["stop_reasons"] == Counter(row["stop_reason"] for row in own)
    assert (told["count"], told["left_out"]) == (len(own), len(own) - len(usable))
    parts = {"all": usable, "solved": [row for row in usable if right(row) == 1],
             "unsolved": [row for row in usable if right(row) < 1]}  # fmt: skip
    for part, those in parts.items():
        means = told["means"][part]
        assert means["count"] == len(those) > 0
        tokens = [sum(len(segment["tokens"]) for turn in row["turns"] for segment in turn["segments"])
                  for row in those]  # fmt: skip
        assert means["tokens"] == pytest.approx(fmean(tokens))
        assert means["turns"] == pytest.approx(fmean(len(row["turns"]) for row in those))
        assert means["tool_calls"] == 0


@pytest.mark.parametrize("label", ["sums", "parity"])
def test_success_against_counts(label: str, rows: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    (told,) = (each for each in summary["episodes"] if each["environment"] == label)
    usable = [row for row in rows if row["environment"] == label and row["failure"] is None]
    assert told["by_count"]["turns"] == told["by_count"]["tool_calls"] == []  # all equal
    groups = told["by_count"]["tokens"]
    assert 1 < len(groups) <= 6 and sum(group["count"] for group in groups) == len(usable)
    assert all(a["to"] < b["from"] for a, b in pairwise(groups))
    for group in groups:
        those = [row for row in usable if group["from"] <= row["tokens"] <= group["to"]]
        by_task: dict[str, list[float]] = {}
        for row in those:
            by_task.setdefault(row["task"], []).append(right(row))
        assert (group["metric"], group["count"]) == ("success", len(those))
        assert group["at"] == pytest.approx(fmean(row["tokens"] for row in those))
        assert group["mean"] == pytest.approx(fmean(map(fmean, by_task.values())))
        assert group["ci_low"] <= group["mean"] <= group["ci_high"]


def groups_by_turns(counts: list[int]) -> list[dict[str, Any]]:
    """Of episodes with so many turns, of which those above 30 are paid 1."""
    turn = Turn("q", (Segment("environment", (1,)),), fresh=True)
    episodes = [(f"t{n % 20}", Trajectory(f"e{i}", (turn,) * n, "terminated", rewards={"r": float(n > 30)}))
                for i, n in enumerate(counts)]  # fmt: skip
    found = evaluation("world", episodes, Eval(tasks=20, samples_per_task=3))
    config: Any = SimpleNamespace(seed=0, eval=Eval())
    told = whole_summary("e", {0: [found]}, {0: "m"}, config=config, spent={}, tasks={})
    return told["episodes"][0]["by_count"]["turns"]  # type: ignore[no-any-return]


def test_many_values_make_groups_of_equally_many_episodes() -> None:
    groups = groups_by_turns([*range(1, 61)])
    assert [(group["from"], group["to"], group["at"]) for group in groups] == [
        (1, 10, 5.5), (11, 20, 15.5), (21, 30, 25.5), (31, 40, 35.5), (41, 50, 45.5), (51, 60, 55.5),
    ]  # fmt: skip
    assert [(group["metric"], group["mean"]) for group in groups] == [("reward", 0.0)] * 3 + [
        ("reward", 1.0)
    ] * 3


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([1] * 20 + [2, 3, 4, 5, 6], [(1, 20), (2, 1), (3, 1), (4, 1), (5, 1), (6, 1)]),
        ([1] * 90 + [2, 3, 4, 5, 6, 7, 8], [(1, 90), (2, 7)]),
        ([4] * 5, []),
    ],
)
def test_few_values_and_one_that_nearly_all_have(counts: list[int], expected: list[tuple[int, int]]) -> None:
    assert [(group["from"], group["count"]) for group in groups_by_turns(counts)] == expected
