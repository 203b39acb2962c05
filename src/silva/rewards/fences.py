"""Finds the code in a reply: blocks between fences of Markdown, as models write them.

Fences are paired line by line. A block of Python ends at the first closing fence where it is valid Python, so
that a docstring may hold fences; if it never is, at the first one. What is never closed ends with the reply.
"""

from __future__ import annotations

import ast
import itertools
import re
import warnings
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_OPENING = re.compile(r"(?P<before>(?:(?!```|~~~).)*)(?P<fence>`{3,}|~{3,})(?P<info>[^`]*)")
_PYTHON = re.compile(r"\{?\.?(?:python|pypy|py)[\d.]*(?![\w-])", re.IGNORECASE)
_WRAPPER = re.compile(r"(?:markdown|md)\b", re.IGNORECASE)  # holds blocks, and is not one itself
_MARKERS = " \t>*+-.0123456789)"  # of lists and quotes
_TRIES = 200  # ends of blocks that are tried in a reply: each costs a parse


class Block(NamedTuple):
    tag: str
    text: str


class BlockEnd(NamedTuple):
    """Of a block: the line, what of it is still the block's, and the line to go on with."""

    line: int
    rest: str
    following: int


def find_code(reply: str, function: str = "") -> str | None:
    """The code of a reply, or None: the last block of Python, else the last untagged one that is code, else
    the whole reply, if it is Python. With a function, a block that defines it goes before others.
    """
    reply = reply.replace("\r\n", "\n")
    if reply.strip() and _parsed(reply) is not None:
        return reply
    blocks = list(_blocks(reply.split("\n")))
    found = [block.text for block in blocks if _PYTHON.match(block.tag)]
    untagged = [block.text for block in blocks if not block.tag]
    found = found or [text for text in untagged if _does_something(text)] or untagged
    defines = re.compile(
        rf"^\s*(?:async\s+)?def\s+{re.escape(function)}\b|^{re.escape(function)}\s*=", re.MULTILINE
    )
    defining = [text for text in found if function and defines.search(text)]
    return next(reversed(defining or found), None)


def _blocks(lines: Sequence[str]) -> Iterator[Block]:
    number, tries = 0, iter(range(_TRIES))
    while number < len(lines):
        number += 1
        opening = _opening(lines[number - 1])
        if opening is None or _WRAPPER.match(tag := opening["info"].strip()):
            continue
        ends = _ends(lines, number, opening["fence"])
        blocks = ((Block(tag, _text(lines[number : end.line], end.rest)), end.following) for end in ends)
        block, following = first = next(blocks)
        if not tag or _PYTHON.match(tag):
            tried = (each for each, _ in zip(itertools.chain([first], blocks), tries, strict=False))
            block, following = next((each for each in tried if _parsed(each[0].text) is not None), first)
        yield block
        number = following


def _opening(line: str) -> re.Match[str] | None:
    """A fence that opens a block; behind words only if a single word follows, or Python."""
    found = _OPENING.fullmatch(line.rstrip())
    tag = found["info"].strip() if found else ""
    if found and found["before"].strip(_MARKERS) and len(tag.split()) > 1 and not _PYTHON.match(tag):
        return None
    return found


def _ends(lines: Sequence[str], start: int, fence: str) -> Iterator[BlockEnd]:
    """Where a block may end."""
    for number in range(start, len(lines)):
        line = lines[number].rstrip()
        rest = line.rstrip(fence[0])
        if len(line) - len(rest) >= len(fence) and not rest.lstrip().startswith("#"):
            yield BlockEnd(number, rest if rest.strip(" \t>") else "", number + 1)
        elif (opening := _opening(line)) and _PYTHON.match(opening["info"].strip()):
            yield BlockEnd(number, "", number)  # the fence that closes it is missing
    yield BlockEnd(len(lines), "", len(lines))


def _text(lines: Sequence[str], rest: str) -> str:
    """Without the marks of a quotation, and the indentation of its first line: no program begins with any."""
    held = [line for line in (*lines, rest) if line.strip()]
    if held and all(line.lstrip().startswith(">") for line in held):
        lines = [re.sub(r"^\s*> ?", "", line) for line in lines]
        held = [line for line in lines if line.strip()]
    depth = len(held[0]) - len(held[0].lstrip(" \t")) if held else 0
    cut = (
        line[min(depth, len(line) - len(line.lstrip(" \t"))) :]
        for line in (*lines, *([rest] if rest else []))
    )
    return "".join(f"{line}\n" for line in cut)


def _parsed(text: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings(action="ignore"):
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _does_something(text: str) -> bool:
    """Whether it is more than values: output beside the code is often valid Python too, as is `7`."""
    tree = _parsed(text)
    return tree is not None and any(
        not isinstance(each, ast.Expr) or any(isinstance(part, ast.Call) for part in ast.walk(each))
        for each in tree.body
    )
