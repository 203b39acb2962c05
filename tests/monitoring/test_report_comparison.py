"""The page of a comparison in a real browser: it shows what the data says, and hostile text stays text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, browser

from silva.errors import ConfigError
from silva.monitoring.report_comparison import write_comparison

from .fake_run import HOSTILE


def found() -> dict[str, Any]:
    names = ("before", "after")
    about = {"model": "m", "episodes": 8, "left_out": {"sums": 1}, "bounds": {}, "samples_per_task": 4}
    means = [
        {"name": n, "mean": m, "ci_low": m / 2, "ci_high": 0.9, "n": 2}
        for n, m in zip(names, (0.25, 0.75), strict=True)
    ]
    ends = {"environment": "sums", "metric": "success", "a": "before", "b": "after"}
    return {
        "contenders": [{"name": name, "cost": None, **about} for name in names],
        "metrics": [{"environment": "sums", "metric": "success", "share": True, "estimates": means}],
        "differences": [{**ends, "mean": 0.5, "ci_low": 0.1, "ci_high": 0.9, "p": 0.01, "p_holm": 0.02,
                         "n": 2}],
        "changes": [{**ends, "task": "t", "solved_a": 1, "of_a": 4, "solved_b": 3, "of_b": 4, "gain": 0.5,
                     "question": HOSTILE, "reply_a": HOSTILE, "reply_b": "4"}],
        "notes": ["they also differ in seed"],
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (apt-get install chromium)")
def test_the_page_shows_plots_and_replies(tmp_path: Path) -> None:
    url = write_comparison(tmp_path / "a" / "page.html", found()).resolve().as_uri()
    with browser(tmp_path / "profile") as page:
        for width in (1440, 390):
            page.look(width, 900)
            page.open(url)
            assert page.run("document.documentElement.scrollWidth <= innerWidth")
        assert page.run("document.querySelectorAll('#metric-cards circle').length") == 2
        assert "corrected 0.0200: clear" in page.run("document.querySelector('#difference-cards').innerText")
        page.run("document.querySelector('#change-list details').open = true")
        assert "1/4 → 3/4" in page.run("document.querySelector('#change-list').innerText")
        shown = page.run(
            "[...document.querySelectorAll('#change-list .text')].map((each) => each.textContent)"
        )
        assert shown == [HOSTILE, HOSTILE, "4"]
        assert page.problems == [] and page.requests == [url, url]
        assert page.run("document.title") == "before and after · Silva"


def test_a_page_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"page\.html cannot be written"):
        write_comparison(tmp_path / "file" / "page.html", found())
