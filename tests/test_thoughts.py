from __future__ import annotations

import pytest

from silva.thoughts import (
    FAMILIES,
    FINAL,
    THINK,
    answer_of,
    ends_in_thought,
    hide_tags,
    join_reasoning,
    marks_of,
    show_tags,
    split_reasoning,
    starts_in_thought,
)


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
        ("hm[/THINK]up", True, "hm", "up"),
        ("[THINK]is it </think>?[/THINK]up", False, "is it </think>?", "up"),
        ("so <think>is it [/THINK]", False, "is it [/THINK]", "so"),
        (f"{FINAL}up", False, None, "up"),
    ],
)
def test_split(text, opened, reasoning, content):
    assert split_reasoning(text, opened=opened) == (reasoning, content)
    goes_on = split_reasoning(f"{text}X", opened=opened)[0] or ""
    assert ends_in_thought(text, opened=opened) == goes_on.endswith("X")


@pytest.mark.parametrize("marks", FAMILIES, ids=lambda marks: marks.open)
def test_every_family_s_thoughts_are_found_again(marks):
    written = join_reasoning("hm", "up", marks)
    assert split_reasoning(written) == ("hm", "up") and answer_of(written).strip() == "up"
    assert split_reasoning(join_reasoning(None, "up", marks)) == (None, "up")
    opened, _, closes = written.partition("hm")
    assert ends_in_thought(f"x{opened}") and not ends_in_thought(written) and not ends_in_thought("x")
    assert starts_in_thought(f"hm{closes}") and not starts_in_thought(written)
    hidden = hide_tags(written, [(0, len(written))])
    assert split_reasoning(hidden)[0] is None and show_tags(hidden) == written
    assert marks_of(f"{{{{ '{marks.open}' + message.reasoning_content }}}}") == marks


def test_thoughts_are_written_as_models_are_trained_on_them():
    assert join_reasoning("hm", "up") == "<think>\nhm\n</think>\n\nup"
    assert join_reasoning(None, " up ") == " up " and marks_of("{{ message.content }}") == THINK


@pytest.mark.parametrize(
    ("text", "answer"),
    [("up", "up"), ("hm</think> up ", " up "), ("a</think>b</think>", ""), ("<think>hm", "<think>hm")],
)
def test_an_answer_follows_the_last_thought_that_ends(text, answer):
    assert answer_of(text) == answer
