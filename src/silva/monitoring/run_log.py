"""`run.log`: a line for each message, and one for each start of the run that says what was started where."""

from __future__ import annotations

import json
import platform
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import silva

START = "start "
SHOWN = 50  # different warnings
_LINE = re.compile(r"(\d{4}-\d\d-\d\dT\S+) (info|result|warning|error): (.*)")


@dataclass(frozen=True)
class Log:
    """`started`: command, host and version of the last start.

    `warnings`: level, first line and count of each kind. Messages of a kind differ only in numbers; the last
    one stands for all.
    """

    began: str
    ended: str
    started: dict[str, str]
    warnings: list[tuple[str, str, int]]


def start_line() -> str:
    command = shlex.join([Path(sys.argv[0]).name.replace("__main__.py", "silva"), *sys.argv[1:]])
    return START + json.dumps({"command": command, "host": platform.node(), "Silva": version()})


def version() -> str:
    """Silva's version, with the commit if it runs from a checkout of its repository."""
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return silva.__version__
    asked = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        said = subprocess.run(asked, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return silva.__version__
    commit = said.stdout.strip()
    return f"{silva.__version__} at {commit}" if commit else silva.__version__


def read_log(path: Path) -> Log | None:
    """None if it holds no message. Further lines of a message (stacks) are passed over."""
    found = [m.groups() for m in map(_LINE.fullmatch, path.read_text("utf-8", "replace").splitlines()) if m]
    if not found:
        return None
    started = {}
    for _, level, text in found:
        if level == "info" and text.startswith(START):
            started = json.loads(text.removeprefix(START))
    alike: dict[str, list[tuple[str, str]]] = {}  # messages that differ only in numbers, such as a step's
    for _, level, text in found:
        if level in ("warning", "error"):
            alike.setdefault(re.sub(r"[\d.,]+", "#", text), []).append((level, text))
    warnings = [(*messages[-1], len(messages)) for messages in alike.values()]
    return Log(found[0][0], found[-1][0], started, warnings[-SHOWN:])
