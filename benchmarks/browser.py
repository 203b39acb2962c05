"""A headless Chromium driven over the DevTools protocol: just enough to open a page and use it."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SWITCHES = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-port=0",
)  # fmt: skip


class Page:
    """One tab. `problems` are console errors, exceptions and refused content; `requests` are URLs."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._id = 0
        self.events: list[dict[str, Any]] = []
        self.problems: list[str] = []
        self.requests: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._id += 1
        self._socket.send(json.dumps({"id": self._id, "method": method, "params": params}))
        while True:
            answer = self._receive()
            if answer.get("id") == self._id:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def open(self, url: str) -> None:
        """Load a page and wait until it is complete."""
        self.events.clear()
        self.call("Page.navigate", url=url)
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._receive()

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression; AssertionError where it throws."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def look(self, width: int, height: int, scheme: str = "light") -> None:
        """Set the window's size and the preferred colour scheme; wait for the next drawn frame."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def move(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, x: float, y: float) -> None:
        self.move(x, y)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def _receive(self) -> dict[str, Any]:
        message = json.loads(self._socket.recv(timeout=30))
        if "method" in message:
            self._note(message)
        return message

    def _note(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        params = event["params"]
        match event["method"]:
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                self.problems.append(
                    params["exceptionDetails"].get("exception", {}).get("description", "exception")
                )
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.problems.append(str([argument.get("value") for argument in params["args"]]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.problems.append(params["entry"]["text"])


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """Start Chromium with the empty folder `profile` and give its tab; ends only what it started."""
    assert CHROMIUM is not None
    process = subprocess.Popen(
        [CHROMIUM, *SWITCHES, f"--user-data-dir={profile}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        port = _wait_for_port(profile / "DevToolsActivePort", process)
        with connect(f"ws://127.0.0.1:{port[0]}{port[1]}", max_size=None, proxy=None) as root:
            targets = _call(root, "Target.getTargets")["targetInfos"]
            page = next(target["targetId"] for target in targets if target["type"] == "page")
            with connect(
                f"ws://127.0.0.1:{port[0]}/devtools/page/{page}", max_size=None, proxy=None
            ) as socket:
                yield Page(socket)
    finally:
        process.terminate()
        process.wait(timeout=20)


def _call(socket: ClientConnection, method: str) -> dict[str, Any]:
    socket.send(json.dumps({"id": 1, "method": method}))
    return json.loads(socket.recv(timeout=30))["result"]


def _wait_for_port(file: Path, process: subprocess.Popen[bytes]) -> tuple[int, str]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        lines = file.read_text().split("\n") if file.exists() else []
        if len(lines) >= 2:
            return int(lines[0]), lines[1]
        assert process.poll() is None, f"Chromium ended at once with exit code {process.returncode}"
        time.sleep(0.05)
    raise AssertionError("Chromium did not open its DevTools port within 60 s")
