"""Text of models, rows and servers is shown by a terminal, and never controls it."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from silva import cli
from silva.commands import doctor
from silva.commands.command import Given
from silva.errors import ConfigError
from silva.monitoring.printable import guard_logs, printable, put

OWNED = "\x1b]0;owned\x07\x1b[2J\x9b2J\x08\r\u202e"
SHOWN = "\ufffd]0;owned\ufffd\ufffd[2J\ufffd2J\ufffd\ufffd\ufffd"


def test_control_characters_are_replaced_and_lines_and_letters_stay() -> None:
    assert printable("a\x00b\rc\td\ne") == "a\ufffdb\ufffdc    d\ne"
    assert printable(OWNED) == SHOWN and printable("żółw ✓ 漢 🐢") == "żółw ✓ 漢 🐢"


def test_both_streams_show_them_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    put(OWNED)
    put(ConfigError(OWNED), error=True)
    put()
    assert capsys.readouterr() == (f"{SHOWN}\n\n", f"{SHOWN}\n")


def test_a_row_does_nothing_to_the_terminal_of_a_player(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [json.dumps({"question": f"{OWNED} {n}?", "answer": "7"}) for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    monkeypatch.setattr("builtins.input", lambda prompt: "/quit")
    cli.main(
        ["envs", "play", "dataset", "--path", str(tmp_path / "rows.jsonl"), "--reward.type", "exact_match"]
    )
    out, errors = capsys.readouterr()
    assert SHOWN in out and not errors and out.isascii() is False and "\x1b" not in out and "\r" not in out


def test_an_error_that_tells_a_foreign_text_does_nothing_either(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(given: Given) -> int:
        raise ConfigError(OWNED)

    monkeypatch.setattr(doctor, "run", fails)
    assert cli.main(["doctor"]) == ConfigError.exit_code
    assert capsys.readouterr().err == f"silva: {SHOWN}\n"


def test_logged_warnings_are_printable() -> None:
    guard_logs()
    try:
        raise ValueError(OWNED)
    except ValueError as error:
        info = (type(error), error, error.__traceback__)
    record = logging.LogRecord("silva", logging.WARNING, "", 1, "got %s", (OWNED,), info)
    assert logging.lastResort is not None
    text = logging.lastResort.format(record)
    assert text.startswith(f"got {SHOWN}\nTraceback") and text.endswith(f"ValueError: {SHOWN}")
