"""Every key tomllib finds has a line, and it is the line the document's author put it on."""

import tomllib
from typing import Any

import pytest
import tomlkit
from hypothesis import given, settings
from hypothesis import strategies as st

from silva.config.toml_lines import scan


def paths(value: Any, path: tuple = ()) -> set[tuple]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return {path} - {()} | {found for key, item in items for found in paths(item, (*path, key))}


def test_hand_written_document():
    text = '''# a = 1
title = "x = 1 # not a comment"   # the comment
"quoted key".'b.c' = 'C:\\'
text = """
fake = 1
[fake]
\\"""
""""
raw = \'\'\'
[fake]\'\'\'\'
list = [ # x
  1, [2, 3],
  { a = 1, b.c = "]" }, # last
]

[a.b] # table
d = 1979-05-27 07:32:00
1.5 = inf
[[w]]
[[w]]
x = {y = "}"}
[w.sub]
z = 1
[[w.inner]]
k = 1
[[w.inner]]
k = 2
'''
    found = scan(text)
    assert set(found.lines) == paths(tomllib.loads(text))
    expected = {
        ("title",): 2,
        ("quoted key",): 3,
        ("quoted key", "b.c"): 3,
        ("text",): 4,
        ("raw",): 9,
        ("list",): 11,
        ("list", 1, 1): 12,
        ("list", 2, "b", "c"): 13,
        ("a", "b"): 16,
        ("a", "b", "d"): 17,
        ("a", "b", "1", "5"): 18,
        ("w", 0): 19,
        ("w", 1): 20,
        ("w", 1, "x", "y"): 21,
        ("w", 1, "sub", "z"): 23,
        ("w", 1, "inner", 0, "k"): 25,
        ("w", 1, "inner", 1, "k"): 27,
    }
    assert {key: found.lines[key] for key in expected} == expected
    assert found.comments == {("title",): "the comment"}


def test_windows_line_ends():
    assert scan("a = 1\r\n\r\n[b]\r\nc = [\r\n1]\r\n").lines == {
        ("a",): 1,
        ("b",): 3,
        ("b", "c"): 4,
        ("b", "c", 0): 5,
    }


def toml_value(value: Any) -> str:
    return tomlkit.item(value).as_string()


KEYS = st.text("abé. \"'#=[]{}\\-_1", max_size=4)
STRINGS = st.text("ab \"'#=[]{}\\,\n\t\x7fé", max_size=8)
SCALARS = st.one_of(
    st.integers(-99, 99), st.booleans(), STRINGS, st.floats(allow_nan=False), st.just("x = 1\n[t]\n")
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)


class Writer:
    """Writes a document in a style drawn by hypothesis and notes the line of each key as it goes."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw
        self.text = ""
        self.lines: dict[tuple, int] = {}

    def mark(self, path: tuple) -> None:
        self.lines.setdefault(path, self.text.count("\n") + 1)

    def blank(self) -> str:
        return self.draw(st.sampled_from(["", " ", "\t"]))

    def blanks(self) -> str:
        return self.draw(st.sampled_from(["", " ", "\n", " # ] } = \n", "\n\n  "]))

    def key(self, key: str) -> str:
        if key and all(char in "ab-_1" for char in key) and self.draw(st.booleans()):
            return key
        if "'" not in key and self.draw(st.booleans()):
            return f"'{key}'"
        return toml_value(key)

    def string(self, value: str) -> str:
        styles = [toml_value(value)]
        if not set("'\n\x7f") & set(value):
            styles.append(f"'{value}'")
        if "'''" not in value and "\x7f" not in value and not value.endswith("'"):
            styles.append(f"'''\n{value}'''")
        escaped = value.replace("\\", "\\\\").replace("\x7f", "\\u007F").replace('"""', '""\\"')
        styles.append(f'"""\n{escaped}"""')  # may end in one or two quotes of its own
        return self.draw(st.sampled_from(styles))

    def value(self, value: Any, path: tuple) -> None:
        if isinstance(value, list):
            self.text += "["
            for index, item in enumerate(value):
                self.text += self.blanks()
                self.mark((*path, index))
                self.value(item, (*path, index))
                self.text += self.blanks() + ","
            self.text += self.blanks() + "]"
        elif isinstance(value, dict):
            self.text += "{" + self.blank()
            for number, (key, item) in enumerate(value.items()):
                self.text += ("," if number else "") + self.blank()
                self.pair(key, item, path)
            self.text += self.blank() + "}"
        else:
            self.text += self.string(value) if isinstance(value, str) else toml_value(value)

    def pair(self, key: str, value: Any, path: tuple) -> None:
        path = (*path, key)
        self.mark(path)
        self.text += self.key(key)
        while isinstance(value, dict) and len(value) == 1 and self.draw(st.booleans()):
            ((inner, value),) = value.items()  # a dotted key
            path = (*path, inner)
            self.mark(path)
            self.text += self.blank() + "." + self.blank() + self.key(inner)
        self.text += self.blank() + "=" + self.blank()
        self.value(value, path)

    def table(self, table: dict, path: tuple, names: tuple) -> None:
        later = []
        for key, value in table.items():
            tables = isinstance(value, list) and value and all(isinstance(item, dict) for item in value)
            if (isinstance(value, dict) or tables) and self.draw(st.booleans()):
                later.append((key, value))
                continue
            self.text += self.blanks() if not self.text or self.text.endswith("\n") else "\n"
            self.pair(key, value, path)
            self.text += self.draw(st.sampled_from(["\n", " # note\n"]))
        for key, value in later:
            header = ".".join(self.key(name) for name in (*names, key))
            if isinstance(value, dict):
                self.mark((*path, key))
                self.text += f"[{header}]\n"
                self.table(value, (*path, key), (*names, key))
                continue
            for index, item in enumerate(value):
                self.mark((*path, key))
                self.mark((*path, key, index))
                self.text += f"[[{header}]] # one\n"
                self.table(item, (*path, key, index), (*names, key))


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(st.data(), st.dictionaries(KEYS, VALUES, max_size=4))
def test_generated_documents(data: st.DataObject, document: dict):
    writer = Writer(data.draw)
    writer.table(document, (), ())
    assert tomllib.loads(writer.text) == document
    found = scan(writer.text)
    assert found.lines == writer.lines
    assert set(found.lines) == paths(document)


def test_every_character_is_counted_once():
    """From the start for each key, a file of 10,000 tables took minutes."""
    looked_at = []

    class Counted(str):
        def count(self, what, start=0, end=None):
            looked_at.append((len(self) if end is None else end) - start)
            return super().count(what, start, end)

    text = "".join(f'[[environments]]\nname = "{i}"\n' for i in range(100))
    found = scan(Counted(text))
    assert found == scan(text) and found.lines["environments", 99, "name"] == 200
    assert 0 < sum(looked_at) <= len(text)
