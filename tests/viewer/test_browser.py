"""The viewer in a real browser: its pages over a server and from disk, live, by keyboard, in both colours."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from tests.monitoring.browser import CHROMIUM, Page, browser
from tests.monitoring.fake_run import HOSTILE, make_run, rollout
from tests.viewer.test_expression import ERRORS, KINDS, NAMED, ROWS, Found, filters

from silva.storage.layout import Layout
from silva.storage.metrics import append_metrics
from silva.storage.rollouts import rollouts_path, write_rollouts
from silva.viewer.catalogue import Catalogue
from silva.viewer.export import export
from silva.viewer.pages import Pages
from silva.viewer.routes import app_of
from silva.wire.guard import Guard
from silva.wire.listening import Bind, serve

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (apt-get install chromium)"),
]
RUN = "runs/walk/seed_0"
GROUP = f"#/group?run={RUN}&step=5&group=frozen_lake%2Ftrain%2F0"
PLACES = {
    "runs": "#/", "run": f"#/run?run={RUN}", "compare": f"#/compare?run={RUN}&run=runs/walk/seed_1",
    "mean": f"#/compare?run={RUN}&run=runs/walk/seed_1&mean=1", "step": f"#/step?run={RUN}&step=5",
    "group": GROUP,
    "rollouts": f"#/rollouts?run={RUN}", "rollout": f"#/rollout?run={RUN}&step=5&at=2",
    "tokens": f"#/rollout?run={RUN}&step=5&at=2&view=tokens", "outcomes": f"#/outcomes?run={RUN}",
    "task": f"#/task?run={RUN}&task=calculator%2Ftrain%2F0", "config": f"#/config?run={RUN}",
}  # fmt: skip
ABOUT_JS = "document.querySelector('main').innerText"


@contextmanager
def serving(pages: Pages) -> Iterator[str]:
    """Its address; in a thread with an event loop of its own."""
    ready, address, loop = threading.Event(), list[str](), asyncio.new_event_loop()

    def listening(at: str) -> None:
        address.append(at)
        ready.set()

    bind = Bind("127.0.0.1", 0)
    guard = Guard(app_of(pages), bind, key="", log=print)
    task = loop.create_task(serve(guard, bind, ready=listening))
    thread = threading.Thread(
        target=lambda: loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
    )
    thread.start()
    try:
        assert ready.wait(30)
        yield address[0]
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join(30)
        loop.close()


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture(scope="module")
def address(pages: Pages) -> Iterator[str]:
    with serving(pages) as address:
        yield address


@pytest.fixture
def page(tab: Page, address: str) -> Iterator[Page]:
    """A tab; afterwards: no console error, no request to anybody else, no text that became more than text."""
    tab.problems.clear()
    tab.requests.clear()
    tab.look(1440, 900)
    yield tab
    assert tab.problems == []
    assert [url for url in tab.requests if not url.startswith((address, "data:", "about:"))] == []
    assert tab.run("document.title").endswith("Silva")
    assert tab.run("document.querySelectorAll('main img, main script, main iframe').length") == 0


def assert_soon(page: Page, condition: str) -> None:
    """Wait for what a script says, at most half a minute."""
    done = page.run(
        "new Promise(done => { let left = 600; const look = () => { let ok = false;"
        f" try {{ ok = {condition}; }} catch {{}}"
        " ok || !left-- ? done(!!ok) : setTimeout(look, 50); }; look(); })"
    )
    assert done, f"{condition}; the page shows: {page.run(ABOUT_JS)[:600]}"


def go(page: Page, address: str, place: str, expected: str) -> None:
    page.open("about:blank")
    page.open(f"{address}/{place}")
    assert_soon(page, f"{ABOUT_JS}.includes({json.dumps(expected)})")


def press(page: Page, key: str) -> None:
    page.run(
        f"document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {{key: {key!r}, bubbles: true}}))"
    )


def test_from_the_list_by_keyboard_to_a_rollout_and_back(page: Page, address: str) -> None:
    go(page, address, PLACES["runs"], "seed_0")
    press(page, "?")
    assert_soon(page, "document.querySelector('.keys').innerText.includes('next, previous row')")
    press(page, "?")
    go(page, address, PLACES["rollouts"], "rollouts fit")
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


def test_tokens_tell_their_numbers(page: Page, address: str) -> None:
    go(page, address, PLACES["tokens"], "Point at a token")
    assert_soon(page, "document.querySelectorAll('.segment.policy .token').length > 10")
    page.run(
        "document.querySelector('.segment.policy .token')"
        ".dispatchEvent(new PointerEvent('pointerover', {bubbles: true}))"
    )
    assert_soon(
        page,
        "/sampled · log-probability sampled with -.*entropy/"
        ".test(document.querySelector('.token-facts').innerText)",
    )


def test_the_same_task_in_two_steps_word_by_word(page: Page, address: str) -> None:
    go(page, address, PLACES["task"], "only in A")
    assert_soon(page, "document.querySelectorAll('.diff del, .diff ins').length > 0")


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


def test_hostile_text_is_shown_and_nothing_else(page: Page, address: str) -> None:
    go(page, address, f"#/rollouts?run={RUN}&filter=failed", "4 rollouts fit")
    assert_soon(page, "document.querySelector('.list-row')")
    page.run("location.hash = document.querySelector('.list-row').getAttribute('href')")
    assert_soon(page, f"{ABOUT_JS}.includes({json.dumps(HOSTILE)})")


def test_a_run_that_goes_on_is_followed(tab: Page, tmp_path: Path, pages_of: Callable[[Path], Pages]) -> None:
    run = Layout(make_run(tmp_path / "runs" / "a", steps=3))
    with serving(pages_of(tmp_path / "runs")) as address:
        go(tab, address, "#/step?run=runs/a&step=3", "Step 3")
        append_metrics(run.metrics, 4, {"reward/raw": 0.5})
        write_rollouts(rollouts_path(run.rollouts, 4), [rollout(4, 0, random.Random(0), 1.0)])
        assert_soon(tab, "[...document.querySelectorAll('a.button')].some(a => a.innerText.startsWith('4'))")
        tab.run("location.hash = '#/'")
        assert_soon(
            tab, "/ 4( |\\t|$)/m.test(document.querySelector('tbody').innerText.replaceAll('\\t', ' '))"
        )
        tab.open("about:blank")


@pytest.fixture(scope="module")
def shared(folder: Path, pages: Pages, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of an export."""
    target = tmp_path_factory.mktemp("export") / "shared"
    assert export(pages, Catalogue([folder]), target) > 100
    return (target / "index.html").as_uri()


def opened(tab: Page, address: str, place: str, expected: str) -> None:
    tab.open("about:blank")
    tab.open(address + place)
    assert_soon(tab, f"{ABOUT_JS}.includes({json.dumps(expected)})")


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
    page: Page, address: str, scheme: str, width: int
) -> None:
    found = importlib.util.find_spec("axe_playwright_python")
    if found is None or found.origin is None:
        pytest.skip("axe is not installed (pip install --no-deps axe-playwright-python)")
    axe = next(Path(found.origin).parent.rglob("axe.min.js")).read_text()
    faults = []
    for name, place in PLACES.items():
        page.look(width, 900, scheme)
        go(page, address, place, "")
        assert_soon(
            page,
            "!document.querySelector('main [role=status]')?.innerText.startsWith('Reading')"
            " && document.querySelector('h1')",
        )
        assert page.run("document.documentElement.scrollWidth") <= width, name
        page.run(axe)
        rules = "{runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa'], resultTypes: ['violations']}"
        violations = page.run(
            f"axe.run(document, {rules}).then(r => r.violations"
            ".filter(v => ['serious', 'critical'].includes(v.impact))"
            ".map(v => `${v.id}: ${v.nodes[0].html.slice(0, 160)} ${v.nodes[0].failureSummary}`))"
        )
        faults += [f"{name}: {each}" for each in violations]
    assert faults == []
