"""A browser without a window, and the pages of MiniWoB in it.

It is driven by the DevTools protocol over two pipes, and ends when the process that started it does, even if
that is killed: it reads the end of its input. Its folder is removed by the shell that waits for it.

miniwob_page.js gives each page a clock of its own, which stands still between actions; each action lets a
second pass.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from silva.errors import ConfigError
from silva.scratch import REMOVE, private_folder

PACKAGE = "miniwob>=1.1.0"
PROGRAM = "chromium"
# No sandbox: as root there is none, and pages are those of the package. No network: they need none.
OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-extensions", "--disable-background-networking", "--disable-component-update",
    "--host-resolver-rules=MAP * ~NOTFOUND", "--allow-file-access-from-files", "--remote-debugging-pipe",
)  # fmt: skip
# $1: the browser's own folder, into which its processes write until the last of them has ended: `cat` waits
# for that. Descriptors 3 and 4 are those that --remote-debugging-pipe reads and writes.
START = f'd=$1; shift; exec 3<&0 4>&1; "$@" </dev/null 2>&1 >/dev/null | cat >"$d/log"; set -- "$d"; {REMOVE}'
PATIENCE = 60.0  # seconds for one answer of the browser
WINDOW = {"width": 500, "height": 320, "deviceScaleFactor": 1, "mobile": False}  # the package's
ACTION_MS = 1000  # page time that passes with an action; animations of the pages end within it
MODIFIERS = {"control": 2, "shift": 8}
KEYS = {
    "backspace": ("Backspace", 8, ""), "tab": ("Tab", 9, ""), "enter": ("Enter", 13, "\r"),
    "escape": ("Escape", 27, ""), "space": (" ", 32, " "), "pageup": ("PageUp", 33, ""),
    "pagedown": ("PageDown", 34, ""), "end": ("End", 35, ""), "home": ("Home", 36, ""),
    "arrowleft": ("ArrowLeft", 37, ""), "arrowup": ("ArrowUp", 38, ""), "arrowright": ("ArrowRight", 39, ""),
    "arrowdown": ("ArrowDown", 40, ""), "delete": ("Delete", 46, ""),
}  # fmt: skip
ARROWS = ("arrowleft", "arrowup", "arrowright", "arrowdown")
# The browser has shortcuts of its own, such as to close a window: only these reach it.
HELD = {
    "control": ("a", "c", "v", "x", "z", "backspace", "delete", "home", "end", *ARROWS),
    "shift": ("tab", "home", "end", *ARROWS),
}
PAGE = Path(__file__).with_name("miniwob_page.js")


class PageView(NamedTuple):
    """A page as it is.

    Attributes:
        asked: what has to be done.
        text: its visible elements, one a line: [ref] tag#id.class "text" attributes.
        kinds: ref -> select, field (takes keys), value (takes a value, such as a date), or empty.
        options: ref -> options, of elements of the kind select.
        reward: raw, from -1 to 1, of a page that is done.
    """

    asked: str
    text: str
    kinds: Mapping[int, str]
    options: Mapping[int, Sequence[str]]
    done: bool = False
    reward: float = 0.0


class Action(NamedTuple):
    """What is done to a page.

    Attributes:
        verb: click; type (keys, in place of what a field holds); fill (a value); select (an option; if
            several may be chosen, whether it is changes); press (a character, one of KEYS, or as HELD says
            "control+a"); scroll (by the height of the element, "up" or "down"); wait.
    """

    verb: str
    ref: int = 0
    text: str = ""


class BrowserGoneError(ConnectionError):
    """The browser ended or does not answer: an episode in it has no result."""


def pages() -> Path:
    """The folder with the package's pages. Nothing of its code is used.

    Raises:
        ConfigError: the package is not installed.
    """
    spec = importlib.util.find_spec("miniwob")
    if spec is None or spec.origin is None:
        raise ConfigError(f"environment miniwob: cannot find miniwob: pip install --no-deps '{PACKAGE}'")
    return Path(spec.origin).parent / "html" / "miniwob"


class Browser:
    """
    Raises:
        ConfigError: there is none, or it does not start.
    """

    def __init__(self) -> None:
        found = shutil.which(PROGRAM)
        if found is None:
            raise ConfigError(
                f"environment miniwob: no {PROGRAM} on the path: install it, as chromium of Debian"
            )
        self._held = contextlib.ExitStack()
        folder = str(self._held.enter_context(private_folder("miniwob")))
        self._process = subprocess.Popen(
            ["sh", "-c", START, "sh", folder, found, *OPTIONS, f"--user-data-dir={folder}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, "TZ": "UTC", "LANGUAGE": "en_US", "HOME": folder, "TMPDIR": folder},
            start_new_session=True,  # Ctrl-C is for the run, which ends it
        )
        self._buffer, self._calls = b"", 0
        self._loading: dict[str, set[str]] = defaultdict(set)  # session -> requests for files
        try:
            self.call("Browser.getVersion")
        except BrowserGoneError as error:
            raise ConfigError(f"{error}: {found} does not start") from error

    def call(self, method: str, session: str = "", /, **params: Any) -> Any:
        """
        Raises:
            BrowserGoneError: it ended, or does not answer.
            RuntimeError: it refuses.
        """
        self._calls += 1
        request = {"id": self._calls, "method": method, "params": params}
        request |= {"sessionId": session} if session else {}
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\0")
        except BrokenPipeError as error:
            raise self._lost("ended") from error
        until = time.monotonic() + PATIENCE
        while (answer := self._read(until)).get("id") != self._calls:
            pass
        if "error" in answer:
            raise RuntimeError(f"chromium: {method}: {answer['error'].get('message')}")
        return answer["result"]

    def loaded(self, session: str) -> bool:
        """Waits for the files that a page asked for, such as images; whether there were any."""
        asked, until = bool(self._loading[session]), time.monotonic() + PATIENCE
        while self._loading[session]:
            self._read(until)
        return asked

    def alive(self) -> bool:
        return self._process.poll() is None

    def _read(self, until: float) -> Any:
        assert self._process.stdout is not None
        while b"\0" not in self._buffer:
            left = max(0.0, until - time.monotonic())
            if not select.select([self._process.stdout], [], [], left)[0]:
                raise self._lost(f"gave no answer within {PATIENCE:g} s")
            got = os.read(self._process.stdout.fileno(), 1 << 16)
            if not got:
                raise self._lost("ended")
            self._buffer += got
        text, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(text)
        if message.get("method") == "Network.requestWillBeSent":
            self._loading[message["sessionId"]].add(message["params"]["requestId"])
        elif message.get("method") in ("Network.loadingFinished", "Network.loadingFailed"):
            self._loading[message["sessionId"]].discard(message["params"]["requestId"])
        return message

    def _lost(self, how: str) -> BrowserGoneError:
        """Ends all of it, so that the next episode starts another one."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._held.close()
        return BrowserGoneError(f"environment miniwob: the browser {how}")


class BrowserPage:
    """A window of a browser, with cookies and a clipboard of its own."""

    def __init__(self, browser: Browser) -> None:
        self._browser, self._clipboard = browser, ""
        self._context = browser.call("Target.createBrowserContext")["browserContextId"]
        target = browser.call(
            "Target.createTarget", url="about:blank", browserContextId=self._context, newWindow=True
        )["targetId"]
        self._session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def open(self, task: str, seed: int, mode: str) -> PageView:
        """Loads a page and generates its problem. `mode`: train or test, for the few that have parts."""
        self._call("Page.enable")
        self._call("Network.enable")
        self._call("Page.addScriptToEvaluateOnNewDocument", source=PAGE.read_text("utf-8"))
        self._call("Emulation.setDeviceMetricsOverride", **WINDOW)
        self._call("Emulation.setFocusEmulationEnabled", enabled=True)
        self._call("Page.navigate", url=(pages() / f"{task}.html").as_uri())
        until = time.monotonic() + PATIENCE
        while not self._run("ready"):
            if time.monotonic() > until:
                raise RuntimeError(f"page {task} is not ready within {PATIENCE:g} s")
            time.sleep(0.01)
        self._run("begin", seed, mode)
        return self.act(Action("wait"))

    def act(self, action: Action) -> PageView:
        """Does it, and lets page time pass."""
        match action.verb:
            case "click":
                self._click(action.ref)
            case "type":
                self._click(action.ref)
                self._run("mark", action.ref)
                for key in action.text or ["delete"]:
                    self._key(key)
            case "press":
                self._press(action.text)
            case "fill" | "select" | "scroll":
                self._run(action.verb, action.ref, action.text)
        self._pass(ACTION_MS)
        seen = self._run("read")
        for key in ("kinds", "options"):
            seen[key] = {int(ref): value for ref, value in seen[key].items()}
        return PageView(**seen)

    def close(self) -> None:
        if self._browser.alive():
            with contextlib.suppress(BrowserGoneError):
                self._browser.call("Target.disposeBrowserContext", browserContextId=self._context)

    def _click(self, ref: int) -> None:
        place = self._run("place", ref)
        if place is None:  # something else is above it: the package's way
            self._run("click", ref)
            return
        self._call("Input.dispatchMouseEvent", type="mouseMoved", **place)
        self._pass(0)  # what it is over may look different now
        for what in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=what, button="left", clickCount=1, **place)

    def _pass(self, ms: int) -> None:
        """Lets page time pass, until all is there: an image has no size before its file is read."""
        self._run("advance", ms)
        while self._browser.loaded(self._session):
            self._run("advance", 0)

    def _press(self, key: str) -> None:
        if key in ("control+c", "control+x"):  # the browser has one clipboard for all its pages
            self._clipboard = self._run("marked")
        if key == "control+v":
            self._call("Input.insertText", text=self._clipboard)
        elif key != "control+c":
            self._key("delete" if key == "control+x" else key)

    def _key(self, key: str) -> None:
        held, _, key = key.rpartition("+") if len(key) > 1 else ("", "", key)
        if not key.isascii():
            self._call("Input.insertText", text=key)
            return
        name, code, text = KEYS.get(key) or (key, ord(key.upper()) if key.isalnum() else 0, key)
        about = {"key": name, "windowsVirtualKeyCode": code, "modifiers": MODIFIERS.get(held, 0)}
        typed = {"text": text} if text and not held else {}
        self._call("Input.dispatchKeyEvent", type="keyDown", **about, **typed)
        self._call("Input.dispatchKeyEvent", type="keyUp", **about)

    def _run(self, function: str, *args: Any) -> Any:
        """What a function of miniwob_page.js returns, once it is there."""
        got = self._call(
            "Runtime.evaluate",
            expression=f"silva.{function}({', '.join(map(json.dumps, args))})",
            returnByValue=True,
            awaitPromise=True,
        )
        if "exceptionDetails" in got:
            thrown = got["exceptionDetails"]
            raise RuntimeError(f"page: {thrown.get('exception', thrown).get('description', thrown)}")
        return got["result"].get("value")

    def _call(self, method: str, **params: Any) -> Any:
        return self._browser.call(method, self._session, **params)


_RUNNING: list[Browser] = []  # of this process: to start one takes a second or two


def page() -> BrowserPage:
    """A page for one episode, in the browser of this process; a new browser if that is gone."""
    if not (_RUNNING and _RUNNING[0].alive()):
        _RUNNING[:] = [Browser()]
    return BrowserPage(_RUNNING[0])
