"""Where each key of a TOML document stands, which tomllib does not say.

Reads only documents that tomllib has accepted: it finds keys, it does not check syntax.
"""

from __future__ import annotations

import itertools
import re
import tomllib
from collections import deque
from dataclasses import dataclass, field

from silva.config.field_types import Key

_TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}'  # up to two quotes may stand before the closing three
    r"|'''.*?'{3,5}"
    r'|"(?:\\.|[^"\\\n])*"'
    r"|'[^'\n]*'"
    r"|#[^\n]*"
    r"|[][{}=,.]"
    r"|[^][{}=,.#\"'\s]+",
    re.DOTALL,
)


@dataclass
class TomlLines:
    """`lines`: path -> line (from 1) of every key, table and list element. `comments`: path -> the
    comment behind its value, without `#`."""

    lines: dict[Key, int] = field(default_factory=dict)
    comments: dict[Key, str] = field(default_factory=dict)


def scan(text: str) -> TomlLines:
    """Find every key of a valid TOML document."""
    return _Scanner(text).found


class _Scanner:
    def __init__(self, text: str) -> None:
        self.found = TomlLines()
        self.tokens: deque[tuple[str, int]] = deque()  # each with the line it begins on
        self.elements: dict[Key, int] = {}  # number of the last element of each array of tables
        comments: dict[int, str] = {}
        line, counted = 1, 0
        for match in _TOKEN.finditer(text):
            line += text.count("\n", counted, match.start())  # from the start each time is quadratic
            counted = match.start()
            if match[0].startswith("#"):
                comments[line] = match[0][1:].strip()
            else:
                self.tokens.append((match[0], line))
        table: Key = ()
        while self.tokens:
            if self.tokens[0][0] == "[":
                table = self._header()
                continue
            path, end = self._pair(table)
            if end in comments:
                self.found.comments[path] = comments[end]

    def _header(self) -> Key:
        line = self._take()[1]
        array = self._skip("[")
        names = self._key()
        if array:
            self._take()
        path: Key = ()
        for depth, name in enumerate(names, 1):
            path = self._mark((*path, name), line)
            if path in self.elements and depth < len(names):  # the last element is meant
                path = (*path, self.elements[path])
        if array:
            self.elements[path] = self.elements.get(path, -1) + 1
            path = self._mark((*path, self.elements[path]), line)
        return path

    def _key(self) -> list[str]:
        """A dotted key, with the "=" or "]" behind it."""
        names: list[str] = []
        while True:
            word = self._take()[0]
            names.append(tomllib.loads(f"key = {word}")["key"] if word[0] in "\"'" else word)
            if not self._skip("."):
                self._take()
                return names

    def _pair(self, path: Key) -> tuple[Key, int]:
        """A key and its value: (its path, the line that the value ends on)."""
        line = self.tokens[0][1]
        for name in self._key():
            path = self._mark((*path, name), line)
        return path, self._value(path)

    def _value(self, path: Key) -> int:
        start, line = self._take()
        if start == "[":
            for index in itertools.count():
                if self.tokens[0][0] == "]":
                    break
                self._value(self._mark((*path, index), self.tokens[0][1]))
                self._skip(",")
            return self._take()[1]
        if start == "{":
            while self.tokens[0][0] != "}":
                self._pair(path)
                self._skip(",")
            return self._take()[1]
        if start[0] in "\"'":
            return line + start.count("\n")
        while self.tokens and self.tokens[0][1] == line and self.tokens[0][0] not in ",]}":
            self._take()  # 1.5 and dates are several tokens
        return line

    def _take(self) -> tuple[str, int]:
        return self.tokens.popleft()

    def _skip(self, token: str) -> bool:
        found = bool(self.tokens) and self.tokens[0][0] == token
        if found:
            self._take()
        return found

    def _mark(self, path: Key, line: int) -> Key:
        self.found.lines.setdefault(path, line)
        return path
