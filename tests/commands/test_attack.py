"""What `silva attack` takes, and what it shows of what it found."""

from pathlib import Path

import pytest

from silva.cli import main
from silva.commands.attack import LISTED, CheatResult, Report, show

QA = """
from silva.environments.bases.tool_qa import Question, ToolQA


class Towns(ToolQA):
    def questions(self):
        return [Question("How many?", "7")]

    def tools(self):
        return []

    def grade(self, reply, answer):
        if not reply:
            raise ValueError("nothing to grade")
        return answer in reply
"""
REWARD = """
def broken(reply, answer):
    if not reply:
        return [][0]
    return float(answer == reply)
"""


@pytest.mark.slow
def test_the_grade_of_a_tool_environment_is_attacked(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("towns.py").write_text(QA)
    Path("a.toml").write_text('environments = [{type = "towns.py:Towns", eval_share = 0.5}]')
    assert main(["attack", "@", "a.toml"]) == 1
    shown = capsys.readouterr().out
    assert "replies cheat it" in shown and "lists: " in shown
    assert "grade raised ValueError: nothing to grade (towns.py:14)" in shown


@pytest.mark.slow
def test_a_reward_that_raises_is_reported_with_its_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(REWARD)
    assert main(["attack", "mine.py:broken"]) in (0, 1)
    assert "raised IndexError: list index out of range (mine.py:4)" in capsys.readouterr().out


def test_every_kind_of_cheat_is_among_the_examples():
    kinds = [CheatResult(name, "", holes=[f"{name}{i}" for i in range(30)]) for name in "abc"]
    lines = show(Report(1, 1.0, kinds, [])).splitlines()
    start = lines.index("worth a solution:") + 1
    assert lines[start : start + 4] == ["  a: a0", "  b: b0", "  c: c0", "  a: a1"]
    assert lines[start + LISTED] == f"  ... and {90 - LISTED} more"
