"""What the report holds; `test_report_browser.py` sees how it behaves."""

from __future__ import annotations

import base64
import hashlib
import json
import random
import re
import shutil
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from silva.monitoring import report_rollouts
from silva.monitoring.report import embed, report_data, write_report
from silva.storage.rollouts import read_rollouts, write_rollouts

from .fake_run import HOSTILE, decode, make_run, rollout


class Elements(HTMLParser):
    """Start tags in order, and the text of each script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "script":
            self.scripts[-1] += data


@pytest.fixture(scope="module")
def data(run_directory: Path) -> dict[str, Any]:
    return report_data(run_directory, decode)


@pytest.mark.slow
def test_hostile_text_adds_no_element_and_survives_as_data(run_directory: Path) -> None:
    page = Elements((run_directory / "report.html").read_text("utf-8"))
    assert len(page.scripts) == 2
    assert "img" not in {tag for tag, _ in page.tags}
    rows = json.loads(page.scripts[0])["rollouts"]["rows"]
    failed = next(row for row in rows if row["status"] == "failed")
    assert failed["error"] == f"ConnectionError: {HOSTILE}"


def test_embedded_json_has_no_character_html_gives_a_meaning() -> None:
    text = embed({"a": "</script><!-- & \u2028 \ud800", "b": float("nan")})
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == {"a": "</script><!-- & \u2028 \ud800", "b": None}


def test_hostile_run_name_is_escaped(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(f"name = {json.dumps(HOSTILE)}\n")
    text = write_report(tmp_path).read_text("utf-8")
    assert len(Elements(text).scripts) == 2
    assert "<title>&lt;/script&gt;" in text


@pytest.mark.slow
def test_only_the_script_of_the_page_may_run(run_directory: Path) -> None:
    text = (run_directory / "report.html").read_text("utf-8")
    script = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)[-1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = next(a["content"] for t, a in Elements(text).tags if t == "meta" and "http-equiv" in a)
    assert policy is not None
    assert f"script-src 'sha256-{digest}';" in policy
    assert policy.startswith("default-src 'none';")
    assert "innerHTML" not in script


@pytest.mark.slow
def test_headline_comes_from_the_summary(data: dict[str, Any]) -> None:
    headline = data["headline"]
    assert headline["finished"]
    assert [label for label, _, _ in headline["facts"][8:]] == [
        "began", "last message", "command", "host", "Silva",
    ]  # fmt: skip
    assert [fact[:2] for fact in headline["facts"][:8]] == [
        ("model", "SmolLM2-135M-Instruct"), ("steps", 40), ("time", 515.75), ("tokens generated", 61440),
        ("tokens in rows", 58112), ("tokens trained (with a loss)", 20480), ("peak memory", 2254857830),
        ("seed", 7),
    ]  # fmt: skip
    assert {e["environment"] for e in headline["after"]} == {"frozen_lake", "calculator"}


def test_headline_without_a_summary_comes_from_metrics_and_config(
    run_directory: Path, tmp_path: Path
) -> None:
    for name in ("metrics.jsonl", "config.toml"):
        shutil.copy(run_directory / name, tmp_path)
    summary = json.loads((run_directory / "summary.json").read_text())
    headline = report_data(tmp_path)["headline"]
    assert not headline["finished"]
    assert headline["facts"] == [
        ("model", "SmolLM2-135M-Instruct", "text"),
        ("steps", 40, "count"),
        ("seed", 7, "text"),
    ]
    for part, step in (("before", 0), ("after", 40)):
        expected = {e["environment"]: (e["mean"], e["ci_low"], e["ci_high"]) for e in summary["eval_" + part]}
        assert {e["environment"]: (e["mean"], e["ci_low"], e["ci_high"]) for e in headline[part]} == expected
        assert {e["step"] for e in headline[part]} == {step}


LEFT_OUT = {
    "step": 0, "eval/lake/left_out": 2,
    "eval/lake/success": 0.5, "eval/lake/success_ci_low": 0.125, "eval/lake/success_ci_high": 0.875,
    "eval/lake/success_bound_low": 0.25, "eval/lake/success_bound_high": 0.75,
    "eval/lake/reward": 1.5, "eval/lake/reward_ci_low": 1.0, "eval/lake/reward_ci_high": 2.0,
}  # fmt: skip


def test_what_is_left_out_stands_beside_each_mean_and_is_none_itself(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps(LEFT_OUT) + "\n")
    found = report_data(tmp_path)
    common = {"environment": "lake", "left_out": 2, "step": 0}
    assert found["headline"]["after"] == [
        {**common, "metric": "success", "mean": 0.5, "ci_low": 0.125, "ci_high": 0.875,
         "bound_low": 0.25, "bound_high": 0.75},
        {**common, "metric": "reward", "mean": 1.5, "ci_low": 1.0, "ci_high": 2.0,
         "bound_low": None, "bound_high": None},
    ]  # fmt: skip
    curves = {chart["title"]: chart["series"] for chart in found["charts"] if not chart["more"]}
    assert [(title, [s["y"] for s in series]) for title, series in curves.items()] == [
        ("Held-out success (95 % interval)", [[0.5]]),
        ("Held-out reward (95 % interval)", [[1.5]]),
        ("Held-out episodes left out", [[2]]),
    ]
    assert len(curves) == len(found["charts"])


def test_curves_hold_values_intervals_and_gaps(data: dict[str, Any]) -> None:
    charts = {chart["title"]: chart for chart in data["charts"]}
    held_out = charts["Held-out success (95 % interval)"]["series"]
    assert [s["name"] for s in held_out] == ["calculator", "frozen_lake"]
    assert held_out[0]["x"] == list(range(0, 41, 5))
    assert all(
        low <= y <= high for low, y, high in zip(*(held_out[0][k] for k in ("low", "y", "high")), strict=True)
    )
    assert charts["Loss"]["series"][0]["x"] == [n for n in range(1, 41) if n != 9]  # step 9 was NaN
    assert [s["name"] for s in charts["Seconds by phase"]["series"]] == ["publish", "rollout", "train"]
    assert charts["train/kl"]["more"]
    assert not charts["Loss"]["more"]


def test_long_runs_are_thinned_to_means(tmp_path: Path) -> None:
    rows = "".join(json.dumps({"step": n, "train/loss": float(n)}) + "\n" for n in range(1, 3001))
    (tmp_path / "metrics.jsonl").write_text(rows)
    series = report_data(tmp_path)["charts"][0]["series"][0]
    assert (len(series["x"]), series["every"]) == (1500, 2)
    assert (series["x"][0], series["y"][0], series["x"][-1], series["y"][-1]) == (2, 1.5, 3000, 2999.5)


@pytest.mark.slow
def test_rollouts_are_a_bounded_sample_of_every_kind(data: dict[str, Any], run_directory: Path) -> None:
    everything = [row for path in (run_directory / "rollouts").iterdir() for row in read_rollouts(path)]
    rollouts = data["rollouts"]
    assert rollouts["total"] == len(everything) == 40 * 16 + 9 * 6
    statuses = Counter(row.status for row in everything)
    assert {name: rollouts["counts"][name] for name in statuses} == statuses
    shown = Counter(row["status"] for row in rollouts["rows"])
    assert rollouts["shown"] == len(rollouts["rows"]) == sum(shown.values())
    assert shown["failed"] == statuses["failed"] == 13  # few: all of them
    assert (shown["dropped"], shown["eval"]) == (30, 27)
    assert shown["trained"] <= 120
    steps = [row["step"] for row in rollouts["rows"]]
    assert steps == sorted(steps)
    assert set(range(0, 41, 5)) <= set(steps)
    assert {row["verdict"] for row in rollouts["rows"] if row["status"] == "trained"} == {"good", "bad"}
    assert {row["verdict"] for row in rollouts["rows"] if row["status"] == "failed"} == {""}


def test_long_texts_are_cut_and_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_rollouts, "MAX_TEXT", 10)
    make_run(tmp_path, steps=2, rollouts=2)
    row = report_data(tmp_path)["rollouts"]["rows"][0]
    assert row["turns"][0]["messages"][0]["content"] == "You stand  … (61 more characters)"


def test_the_token_budget_leaves_out_views_not_dialogues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_rollouts, "MAX_TOKENS", 500)
    make_run(tmp_path, steps=4, rollouts=8)
    rows = report_data(tmp_path, decode)["rollouts"]["rows"]
    views = [turn["tokens"] for row in rows for turn in row["turns"]]
    assert None in views
    assert 0 < sum(len(view) for view in views if view) <= 500
    assert all(turn["messages"] for row in rows for turn in row["turns"])


def test_token_views_hold_text_logprob_and_entropy(tmp_path: Path) -> None:
    row = rollout(1, 0, random.Random(0), 1.0)
    (tmp_path / "rollouts").mkdir()
    write_rollouts(tmp_path / "rollouts" / "step_1.parquet", [row])
    turn = report_data(tmp_path, decode)["rollouts"]["rows"][0]["turns"][0]
    segment = row.trajectory.turns[0].segments[1]
    assert "".join(text for text, _, _ in turn["tokens"]) == row.trajectory.turns[0].messages[1].raw
    assert [p for _, p, _ in turn["tokens"]] == [round(p, 4) for p in segment.logprobs]
    assert [e for _, _, e in turn["tokens"]] == [round(e, 4) for e in segment.entropies]
    assert "tokens" not in report_data(tmp_path)["rollouts"]["rows"][0]["turns"][0]


def test_config_lines_are_split_from_their_origins(data: dict[str, Any]) -> None:
    lines = dict(data["config"])
    assert lines["seed = 7"] == "command line: --seed"
    assert lines["[model]"] == ""
    assert (
        lines['prompt = "Answer with <answer>move</answer> # not a comment"'] == "configs/quickstart.toml:13"
    )


def test_an_empty_directory_gives_a_page_that_says_so(tmp_path: Path) -> None:
    data = report_data(tmp_path)
    assert (data["name"], data["charts"], data["rollouts"]["total"], data["problems"]) == (
        tmp_path.name,
        [],
        0,
        [],
    )


def test_damaged_files_are_named_and_the_rest_is_shown(tmp_path: Path) -> None:
    make_run(tmp_path, steps=3, rollouts=2)
    (tmp_path / "rollouts" / "step_2.parquet").write_bytes(b"PAR1 torn")
    (tmp_path / "summary.json").write_text("{")
    (tmp_path / "config.toml").write_text("= 3")
    data = report_data(tmp_path)
    files = ("summary.json", "config.toml", "rollouts/step_2.parquet")
    for file, problem in zip(files, data["problems"], strict=True):
        assert problem.startswith(f"{tmp_path / file}: cannot be read")
    assert {row["step"] for row in data["rollouts"]["rows"]} == {0, 1, 3}
