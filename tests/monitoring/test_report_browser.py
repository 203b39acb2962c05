"""The report in a real browser, opened from disk: it works and asks the network for nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from browser import CHROMIUM, Page, browser

from silva.environments.worlds.sokoban import SYMBOLS
from silva.monitoring.report import write_report
from silva.storage.rollouts import rollouts_path, write_rollouts

from .fake_run import HOSTILE
from .test_report_forests import row

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (apt-get install chromium)"),
]


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture
def page(tab: Page, run_directory: Path) -> Iterator[Page]:
    """The report, freshly loaded; afterwards: no console error, no request but the file itself."""
    url = (run_directory / "report.html").as_uri()
    tab.problems.clear()
    tab.requests.clear()
    tab.look(1200, 900)
    tab.open(url)
    yield tab
    assert tab.problems == []
    assert tab.requests == [url]
    assert tab.run("document.title") == "forest_walk · Silva"  # what the hostile text would change


def choose(page: Page, **values: str) -> None:
    for name, value in values.items():
        page.run(f"byId({name!r}).value = {value!r}")
    page.run("byId('filters').dispatchEvent(new Event('input'))")


def place(page: Page, selector: str) -> tuple[float, float]:
    """The middle of an element, scrolled into view."""
    page.run(f"document.querySelector({selector!r}).scrollIntoView({{block: 'center', behavior: 'instant'}})")
    x, y = page.run(
        f"(() => {{ const b = document.querySelector({selector!r}).getBoundingClientRect();"
        " return [b.x + b.width / 2, b.y + b.height / 2]; })()"
    )
    return x, y


def test_a_clicked_rollout_shows_its_whole_dialogue(page: Page) -> None:
    choose(page, kind="failed")
    assert page.run("byId('found').textContent") == "13 found"
    page.click(*place(page, ".rollout > summary"))
    text = page.run("document.querySelector('.rollout[open] .body').innerText")
    for expected in (
        "environment raised",
        "Use the calculator before you answer.",
        'calculator {"expression": "',
        HOSTILE,
    ):
        assert expected in text
    assert (
        page.run("document.querySelectorAll('.rollout[open] .turn').length") == 3
    )  # two and the last observation
    assert page.run("document.querySelectorAll('main img, main script').length") == 0


def card(page: Page, **changed: object) -> str:
    """What the card says of a result that was in [0.3, 0.5] before."""
    before = {"environment": "a", "metric": "success", "mean": 0.4, "ci_low": 0.3, "ci_high": 0.5, "n": 9}
    script = f"evaluation({json.dumps(before)}, {json.dumps(before | changed)})"
    return page.run(f"(() => {{ const c = {script}; byId('evals').replaceChildren(c);"
                    " return c.querySelector('.verdict')?.textContent + ' '"
                    " + getComputedStyle(c.querySelector('.after')).color; })()")  # fmt: skip


def test_what_got_worse_is_not_praised(page: Page) -> None:
    good, bad, ink = "rgb(26, 111, 69)", "rgb(154, 68, 8)", "rgb(27, 33, 28)"
    assert card(page, mean=0.7, ci_low=0.6, ci_high=0.8) == f"better {good}"
    assert card(page, mean=0.5, ci_low=0.4, ci_high=0.6) == f"higher, within the intervals {good}"
    assert card(page, mean=0.3, ci_low=0.2, ci_high=0.4) == f"lower, within the intervals {bad}"
    assert card(page, mean=0.1, ci_low=0.0, ci_high=0.2) == f"worse {bad}"
    assert card(page) == f"undefined {ink}"
    assert card(page, metric="turns", mean=0.1, ci_low=0.0, ci_high=0.2) == f"undefined {ink}"  # good or bad?


@pytest.mark.parametrize(
    ("title", "values", "lowest", "highest"),
    [
        ("Held-out success (95 % interval)", [0, 0, 0], "0", "1"),
        ("success/a", [1, 1], "0", "1"),
        ("train/kl", [0, 0], "0", "1"),
        ("train/loss", [0.55116, 0.55118], "0.551160", "0.551180"),
        ("train/lr", [0.00125, 0.00125], "0.0011", "0.0014"),
    ],
)
def test_marks_of_the_y_axis_are_whole_and_sensible(
    page: Page, title: str, values: list[float], lowest: str, highest: str
) -> None:
    page.look(390, 900)
    series = {"name": "a", "x": list(range(len(values))), "y": values, "every": 1}
    spec = json.dumps({"title": title, "more": True, "series": [series]})
    page.run(f"byId('charts').replaceChildren(chart({spec}))")
    page.look(390, 901)  # waits for the drawing
    marks = page.run(
        "[...document.querySelectorAll('#charts text[text-anchor=end]')].map(t => t.textContent)"
    )
    out = page.run("(() => { const left = document.querySelector('#charts svg').getBoundingClientRect().left;"
                   " return [...document.querySelectorAll('#charts text')]"
                   ".filter(t => t.getBoundingClientRect().left < left).length; })()")  # fmt: skip
    assert out == 0
    assert (marks[0], marks[-1]) == (lowest, highest)


def test_the_text_that_the_model_reads_is_shown_on_request(page: Page) -> None:
    choose(page, kind="good", environment="calculator")
    page.click(*place(page, ".rollout > summary"))
    page.run("(() => { const s = document.querySelector('.rollout[open] .views select'); s.value = 'text';"
             " s.dispatchEvent(new Event('change')); })()")  # fmt: skip
    texts = page.run("[...document.querySelectorAll('.rollout[open] .turn .text')].map(t => t.textContent)")
    assert texts[0].startswith("What is ") and texts[1].startswith('<tool_call>{"name": "calculator"')


def test_warnings_of_the_run_are_listed(page: Page) -> None:
    assert page.run("byId('warnings').hidden") is False
    items = page.run("[...document.querySelectorAll('#warnings li')].map(item => item.textContent)")
    assert items == [f"a stage said {HOSTILE} (2 of this kind)"]


def test_reasoning_turn_rewards_and_stop_reason_are_shown(page: Page) -> None:
    choose(page, kind="good", environment="frozen_lake")
    page.click(*place(page, ".rollout > summary"))
    text = page.run("document.querySelector('.rollout[open] .body').innerText")
    for expected in (
        "terminated",
        "The goal is below and to the right",
        "raw success +1",
        "shaped format -0.1",
    ):
        assert expected in text


def test_boards_are_drawn_and_their_text_stays(page: Page) -> None:
    text = "You are P.\n__O\n_P_\nO_G\nWhich way?\n___\n___\nP, or\nX"
    parts = ["You are P.", ["__O", "_P_", "O_G"], "Which way?\n___\n___\nP, or\nX"]
    assert page.run(f"boardsIn({json.dumps(text)})") == parts
    squares = page.run(
        f"[...message({{role: 'user', content: {json.dumps(text)}}}).querySelectorAll('.board i')]"
        ".map(square => square.className + square.textContent)"
    )
    assert len(squares) == 9 and squares[2:5] == ["placeO", "floor_", "playerP"]
    large = "\n".join(["P" * 100] * 100)
    assert page.run(f"boardsIn({json.dumps(large)})") == [large]
    assert set(page.run("Object.keys(SQUARES)")) == {*SYMBOLS, "G"}


def test_filters_and_search_narrow_the_list(page: Page) -> None:
    total = page.run("data.rollouts.rows.length")
    assert page.run("byId('found').textContent") == f"{total} found"
    assert page.run("document.querySelectorAll('.rollout').length") == 25
    page.click(*place(page, "#next"))
    assert page.run("document.querySelectorAll('.rollout').length") == 50
    choose(page, step="40", environment="calculator", kind="eval")
    rows = page.run("[...document.querySelectorAll('.rollout > summary')].map(s => s.innerText)")
    assert rows
    assert all("calculator/eval/" in row and "step 40" in row for row in rows)
    choose(page, step="", environment="", kind="", search="OWNED")
    expected = page.run("data.rollouts.rows.filter(r => JSON.stringify(r).includes('owned')).length")
    assert page.run("byId('found').textContent") == f"{expected} found"


def test_tokens_are_coloured_by_logprob_and_entropy(page: Page) -> None:
    choose(page, kind="good", environment="frozen_lake")
    page.click(*place(page, ".rollout > summary"))
    for view in ("logprob", "entropy"):
        page.run(
            "(select => { select.value = '" + view + "'; select.dispatchEvent(new Event('change')); })"
            "(document.querySelector('.views select'))"
        )
        text = page.run("document.querySelector('.rollout[open] .message.assistant .text').textContent")
        assert text.startswith("<think>The goal is below")
        colours = page.run(
            "[...document.querySelectorAll('.token')].map(token => getComputedStyle(token).backgroundColor)"
        )
        assert len(set(colours)) > 5
    assert "entropy" in page.run("document.querySelector('.token').title")


@pytest.fixture
def forest(tab: Page, tmp_path: Path) -> Page:
    """A report whose forest has 64 trajectories of 8 turns that share none."""
    rows = [
        row(str(i), *(f"{i}/{k}" for k in range(8)), reward=i / 64, advantage=i - 32.0) for i in range(64)
    ]
    rows[0] = replace(rows[0], environment=HOSTILE)
    (tmp_path / "rollouts").mkdir()
    write_rollouts(rollouts_path(tmp_path / "rollouts", 1), rows)
    tab.problems.clear()
    tab.look(1200, 900)
    tab.open(write_report(tmp_path).as_uri())
    return tab


def test_a_forest_of_512_turns_is_drawn_without_overlap(forest: Page) -> None:
    nodes = "[...document.querySelectorAll('#forest-trees .node')]"
    middles = forest.run(f"{nodes}.map(n => [+n.getAttribute('cx'), +n.getAttribute('cy')])")
    assert len(middles) == 512
    by_column: dict[float, list[float]] = {}
    for x, y in middles:
        by_column.setdefault(x, []).append(y)
    assert len(by_column) == 8 and min(b - a for a, b in pairwise(sorted(by_column))) >= 60
    for ys in by_column.values():
        assert min(b - a for a, b in pairwise(sorted(ys))) >= 14, "nodes are 12 high"
    assert forest.run("document.body.scrollWidth") <= 1200, "it scrolls in its own box"
    assert forest.problems == []


def test_nodes_of_a_forest_change_colour_and_open_their_text(forest: Page) -> None:
    colours = {}
    for key in ("entropy", "advantage", "reward"):
        forest.run(f"byId('forest-colour').value = {key!r}")
        forest.run("byId('forest-colour').dispatchEvent(new Event('input'))")
        leaves = "[...document.querySelectorAll('#forest-trees .leaf')]"
        colours[key] = forest.run(f"{leaves}.map(n => getComputedStyle(n).fill)")
    assert len(set(colours["entropy"])) == 1 and len(set(colours["reward"])) > 20
    assert colours["advantage"] != colours["reward"]
    assert forest.run("byId('forest-legend').textContent") == "00.984"
    forest.click(*place(forest, "#forest-trees [data-node='1']"))
    assert "reply 0/1" in forest.run("byId('forest-node').innerText")
    for key, expected in (("ArrowRight", "0/1"), ("Enter", "0/2"), ("ArrowDown", "0/2"), ("Enter", "1/2")):
        pressed = f"new KeyboardEvent('keydown', {{key: {key!r}, bubbles: true}})"
        forest.run(f"document.activeElement.dispatchEvent({pressed})")
        assert f"reply {expected}" in forest.run("byId('forest-node').innerText")
    assert HOSTILE in forest.run("byId('forest-which').textContent")
    assert forest.run("document.querySelectorAll('main img, main script').length") == 0
    assert forest.problems == []


def test_hovering_a_curve_shows_raw_and_smoothed_values(page: Page) -> None:
    page.move(*place(page, ".chart:nth-child(2) svg"))
    tip = page.run("document.querySelector('.chart:nth-child(2) .tip').innerText")
    step = page.run("document.querySelector('.chart:nth-child(2) .tip b').innerText")
    assert step == "step 19"  # the axis takes 34 pixels on the left
    value = page.run(f"number(data.charts[1].series[0].y[{step.split()[1]} - 1])")
    assert f"raw {value} (smoothed " in tip
    page.run("byId('smoothing').value = 0; byId('smoothing').dispatchEvent(new Event('input'))")
    page.move(10, 10)
    page.move(*place(page, ".chart:nth-child(2) svg"))
    assert "smoothed" not in page.run("document.querySelector('.chart:nth-child(2) .tip').innerText")


def test_marks_of_an_axis_differ(page: Page) -> None:
    """Also where a curve hardly moves, as tokens of a request in a step near 1."""
    assert page.run("[1, 1.0005, 1.001].map((v) => mark(v, 0.0005))") == ["1.0000", "1.0005", "1.0010"]
    assert page.run("[0, 0.2, 0.4].map((v) => mark(v, 0.2))") == ["0", "0.2", "0.4"]
    assert page.run("[99990, 100000].map((v) => mark(v, 10))") == ["99,990", "100,000"]
    assert page.run("[-5e-7, 0].map((v) => mark(v, 5e-7))") == ["-5.0e-7", "0"]


def test_curves_answer_the_keyboard(page: Page) -> None:
    page.run("document.querySelector('.chart svg').focus()")
    for _ in range(2):
        page.call("Input.dispatchKeyEvent", type="keyDown", key="ArrowLeft", code="ArrowLeft")
    tip = page.run("document.querySelector('.chart .tip').innerText")
    assert tip.startswith("step 35")
    assert "[" in tip  # the interval of the evaluation


def test_defaults_of_the_configuration_can_be_hidden(page: Page) -> None:
    before = page.run("byId('settings').innerText")
    assert "output_dir" in before
    assert "command line: --seed" in before
    page.click(*place(page, "#hide-defaults"))
    after = page.run("byId('settings').innerText")
    assert "output_dir" not in after
    assert "[model]" in after
    assert "seed = 7" in after


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1200])
def test_it_fits_phones_and_is_readable_in_light_and_dark(page: Page, scheme: str, width: int) -> None:
    page.look(width, 800, scheme)
    choose(page, kind="failed")
    page.click(*place(page, ".rollout > summary"))
    page.run("byId('more').open = true")
    assert page.run("document.documentElement.scrollWidth") == width
    contrast = page.run(CONTRAST)
    assert min(contrast.values()) >= 4.5, contrast


CONTRAST = """(() => {  // WCAG 2 contrast of text colours against the card and the page
  const rgb = (colour) => {
    const probe = document.body.appendChild(document.createElement('i'));
    probe.style.color = colour;
    const found = getComputedStyle(probe).color.match(/[0-9.]+/g).slice(0, 3).map(Number);
    probe.remove();
    return found;
  };
  const light = (colour) => rgb(colour).map((v) => v / 255)
    .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const result = {};
  for (const text of ['ink', 'soft', 'brand', 'good', 'bad', 'failed', 'dropped', 'eval'])
    for (const ground of ['card', 'page', 'wash']) {
      const [a, b] = [light(`var(--${text})`), light(`var(--${ground})`)].sort((x, y) => y - x);
      result[`${text} on ${ground}`] = (a + 0.05) / (b + 0.05);
    }
  return result;
})()"""


def test_an_empty_run_opens_without_errors(tab: Page, tmp_path: Path) -> None:
    from silva.monitoring.report import write_report

    tab.problems.clear()
    tab.open(write_report(tmp_path).as_uri())
    assert tab.problems == []
    text = tab.run("document.body.innerText")
    for expected in (
        "No evaluation so far.",
        "No metrics so far.",
        "No rollouts were written.",
        "config.toml is missing.",
    ):
        assert expected in text


def test_what_an_evaluation_left_out_is_shown(tab: Page, tmp_path: Path) -> None:
    """With the bounds of a share; where all is left out there is no number, and no dot of one."""
    from silva.monitoring.report import write_report

    share = {"environment": "lake", "metric": "success", "mean": 0.5, "ci_low": 0.125, "ci_high": 0.875,
             "n": 4, "left_out": 2, "bound_low": 0.25, "bound_high": 0.75}  # fmt: skip
    nothing = {key: None for key in share} | {
        "environment": "sea", "metric": "reward", "n": 0, "left_out": 8,
    }  # fmt: skip
    (tmp_path / "summary.json").write_text(json.dumps({"eval_after": [share, nothing]}))
    tab.problems.clear()
    tab.open(write_report(tmp_path).as_uri())
    assert tab.problems == []
    assert tab.run("[...document.querySelectorAll('#evals .intervals')].map((e) => e.textContent)") == [
        "now12.5 % to 87.5 %, 4 tasks (2 episodes left out: 25.0 % to 75.0 % with them)",
        "now– to – (8 episodes left out)",
    ]
    dots = (
        "[...document.querySelectorAll('#evals .whiskers')].map((e) => e.querySelectorAll('circle').length)"
    )
    assert tab.run(dots) == [1, 0]
