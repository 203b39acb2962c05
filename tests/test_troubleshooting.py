"""docs/troubleshooting.md: each message that it explains stands in the source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.fenced import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
QUOTED = re.findall(r"^\*\*`(.+)`\*\*$", PAGE, re.MULTILINE)


def texts(path: Path) -> Iterator[str]:
    """What the strings of a file say, with a blank for what is filled in."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else " " for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_every_message_stands_in_the_source() -> None:
    source = "\n".join(
        " ".join(text.split()) for path in (ROOT / "src").rglob("*.py") for text in texts(path)
    )
    parts = {message: [re.escape(part.strip()) for part in message.split("...")] for message in QUOTED}
    wrong = [message for message, found in parts.items() if not re.search(".*".join(found), source)]
    assert len(QUOTED) >= 30 and wrong == []
