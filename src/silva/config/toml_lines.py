"""Where each key of a TOML document stands, which tomllib does not say.

Reads only documents tomllib has accepted: it finds keys, it does not check syntax.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field

from silva.config.shape import Key

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_STRING = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}'  # up to two quotes may stand before the closing three
    r"|'''.*?'{3,5}"
    r'|"(?:\\.|[^"\\\n])*"'
    r"|'[^'\n]*'",
    re.DOTALL,
)
_SCALAR = re.compile(r"[^,\]}#\n]*")
_BLANK = re.compile(r"[ \t\r]*")
_BLANKS = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")


@dataclass
class TomlLines:
    """`lines`: path -> line (from 1) of every key, table and list element. `comments`: path -> the
    comment behind its value, without `#`."""

    lines: dict[Key, int] = field(default_factory=dict)
    comments: dict[Key, str] = field(default_factory=dict)


def scan(text: str) -> TomlLines:
    """Find every key of a valid TOML document."""
    scanner = _Scanner(text.replace("\r\n", "\n"))
    scanner.document()
    return scanner.found


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self._lines, self._counted = 1, 0  # the line at `_counted`
        self.found = TomlLines()
        self.counts: dict[Key, int] = {}  # elements so far of each array of tables

    def document(self) -> None:
        table: Key = ()
        while True:
            self._skip(_BLANKS)
            if self.at >= len(self.text):
                return
            if self.text[self.at] == "[":
                table = self._header()
            else:
                path = self._pair(table)
                self._skip(_BLANK)
                if self.text[self.at : self.at + 1] == "#":
                    end = (self.text + "\n").index("\n", self.at)
                    self.found.comments[path] = self.text[self.at + 1 : end].strip()

    def _header(self) -> Key:
        array = self.text.startswith("[[", self.at)
        line = self._line()
        self.at += 2 if array else 1
        names = self._key()
        self.at += 2 if array else 1
        path: Key = ()
        for name in names[:-1]:
            path = self._inside((*path, name), line)
        path = (*path, names[-1])
        self._mark(path, line)
        if array:
            index = self.counts.get(path, 0)
            self.counts[path] = index + 1
            path = (*path, index)
            self._mark(path, line)
        return path

    def _inside(self, path: Key, line: int) -> Key:
        """A header's prefix means the last element where it names an array of tables."""
        self._mark(path, line)
        return (*path, self.counts[path] - 1) if path in self.counts else path

    def _pair(self, table: Key) -> Key:
        line = self._line()
        path = table
        for name in self._key():
            path = (*path, name)
            self._mark(path, line)
        self.at += 1  # the "="
        self._skip(_BLANK)
        self._value(path)
        return path

    def _value(self, path: Key) -> None:
        start = self.text[self.at]
        if start == "[":
            self._array(path)
        elif start == "{":
            self._inline_table(path)
        elif start in "\"'":
            self._skip(_STRING)
        else:
            self._skip(_SCALAR)

    def _array(self, path: Key) -> None:
        self.at += 1
        index = 0
        while True:
            self._skip(_BLANKS)
            if self.text[self.at] == "]":
                self.at += 1
                return
            if self.text[self.at] == ",":
                self.at += 1
                continue
            self._mark((*path, index), self._line())
            self._value((*path, index))
            index += 1

    def _inline_table(self, path: Key) -> None:
        self.at += 1
        while True:
            self._skip(_BLANKS)
            if self.text[self.at] == "}":
                self.at += 1
                return
            if self.text[self.at] == ",":
                self.at += 1
                continue
            self._pair(path)

    def _key(self) -> list[str]:
        """A dotted key; stops in front of "=" or "]"."""
        names: list[str] = []
        while True:
            self._skip(_BLANK)
            quoted = self.text[self.at] in "\"'"
            word = self._skip(_STRING if quoted else _BARE)
            names.append(tomllib.loads(f"key = {word}")["key"] if quoted else word)
            self._skip(_BLANK)
            if self.text[self.at] != ".":
                return names
            self.at += 1

    def _skip(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self.text, self.at)
        assert match is not None, f"no {pattern.pattern!r} at line {self._line()}"
        self.at = match.end()
        return match.group()

    def _mark(self, path: Key, line: int) -> None:
        self.found.lines.setdefault(path, line)

    def _line(self) -> int:
        self._lines += self.text.count("\n", self._counted, self.at)  # from the start each time is quadratic
        self._counted = self.at
        return self._lines
