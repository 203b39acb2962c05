from __future__ import annotations

import pytest

from silva.thoughts import answer_of, ends_in_thought, join_reasoning, split_reasoning


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "content"),
    [
        (" plain ", False, None, " plain "),
        ("<think>\nhm\n</think>\n\nup\n", False, "hm", "up"),
        ("<think></think>up", False, "", "up"),
        ("<think>hm", False, "hm", ""),
        ("so <think>hm", False, "hm", "so"),
        ("  so <think>hm</think> up ", False, "hm", "  so  up"),
        (" \n<think>hm</think> up ", False, "hm", "up"),
        ("<think>a</think>b<think>c</think>d", False, "a\nc", "bd"),
        ("hm</think>up", True, "hm", "up"),
        ("hm", True, "hm", ""),
        ("<think>hm</think>up", True, "hm", "up"),
        ("", True, "", ""),
        ("a</think>b", False, None, "a</think>b"),
    ],
)
def test_split(text, opened, reasoning, content):
    assert split_reasoning(text, opened=opened) == (reasoning, content)


def test_join_is_the_inverse():
    assert join_reasoning("hm", "up") == "<think>\nhm\n</think>\n\nup"
    assert join_reasoning(None, " up ") == " up "
    assert split_reasoning(join_reasoning("hm", "up")) == ("hm", "up")


def test_ends_in_thought():
    assert ends_in_thought("<|Assistant|><think>\n")
    assert not ends_in_thought("<think>\n\n</think>\n\n")
    assert not ends_in_thought("")


@pytest.mark.parametrize(
    ("text", "answer"),
    [("up", "up"), ("hm</think> up ", " up "), ("a</think>b</think>", ""), ("<think>hm", "<think>hm")],
)
def test_an_answer_follows_the_last_thought_that_ends(text, answer):
    assert answer_of(text) == answer
