"""The page of an evaluation: success against turns, tool calls and tokens, and each episode as it counts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, browser

from silva.cli import main
from silva.monitoring.report_lengths import lengths

MEANS = {"count": 4, "reward": 0.5, "turns": 2.0, "tool_calls": 1.0, "response_tokens": 9.0, "tokens": 20.0}


def group(low: float, high: float, at: float, mean: float) -> dict[str, Any]:
    return {"from": low, "to": high, "count": 3, "at": at, "metric": "success", "mean": mean, "ci_low": 0.0,
            "ci_high": None}  # fmt: skip


def episodes(step: int, **by_count: Any) -> dict[str, Any]:
    none = {"count": 0, **dict.fromkeys(("reward", "turns", "tool_calls", "response_tokens", "tokens"))}
    against = {"turns": None, "tool_calls": -0.5, "response_tokens": None, "tokens": None}
    return {"step": step, "environment": "lake", "reward_against": against, "by_count": by_count,
            "means": {"all": MEANS, "solved": MEANS, "unsolved": none},
            "stop_reasons": {"max_tokens": 1, "terminated": 3}}  # fmt: skip


def test_a_table_of_means_and_a_chart_of_each_count_that_varies() -> None:
    one = episodes(0, tool_calls=[group(0, 0, 0.0, 1.0), group(1, 3, 1.5, 0.25)], turns=[])
    found = lengths({"episodes": [one]})
    assert found["rows"] == [
        ["lake", "all", 4, 2.0, 1.0, 9.0, 20.0],
        ["lake", "solved", 4, 2.0, 1.0, 9.0, 20.0],
        ["lake", "correlation with reward", None, None, -0.5, None, None],
    ]
    assert found["ended"] == ["lake ended by the environment (3), at the limit of tokens (1)"]
    (chart,) = found["charts"]
    assert (chart["title"], chart["unit"]) == ("lake, success against tool calls", "tool calls")
    (series,) = chart["series"]
    assert (series["x"], series["y"], series["high"]) == ([0.0, 1.5], [1.0, 0.25], [None, None])
    assert series["about"] == ["3 episodes of 0 tool calls", "3 episodes of 1 to 3 tool calls"]


def test_a_series_shows_its_first_step_and_its_last() -> None:
    made = [episodes(step, turns=[group(1, 1, 1.0, 0.0), group(2, 2, 2.0, 1.0)]) for step in (10, 20, 30)]
    found = lengths({"episodes": made})
    assert [series["name"] for series in found["charts"][0]["series"]] == ["step 10", "step 30"]
    assert [row[0] for row in found["rows"]][::3] == ["lake at step 10", "lake at step 20", "lake at step 30"]
    assert lengths({})["rows"] == []


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (apt-get install chromium)")
def test_the_page_shows_episodes_as_they_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("e.toml").write_text(
        'environments = [{type = "guess_number", numbers = 4, guesses = 3, eval_size = 6}]\n'
        'model = {type = "tiny", layers = 1, context = 2048}\n'
        "eval = {tasks = 6, samples_per_task = 2}\nmonitoring = {tensorboard = false}\n"
    )
    assert main(["eval", "@", "e.toml", "--policy", "random", "--name", "e"]) == 0
    with browser(tmp_path / "profile") as page:
        page.look(1200, 900)
        page.open(Path("evals/e/report.html").resolve().as_uri())
        shown = page.run("[...document.querySelectorAll('nav a')].filter(a => !a.hidden).map(a => a.text)")
        assert shown == ["Results", "Length", "Rollouts", "Configuration"]  # no curve of one point
        titles = page.run("[...document.querySelectorAll('#length-charts h3')].map((e) => e.textContent)")
        assert titles == ["guess_number, success against turns", "guess_number, success against all tokens"]
        assert page.run("document.querySelectorAll('#length-charts circle').length") > 4
        page.run("document.querySelector('#length-charts svg').focus()")
        page.call("Input.dispatchKeyEvent", type="keyDown", key="ArrowLeft", code="ArrowLeft")
        assert " turns" in page.run("document.querySelector('#length-charts .tip').innerText")
        chips = page.run("[...document.querySelectorAll('.chip')].map((e) => e.textContent)")
        rows = page.run("data.rollouts.rows.map((r) => r.metrics.success >= 1 ? 'solved' : 'unsolved')")
        assert Counter(chips) == Counter(rows) and len(rows) == 12 and len({*rows}) == 2
        assert "sample 1" in page.run("document.querySelectorAll('.rollout .what')[1].textContent")
        for width in (390, 1200):
            page.look(width, 900, "dark")
            assert page.run("document.documentElement.scrollWidth") == width
        assert page.problems == []
