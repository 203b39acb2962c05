"""Made-up runs that the viewer looks at, and the viewer as it is served."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from browser import Page, browser
from tests.monitoring.fake_run import decode, make_run
from tests.viewer.looking import PLOTS, serving

from silva.registries import REGISTRIES
from silva.viewer.catalogue import Catalogue
from silva.viewer.pages import Pages


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs that differ in their seed, and a file that is no run beside them."""
    folder = tmp_path_factory.mktemp("view") / "runs"
    for seed in (0, 1):
        make_run(folder / "walk" / f"seed_{seed}", steps=12, rollouts=16, seed=seed)
    config = folder / "walk" / "seed_1" / "config.toml"
    config.write_text(config.read_text().replace("seed = 7", "seed = 8"))
    (folder.parent / "secret.txt").write_text("not for you")
    return folder


@pytest.fixture(scope="session")
def pages_of() -> Callable[[Path], Pages]:
    return lambda folder: Pages(Catalogue([folder]), REGISTRIES, lambda layout: decode)


@pytest.fixture(scope="session")
def pages(folder: Path, pages_of: Callable[[Path], Pages]) -> Pages:
    return pages_of(folder)


@pytest.fixture(scope="session")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile")) as page:
        page.call("Page.addScriptToEvaluateOnNewDocument", source=PLOTS)
        yield page


@pytest.fixture(scope="session")
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
