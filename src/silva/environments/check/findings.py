"""What a check of an environment finds, and where."""

from __future__ import annotations

import inspect
import sysconfig
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from silva.errors import one_line

SHOWN = 100  # characters of a value in a finding
_SILVA = str(Path(__file__).parents[2])
_STANDARD = sysconfig.get_paths()["stdlib"]


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
    """Where an exception comes from: in the file `own`, or else in the innermost frame of a library."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if frame.filename == own]
    library = [frame for frame in frames if not _is_known(frame.filename)]
    frame = (inside or library or frames)[-1]
    text = f"{frame.name}() raised {type(error).__name__}: {one_line(str(error), 300)}, {when}"
    return Finding("wrong", text, f"{frame.filename}:{frame.lineno}")


def _is_known(file: str) -> bool:
    """Of Silva or of the standard library."""
    return file.startswith(_SILVA) or (file.startswith(_STANDARD) and "site-packages" not in file)


def file_of(kind: type) -> str:
    try:
        return inspect.getsourcefile(kind) or ""
    except TypeError:  # made by `create_model`: the class it derives from is in the file
        return next((file_of(base) for base in kind.__bases__ if base is not object), "")
