"""What the viewer draws, in a real browser: curves, tokens, transcripts and large forests."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from browser import Page
from tests.monitoring.fake_run import segment
from tests.viewer.looking import ABOUT_JS, IN_BROWSER, PLACES, RUN, assert_soon, go, serving

from silva.storage.layout import Layout
from silva.storage.rollouts import RolloutRow, rollouts_path, write_rollouts
from silva.types import Message, Segment, Trajectory, Turn
from silva.viewer.pages import Pages

pytestmark = IN_BROWSER
REWARD = (
    "plots.find(each => each.root.isConnected"
    " && each.root.closest('.chart').querySelector('h3').innerText === 'Reward')"
)
SCALES = ("logprobs", "entropies", "raw_logprobs", "trainer_logprobs", "ratios", "advantages", "weights",
          "versions", "clipped")  # fmt: skip


def reward_of(pages: Pages, *runs: str) -> list[dict[str, Any]]:
    charts = pages.answer("curves", {"run": runs})["charts"]
    return next(chart["series"] for chart in charts if chart["title"] == "Reward")


def slide(page: Page, label: str, value: float) -> None:
    """Move a slider."""
    page.run(
        f"(() => {{ const bar = [...document.querySelectorAll('label')].find(each => each.innerText"
        f".startsWith({label!r})).querySelector('input'); bar.value = {value};"
        " bar.dispatchEvent(new Event('input', {bubbles: true})); })()"
    )


def test_a_point_of_a_curve_opens_its_step(page: Page, address: str) -> None:
    go(page, address, PLACES["run"], "Curves")
    assert_soon(page, "document.querySelectorAll('.plot canvas').length > 5")
    x, y = page.run(
        "(() => { const cards = [...document.querySelectorAll('.chart')];"
        " const card = cards.find(c => c.innerText.startsWith('Reward'));"
        " const plot = card.querySelector('.u-over');"
        " plot.scrollIntoView({block: 'center', behavior: 'instant'});"
        " const b = plot.getBoundingClientRect(); return [b.x + b.width / 2, b.y + 60]; })()"
    )
    page.click(x, y)
    assert_soon(
        page,
        "location.hash.startsWith('#/step?') && document.querySelector('h1').innerText.startsWith('Step')",
    )


def test_a_drag_zooms_smoothing_leaves_it_and_two_clicks_go_back(
    page: Page, address: str, pages: Pages
) -> None:
    series = reward_of(pages, RUN)[0]
    go(page, address, PLACES["run"], "Curves")
    assert_soon(page, f"{REWARD}.scales.x.max === 12")
    steps, raw, line = page.run(f"{REWARD}.data.slice(0, 3)")
    assert (steps, raw) == (series["x"], series["y"])
    weights = [[0.6 ** (i - j) for j in range(i + 1)] for i in range(len(raw))]
    smoothed = [sum(w * y for w, y in zip(each, raw, strict=False)) / sum(each) for each in weights]
    assert line == pytest.approx(smoothed)
    x, y, wide = page.run(
        f"(() => {{ const {{over}} = {REWARD}; over.scrollIntoView({{block: 'center', behavior: 'instant'}});"
        " const box = over.getBoundingClientRect(); return [box.x, box.y + 60, box.width]; })()"
    )
    for kind, share in (("mouseMoved", 0.25), ("mousePressed", 0.25), ("mouseMoved", 0.75),
                        ("mouseReleased", 0.75)):  # fmt: skip
        page.call("Input.dispatchMouseEvent", type=kind, x=x + share * wide, y=y, button="left", clickCount=1)
    zoomed = f"Math.abs({REWARD}.scales.x.min - 3.75) < 0.2 && Math.abs({REWARD}.scales.x.max - 9.25) < 0.2"
    assert_soon(page, zoomed)
    slide(page, "Smoothing", 0)
    assert_soon(page, f"{REWARD}.data[1][5] === {raw[5]} && {zoomed}")
    assert page.run(f"{REWARD}.data[1]") == raw
    page.run(  # all in one script: a second click that comes late is no second one
        f"(() => {{ const send = (kind, detail) => {REWARD}.over.dispatchEvent(new MouseEvent(kind,"
        f" {{detail, bubbles: true, button: 0, clientX: {x + wide / 2}, clientY: {y}}}));"
        " for (const n of [1, 2]) for (const kind of ['mousedown', 'mouseup', 'click']) send(kind, n);"
        " send('dblclick', 2); setTimeout(() => { window.later = true; }, 400); })()"
    )
    assert_soon(page, f"window.later && {REWARD}.scales.x.min === 1 && {REWARD}.scales.x.max === 12")
    assert page.run("location.hash") == PLACES["run"]


def test_a_mean_has_its_interval_and_configurations_their_origins(
    page: Page, address: str, pages: Pages
) -> None:
    series = reward_of(pages, RUN, "runs/walk/seed_1")[0]
    go(page, address, PLACES["mean"], "Difference of configurations")
    assert_soon(page, f"{REWARD}.bands.length")
    assert page.run(f"{REWARD}.data.slice(0, 4)") == [series[key] for key in ("x", "y", "high", "low")]
    assert all(low < high for low, high in zip(series["low"], series["high"], strict=True))
    assert page.run(f"{REWARD}.bands[0].series") == [2, 3]
    assert_soon(page, "document.querySelector('[aria-label=Differences]')")
    rows = page.run(
        "[...document.querySelectorAll('[aria-label=Differences] tbody tr')]"
        ".map(row => [...row.cells].map(cell => cell.innerText))"
    )
    assert rows == [["seed", "7 command line: --seed", "8 command line: --seed"]]


def test_tokens_show_what_training_knew_of_them(page: Page, address: str, pages: Pages) -> None:
    asked = {"run": [RUN], "step": ["5"], "at": ["2"], "turn": ["1"]}
    _, said = pages.answer("tokens", asked)["segments"]
    assert said["clipped"][:2] == [0, 1] and set(SCALES) < set(said)
    go(page, address, PLACES["tokens"], "Point at a token")
    assert_soon(page, "document.querySelectorAll('.segment.policy .token').length > 10")

    def facts(source: str, place: int) -> str:
        page.run(
            f"document.querySelectorAll('.segment.{source} .token')[{place}]"
            ".dispatchEvent(new PointerEvent('pointerover', {bubbles: true}))"
        )
        assert_soon(
            page, f"document.querySelectorAll('.segment.{source} .token')[{place}].matches('.chosen')"
        )
        return page.run("document.querySelector('.token-facts').innerText")

    told_as = {
        "logprobs": "log-probability sampled with", "trainer_logprobs": "log-probability of the trainer",
        "ratios": "ratio of trainer to sampler", "entropies": "entropy", "advantages": "advantage",
        "weights": "weight in the loss", "versions": "version of the policy",
    }  # fmt: skip
    for place, clipped in ((0, "not clipped by the loss"), (1, "clipped by the loss")):
        told = facts("policy", place).split(" · ")
        assert told[2] == "sampled" and clipped in told
        assert {f"{words} {said[key][place]:.3g}" for key, words in told_as.items()} < {*told}
    told = facts("environment", 0).split(" · ")
    assert told[2] == "read, no loss" and told[-1] == "stream echo"

    for by in SCALES:
        page.run(f"location.hash = {PLACES['tokens'].replace('ratios', by)!r}")
        assert_soon(page, f"[...document.querySelectorAll('select')].at(-1).value === {by!r}")
        shown = page.run(
            "[...document.querySelectorAll('.segment.policy .token')]"
            ".map(each => Number(each.style.getPropertyValue('--heat')))"
        )
        low, high = min(said[by]), max(said[by])
        shares = [(value - low) / (high - low) if high > low else 0.5 for value in said[by]]
        hot = [1 - share if by.endswith("logprobs") else share for share in shares]
        assert shown == pytest.approx(hot, abs=0.0011), by
    assert page.run("document.querySelector('.scale').innerText").split("\n") == [
        "not clipped by the loss", "clipped by the loss",
    ]  # fmt: skip


def test_a_transcript_has_thoughts_calls_results_and_an_outline(page: Page, address: str) -> None:
    go(page, address, PLACES["rollout"], "Turn 2")
    assert page.run("document.querySelector('.turn .call').innerText").startswith(
        'calculator {"expression": '
    )
    assert page.run("document.querySelector('.message.tool .role').innerText") == "tool · calculator"
    assert page.run("document.querySelectorAll('.outline li').length") == 2
    page.look(1440, 300)
    go(page, address, PLACES["rollout"].replace("at=2", "at=0"), "Turn 2")
    thoughts = page.run("[...document.querySelectorAll('.thought pre')].map(each => each.innerText)")
    assert thoughts and all(each.startswith("The goal is below") for each in thoughts)
    page.run("document.querySelector('.outline li:nth-child(2) button').click()")
    assert_soon(page, "Math.abs(document.querySelectorAll('.turn')[1].getBoundingClientRect().top - 54) < 2")


def test_a_forest_of_more_than_500_turns_is_readable_and_bounded(
    tab: Page, tmp_path: Path, pages_of: Callable[[Path], Pages]
) -> None:
    rng = random.Random(0)

    def turn(name: str) -> Turn:
        said = Message("user", "?"), Message("assistant", name)
        return Turn(name, (Segment("environment", (1, 2)), segment("go", rng, 1)), said, fresh=True)

    def played(number: int) -> RolloutRow:
        """Five share their first two turns."""
        shared, own = f"s{number // 5}", f"x{number}"
        turns = (turn(f"{shared}/t0"), turn(f"{shared}/t1"), *(turn(f"{own}/t{i}") for i in range(2, 9)))
        trajectory = Trajectory(own, turns, "terminated", {"success": rng.random()})
        return RolloutRow(1, "t", "w", "g", trajectory, "trained")

    run = Layout(tmp_path / "runs" / "a")
    run.rollouts.mkdir(parents=True)
    run.metrics.write_text("")
    write_rollouts(rollouts_path(run.rollouts, 1), [played(number) for number in range(90)])
    apart = """(() => {
        const all = (what) => [...document.querySelectorAll('.trees ' + what)];
        const boxes = (what) => all(what).map(each => each.getBoundingClientRect());
        const meet = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
        const labels = boxes('text'), nodes = boxes('circle');
        const covered = (a) => [...labels, ...nodes].some(b => b !== a && meet(a, b));
        return [labels.length, labels.filter(covered).length];
    })()"""
    with serving(pages_of(tmp_path / "runs")) as address:
        go(tab, address, "#/group?run=runs/a&step=1&group=g", "more rollouts are not drawn")
        nodes = tab.run("document.querySelectorAll('.node').length")
        assert 500 < nodes <= 600 and f"{nodes} turns as a forest" in tab.run(ABOUT_JS)
        ends = tab.run("document.querySelectorAll('.node.leaf').length")
        assert f"; {90 - ends} more rollouts are not drawn" in tab.run(ABOUT_JS)
        for size, labels in ((0.55, ends), (1.4, ends), (0.5, ends), (0.25, 0)):
            slide(tab, "Size", size)
            assert_soon(tab, f"JSON.stringify({apart}) === '[{labels},0]'")
        tab.open("about:blank")
