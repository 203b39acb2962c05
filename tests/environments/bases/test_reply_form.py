from __future__ import annotations

import pytest

from silva.environments.bases.reply_form import ReplyForm
from silva.types import Message

STRICT = ReplyForm(strict=True)


def read(form: ReplyForm, text: str, reasoning: str | None = None) -> str | None:
    return form.read(Message("assistant", text, reasoning=reasoning))


def test_what_is_asked_for_is_what_is_said() -> None:
    assert ReplyForm().ask("look") == (
        "Reply in this form: <think>your thoughts</think><answer>look</answer>"
    )
    assert ReplyForm(tags=False, think=False).ask("D", "Reply with one command") == (
        "Reply with one command in this form: D"
    )
    assert ReplyForm().say("D", "Down") == "<think>Next: Down.</think><answer>D</answer>"
    assert ReplyForm(begun=True).say("D") == "Next: D.</think><answer>D</answer>"
    assert ReplyForm(think=False, begun=True).say("D") == "D</answer>"


def test_strict_replies_hold_the_format_and_nothing_else() -> None:
    assert read(STRICT, "<think>I go</think><answer>Right||Left</answer>\n") == "Right||Left"
    assert read(STRICT, "<answer>Right</answer>", reasoning="I go") == "Right"
    for text in (
        "<answer>Right</answer>",
        "<think>a</think><answer>Right",
        "<think>a</think>Right",
        "Well: <think>a</think><answer>Right</answer>",
        "<think>a</think><answer>Right</answer> Done.",
        "<think>a</think><answer>Left</answer><answer>Right</answer>",
    ):
        assert read(STRICT, text) is None
    bare = ReplyForm(think=False, tags=False, strict=True)
    assert read(bare, "R||R") == "R||R"
    assert read(bare, "<answer>R</answer>") is None


@pytest.mark.parametrize("form", [STRICT, ReplyForm(think=False, strict=True)])
def test_the_prefill_begins_the_reply_whether_or_not_the_text_repeats_it(form: ReplyForm) -> None:
    begun = ReplyForm(form.think, begun=True, strict=True)
    assert read(begun, begun.say("Right")) == read(begun, form.say("Right")) == "Right"
