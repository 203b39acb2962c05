from __future__ import annotations

import pytest

from silva.errors import one_line, shorten


@pytest.mark.parametrize(
    ("text", "short", "line"),
    [("", "", ""), ("12345678", "12345678", "12345678"), ("123456789", "12345...", "12345..."),
     ("12\n  3456", "12\n  ...", "12 3456")],
)  # fmt: skip
def test_a_text_in_a_message_is_no_longer_than_asked(text: str, short: str, line: str) -> None:
    assert (shorten(text, 8), one_line(text, 8)) == (short, line)
