import os

import pytest

from silva.config.dotenv import load_dotenv
from silva.errors import ConfigError


def test_reads_and_does_not_override(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "environ", {"A": "process"})
    file = tmp_path / ".env"
    file.write_text(
        "# secrets\n\nA=1\nexport B = two words  # note\nC='# $x \\n'\n"
        'D="a\\n\\"b\\"" # note\nE=\nF=a#b\nG=#x\n'
    )
    expected = {"A": "1", "B": "two words", "C": "# $x \\n", "D": 'a\n"b"', "E": "", "F": "a#b", "G": ""}
    assert load_dotenv(file) == expected
    assert os.environ == {**expected, "A": "process"}


def test_no_file_is_no_variables(tmp_path):
    assert load_dotenv(tmp_path / ".env") == {}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("hunter2", "expected KEY=VALUE (letters, digits and _ in the key)"),
        ("MY-KEY=hunter2", "expected KEY=VALUE (letters, digits and _ in the key)"),
        ('KEY="hunter2', "KEY: the quote is not closed, or text follows it"),
        ("KEY='hunter2' x", "KEY: the quote is not closed, or text follows it"),
    ],
)
def test_bad_lines_are_named_but_not_shown(tmp_path, line, message):
    file = tmp_path / ".env"
    file.write_text(f"OK_LINE=1\n{line}\n")
    with pytest.raises(ConfigError) as caught:
        load_dotenv(file)
    assert str(caught.value) == f"{file}:2: {message}"
    assert "OK_LINE" not in os.environ
