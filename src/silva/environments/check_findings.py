"""What a check of an environment finds, and where."""

from __future__ import annotations

import inspect
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

_SILVA = str(Path(__file__).parents[1])


@dataclass(frozen=True)
class Finding:
    """`where`: file and line, if something points there. A `note` is no fault."""

    kind: Literal["wrong", "note"]
    text: str
    where: str = ""


@dataclass
class Check:
    """One thing that was looked at. `done` says in words what was seen."""

    name: str
    done: str = ""
    findings: list[Finding] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return all(finding.kind == "note" for finding in self.findings)


def raised(error: Exception, when: str, own: str) -> Finding:
    """Where an exception comes from: in the file `own`, or else in the innermost frame outside of Silva."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if frame.filename == own]
    outside = [frame for frame in frames if not frame.filename.startswith(_SILVA)]
    frame = (inside or outside or frames)[-1]
    text = f"{frame.name}() raised {type(error).__name__}: {short(str(error), 300)}, {when}"
    return Finding("wrong", text, f"{frame.filename}:{frame.lineno}")


def file_of(kind: type) -> str:
    try:
        return inspect.getsourcefile(kind) or ""
    except TypeError:  # made by `create_model`: the class it derives from is in the file
        return next((file_of(base) for base in kind.__bases__ if base is not object), "")


def short(value: Any, most: int = 100) -> str:
    text = value if isinstance(value, str) else repr(value)
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[: most - 3]}..."
