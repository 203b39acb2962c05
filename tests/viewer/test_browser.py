"""The viewer in a real browser: its pages over a server and from disk, live, by keyboard, in both colours."""

from __future__ import annotations

import importlib.util
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from browser import Page
from hypothesis import given, settings
from tests.monitoring.fake_run import HOSTILE, make_run, rollout
from tests.viewer.looking import (
    ABOUT_JS,
    GROUP,
    IN_BROWSER,
    PLACES,
    RUN,
    assert_soon,
    go,
    opened,
    press,
    serving,
)
from tests.viewer.test_expression import ERRORS, KINDS, NAMED, ROWS, Found, filters

from silva.storage.layout import Layout
from silva.storage.metrics import append_metrics
from silva.storage.rollouts import rollouts_path, write_rollouts
from silva.viewer.catalogue import Catalogue
from silva.viewer.export import export
from silva.viewer.pages import Pages

pytestmark = IN_BROWSER


def test_from_the_list_by_keyboard_to_a_rollout_and_back(page: Page, address: str) -> None:
    go(page, address, PLACES["runs"], "seed_0")
    press(page, "?")
    assert_soon(page, "document.querySelector('.keys').innerText.includes('next, previous row')")
    press(page, "?")
    go(page, address, PLACES["rollouts"], "rollouts fit")
    press(page, "d")
    assert_soon(page, "document.documentElement.dataset.theme === 'dark'")
    press(page, "d")
    assert_soon(page, "document.documentElement.dataset.theme === 'light'")
    press(page, "/")
    assert page.run("document.activeElement.id") == "filter"
    page.run("document.activeElement.blur()")
    press(page, "j")
    press(page, "j")
    assert_soon(page, "document.querySelectorAll('.list-row')[1].classList.contains('chosen')")
    press(page, "Enter")
    assert_soon(page, "document.querySelector('.turn') && location.hash.startsWith('#/rollout?')")
    press(page, "Escape")
    assert_soon(page, "location.hash.startsWith('#/step?')")
    press(page, "Escape")
    assert_soon(page, "location.hash.startsWith('#/run?')")


def test_a_filter_is_in_the_address_and_an_error_says_where(page: Page, address: str) -> None:
    asked = 'failed and "ConnectionError" in error'
    go(page, address, PLACES["rollouts"], "rollouts fit")
    page.run(
        f"(() => {{ const box = document.getElementById('filter'); box.value = {asked!r};"
        " box.dispatchEvent(new Event('input', {bubbles: true})); box.form.requestSubmit(); })()"
    )
    assert_soon(page, f"{ABOUT_JS}.includes('4 rollouts fit')")
    assert page.run("decodeURIComponent(location.hash)").endswith(f"filter={asked}")
    go(page, address, PLACES["rollouts"] + "&filter=rewrd%3C1", "did you mean reward?")
    page.problems[:] = [each for each in page.problems if "400" not in each]  # the browser logs the answer


def test_a_long_list_has_few_rows_in_the_page(page: Page, address: str) -> None:
    go(page, address, PLACES["rollouts"], "rollouts fit")
    page.run("document.querySelector('.scroll').scrollTop = 1e6")
    assert_soon(page, "Math.round(parseFloat(document.querySelector('.tall').style.height) / 38) >= 200")
    page.run("document.querySelector('.scroll').scrollTop = 1e6")
    assert_soon(page, "Math.round(parseFloat(document.querySelector('.tall').style.height) / 38) === 270")
    assert page.run("document.querySelectorAll('.list-row').length") < 60


def test_a_forest_opens_its_turns_and_its_members(page: Page, address: str) -> None:
    go(page, address, GROUP, "Side by side")
    assert_soon(
        page,
        "document.querySelectorAll('.node').length > 4 "
        "&& document.querySelectorAll('.sides .turn').length > 2",
    )
    page.run("document.querySelectorAll('.node')[1].dispatchEvent(new MouseEvent('click', {bubbles: true}))")
    assert_soon(page, "document.querySelector('.node-text').innerText.includes('tokens sampled')")
    assert page.run("document.querySelectorAll('.node-text .board i').length") == 16
    before = page.run("document.querySelector('.node').style.fill")
    go(page, address, GROUP + "&colour=entropy", "Side by side")
    assert page.run("document.querySelector('.node').style.fill") != before


def test_the_same_task_in_two_steps_word_by_word(page: Page, address: str) -> None:
    go(page, address, PLACES["task"], "only in A")
    assert_soon(page, "document.querySelectorAll('.diff del, .diff ins').length > 0")


def test_hostile_text_is_shown_and_nothing_else(page: Page, address: str) -> None:
    go(page, address, f"#/rollouts?run={RUN}&filter=failed", "4 rollouts fit")
    assert_soon(page, "document.querySelector('.list-row')")
    page.run("location.hash = document.querySelector('.list-row').getAttribute('href')")
    assert_soon(page, f"{ABOUT_JS}.includes({json.dumps(HOSTILE)})")


def test_a_run_that_goes_on_is_followed(tab: Page, tmp_path: Path, pages_of: Callable[[Path], Pages]) -> None:
    runs = [Layout(make_run(tmp_path / "runs" / "a" / f"seed_{seed}", steps=3)) for seed in (0, 1)]

    def goes_on(run: Layout, step: int) -> None:
        append_metrics(run.metrics, step, {"reward/raw": step / 8})
        write_rollouts(rollouts_path(run.rollouts, step), [rollout(step, 0, random.Random(0), 1.0)])

    rewards = (
        "[...document.querySelectorAll('.chart')].find(each => each.innerText.startsWith('Reward'))"
        ".querySelector('[role=img]').ariaLabel"
    )
    with serving(pages_of(tmp_path / "runs")) as address:
        go(tab, address, "#/step?run=runs/a/seed_0&step=3", "Step 3")
        goes_on(runs[0], 4)
        assert_soon(tab, "[...document.querySelectorAll('a.button')].some(a => a.innerText.startsWith('4'))")
        tab.run("location.hash = '#/'")
        assert_soon(
            tab, "/ 4( |\\t|$)/m.test(document.querySelector('tbody').innerText.replaceAll('\\t', ' '))"
        )
        both = "#/compare?run=runs/a/seed_0&run=runs/a/seed_1"
        go(tab, address, both, "side by side")
        assert_soon(tab, f"{rewards}.includes('to 0.5 at step 4') && !{rewards}.includes('at step 5')")
        goes_on(runs[1], 5)
        assert_soon(tab, f"{rewards}.includes('to 0.625 at step 5')")
        go(tab, address, both + "&mean=1", "side by side")
        assert_soon(tab, f"{rewards}.includes('at step 3')")
        for run in runs:
            goes_on(run, 6)
        assert_soon(tab, f"{rewards}.includes('to 0.75 at step 6')")
        tab.open("about:blank")


@pytest.fixture(scope="module")
def shared(folder: Path, pages: Pages, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of an export."""
    target = tmp_path_factory.mktemp("export") / "shared"
    assert export(pages, Catalogue([folder]), target) > 100
    return (target / "index.html").as_uri()


def test_an_export_opens_from_disk(tab: Page, shared: str) -> None:
    tab.open("about:blank")
    tab.problems.clear()
    tab.requests.clear()
    for place, expected in ((PLACES["runs"], "seed_0"), (PLACES["run"], "Curves"), (GROUP, "Side by side"),
                            (PLACES["rollouts"], "What a filter can say"),
                            (PLACES["task"], "only in A")):  # fmt: skip
        opened(tab, shared, place, expected)
    radios = "[...document.querySelectorAll('input[type=radio]:not(:disabled)')]"
    assert tab.run(f"{radios}.length") > 4
    tab.run(f"{radios}.at(-2).click()")  # another pair that the export holds
    assert_soon(tab, f"location.hash.includes('&a=') && {ABOUT_JS}.includes('only in A')")
    tab.open("about:blank")  # what comes late belongs to this test
    assert tab.problems == []
    assert all(url.startswith(("file:", "about:", "data:")) for url in tab.requests)


def test_an_export_filters_and_orders_all_rollouts(tab: Page, shared: str, pages: Pages) -> None:
    text = 'reward > 0 and rewards.success == 1 and "go" in text'
    asked = {"run": [RUN], "filter": [text], "sort": ["-entropy"], "limit": ["500"]}
    wanted = pages.answer("rollouts", asked)["rows"]
    assert 3 < len(wanted) < pages.answer("count", {"run": [RUN]})["count"]
    place = f"#/rollouts?run={RUN}&sort=-entropy&filter={quote(text)}"
    opened(tab, shared, place, f"{len(wanted)} rollouts fit")
    shown = tab.run("[...document.querySelectorAll('.list-row .what')].map(each => each.innerText)")
    assert len(shown) > 3
    for said, row in zip(shown, wanted, strict=False):
        assert said.startswith(row["task"])
    opened(tab, shared, place.replace("reward", "rewrd", 1), "at character 1: no column rewrd")


def test_an_export_says_what_is_too_much_for_its_filters(
    tab: Page, pages_of: Callable[[Path], Pages], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path / "runs" / "walk" / "seed_0", steps=1, rollouts=4)

    def exported(name: str) -> str:
        export(pages_of(tmp_path / "runs"), Catalogue([tmp_path / "runs"]), tmp_path / name)
        return (tmp_path / name / "index.html").as_uri()

    monkeypatch.setattr("silva.viewer.export.CHARACTERS", 10)
    opened(tab, exported("silent"), PLACES["rollouts"], "rollouts fit")
    assert_soon(tab, "document.querySelector('.help').textContent.includes('is too long for this export')")
    monkeypatch.setattr("silva.viewer.export.ROWS", 3)
    opened(tab, exported("long"), PLACES["rollouts"], "take runs of up to 3 rollouts")
    assert_soon(tab, "document.querySelectorAll('.list-row').length > 3")
    assert tab.run("document.querySelector('#filter')") is None


@settings(max_examples=150)
@given(wanted=filters)
def test_filters_of_an_export_are_those_of_the_server(tab: Page, address: str, wanted: Found) -> None:
    text, means = wanted
    assert fitting(tab, address, text) == [i for i, row in enumerate(ROWS) if means(row)], text


@pytest.mark.parametrize(("text", "said"), ERRORS)
def test_wrong_filters_of_an_export_are_those_of_the_server(
    tab: Page, address: str, text: str, said: str
) -> None:
    found = fitting(tab, address, text)
    assert isinstance(found, str) and said.partition("; did")[0] in found


def fitting(tab: Page, address: str, text: str) -> Any:
    """The rows that fit a filter by filter.js, or its error."""
    if not tab.run("location.href").startswith(address):
        tab.open(address)
    given = ", ".join(map(json.dumps, (text, KINDS, NAMED)))
    return tab.run(
        f"import('/filter.js').then(({{condition}}) => {{ const fits = condition({given}); "
        f"return {json.dumps(ROWS)}.flatMap((row, i) => fits(row) ? [i] : []); }}).catch(e => e.message)"
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 390])
def test_every_page_fits_and_axe_finds_no_serious_fault(
    page: Page, address: str, shared: str, scheme: str, width: int
) -> None:
    found = importlib.util.find_spec("axe_playwright_python")
    if found is None or found.origin is None:
        pytest.skip("axe is not installed (pip install --no-deps axe-playwright-python)")
    axe = next(Path(found.origin).parent.rglob("axe.min.js")).read_text()
    faults = []
    places = {name: (f"{address}/", place) for name, place in PLACES.items()}
    if (width, scheme) in ((1440, "light"), (390, "dark")):
        places |= {f"exported {name}": (shared, PLACES[name]) for name in ("rollouts", "group")}
        places |= {"no such run": (f"{address}/", "#/run?run=none"), "keys": (f"{address}/", PLACES["runs"]),
                   "wrong filter": (f"{address}/", PLACES["rollouts"] + "&filter=rewrd%3C1")}  # fmt: skip
    for name, (root, place) in places.items():
        page.look(width, 900, scheme)
        opened(page, root, place, "")
        assert_soon(
            page,
            "!document.querySelector('main [role=status]')?.innerText.startsWith('Reading')"
            " && document.querySelector('h1, [role=alert]')",
        )
        if name == "keys":
            press(page, "?")
            assert_soon(page, "document.querySelector('.keys')")
        assert page.run("document.documentElement.scrollWidth") <= width, name
        page.run(axe)
        rules = (
            "{runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa'], resultTypes: ['violations'],"
            " preload: false}"  # it would ask for style sheets of an export, whose policy refuses that
        )
        violations = page.run(
            f"axe.run(document, {rules}).then(r => r.violations"
            ".filter(v => ['serious', 'critical'].includes(v.impact))"
            ".map(v => `${v.id}: ${v.nodes[0].html.slice(0, 160)} ${v.nodes[0].failureSummary}`))"
        )
        faults += [f"{name}: {each}" for each in violations]
    assert faults == []
    page.problems[:] = [each for each in page.problems if "400" not in each]  # logged by the browser
    page.requests[:] = [url for url in page.requests if not url.startswith("file:")]
    page.open("about:blank")
    opened(page, f"{address}/", PLACES["runs"], "seed_0")
