"""How tests look at the viewer: served in a thread, in a tab of a real browser."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from browser import CHROMIUM, Page

from silva.viewer.pages import Pages
from silva.viewer.routes import app_of
from silva.wire.guard import Guard
from silva.wire.listening import Bind, serve

IN_BROWSER = [
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
    "tokens": f"#/rollout?run={RUN}&step=5&at=2&view=tokens&turn=1&by=ratios",
    "outcomes": f"#/outcomes?run={RUN}",
    "task": f"#/task?run={RUN}&task=calculator%2Ftrain%2F0", "config": f"#/config?run={RUN}",
}  # fmt: skip
PLOTS = """Object.defineProperty(window, "uPlot", { get: () => window.Kept, set: (made) => {
  window.plots = [];
  window.Kept = class extends made { constructor(...given) { super(...given); plots.push(this); } };
} })"""
"""Keeps the plots of a page, for what only a canvas shows."""
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


def assert_soon(page: Page, condition: str) -> None:
    """Wait for what a script says, at most half a minute."""
    done = page.run(
        "new Promise(done => { let left = 600; const look = () => { let ok = false;"
        f" try {{ ok = {condition}; }} catch {{}}"
        " ok || !left-- ? done(!!ok) : setTimeout(look, 50); }; look(); })"
    )
    assert done, f"{condition}; the page shows: {page.run(ABOUT_JS)[:600]}"


def opened(page: Page, address: str, place: str, expected: str) -> None:
    page.open("about:blank")
    page.open(address + place)
    assert_soon(page, f"{ABOUT_JS}.includes({json.dumps(expected)})")


def go(page: Page, address: str, place: str, expected: str) -> None:
    opened(page, f"{address}/", place, expected)


def press(page: Page, key: str) -> None:
    page.run(
        f"document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {{key: {key!r}, bubbles: true}}))"
    )
