"""Text from outside: nothing in it acts, and all of it stays readable."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from silva.tools.quote import defuse, defused, listed, one_line, quoted

HOSTILE = [
    "<|im_start|>system", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "</s>", "<s>", "<bos>",
    "<start_of_turn>model", "<｜begin▁of▁sentence｜>", "<tool_call>", "</tool_call>", "<tool_response>",
    "<think>", "</think>", "<answer>42</answer>", "</result>", "<search>x</search>", "<python>", "[INST]",
    "[/INST]", "<<SYS>>", "[TOOL_CALLS]", "[gMASK]", "<function=f>", "<!-- x -->", "<?xml?>",
    "<\u200btool_call>", "<\u202etool_call>", "<\x00|im_end|>", "<\u00ad/answer>", "<\U000e0041answer>",
    "<\ufeff|eot_id|>",
]  # fmt: skip
ACTS = re.compile(r"<[^\s\d=<>‹-]|\[/?[A-Z][A-Z_]{2,}\]|\[[gs]MASK\]")


@pytest.mark.parametrize("text", HOSTILE)
def test_no_tag_survives(text) -> None:
    shown = defuse(f"before {text} after")
    assert not ACTS.search(shown) and shown.startswith("before ") and shown.endswith(" after")


@pytest.mark.parametrize(
    "text",
    ["a < b", "x<5", "i <= j", "x <- 3", "1 << 4", "a <> b", "a > b -> c", "[1] [x] [Note] [OK]", "日本"],
)
def test_what_is_no_tag_stays(text) -> None:
    assert defuse(text) == text


def test_words_stay_readable() -> None:
    assert defuse("see <answer>\u202e x [INST] y\r\nz\u2028w") == "see ‹answer> x (INST) y\nz\nw"
    assert defused({"<b>": ["<c>", 1, None], "d": ("[INST]",)}) == {"‹b>": ["‹c>", 1, None], "d": ["(INST)"]}


@given(st.text())
def test_any_text_is_tame_valid_and_left_alone_the_second_time(text) -> None:
    shown = defuse(text)
    assert not ACTS.search(shown) and defuse(shown) == shown
    shown.encode()


@given(st.text(), st.integers(1, 50))
def test_no_text_leaves_its_quotation(text, most) -> None:
    lines = listed([("id", text, text)], most).split("\n")
    assert len(lines) == 2 and lines[0].startswith("1. ") and lines[1].startswith("> ")
    assert len(lines[1]) <= most + 5
    for line in quoted(text, 10**6).split("\n"):
        assert line.startswith("> ") or line == ""


def test_results_are_listed() -> None:
    results = [("https://a.org/x", "Title", "one\n\ntwo"), ("17", "", "x" * 30), ("https://b.org", "", "")]
    assert listed(results, 10) == (
        "1. Title (https://a.org/x)\n> one two\n\n2. 17\n> xxxxxxxxxx...\n\n3. https://b.org\n> "
    )


def test_lengths_are_limited_and_said() -> None:
    assert one_line("a b\tc\n d", 5) == "a b c..." and one_line("abc", 3) == "abc"
    assert quoted("one\n\ntwo", 100) == "> one\n> two"
    assert quoted("one\ntwo", 5) == "> one\n[cut: 5 of 11 characters shown]"
