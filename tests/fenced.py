"""The fenced blocks of pages, and the command lines in them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Block(NamedTuple):
    language: str
    text: str
    line: int


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(match[2], match[3], text.count("\n", 0, match.start()) + 1)
        for match in re.finditer(r"^( *)```(\w*)\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)
    ]


def commands(block: Block) -> list[list[str]]:
    """The words of each command line of a block; none if it shows something else."""
    if block.language not in ("", "bash"):
        return []
    text = re.sub(r"\\\n\s*", "", block.text)
    for name, value in re.findall(r"^([A-Z]+)=(\S+)$", text, re.MULTILINE):
        text = text.replace(f"${name} ", f"{value} ")
    lines = text.splitlines()
    lines = [re.sub(r"^(?:\$|node\d\$) ", "", line) for line in lines]
    return [shlex.split(line, comments=True) for line in lines if STARTS.match(line)]


STARTS = re.compile(r"(?:[A-Z_]+=\S* )*(?:\.venv/bin/)?(?:silva|python|make|pip|torchrun) [^─]*$")
