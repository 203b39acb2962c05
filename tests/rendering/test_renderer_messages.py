"""System message, tools, and replies taken apart."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.rendering.test_renderer import CALC, renderer, reply, text, user

from silva.rendering.tool_calls import write_calls
from silva.types import Message, ToolCall

# --- system message and tools


def test_default_system_message_stays_unless_one_is_given():
    start = "<|im_start|>system\n"
    configured = renderer("chatml", system="Mine.")
    assert text("chatml", renderer("chatml").context([user("a")])).startswith(
        start + "You are Smol.<|im_end|>"
    )
    assert text("chatml", configured.context([user("a")])).startswith(start + "Mine.<|im_end|>")
    given = configured.context([Message("system", "Theirs."), user("a")])
    assert text("chatml", given).startswith(start + "Theirs.<|im_end|>")


def test_tools_are_described_by_us_where_the_template_does_not():
    shown = text("chatml", renderer("chatml").context([user("a")], [CALC]))
    assert shown.startswith("<|im_start|>system\nYou are Smol.\n\nYou can call these tools")
    schema = json.loads(shown.split("<tools>\n")[1].split("\n</tools>")[0])
    assert schema["function"] == {
        "name": CALC.name,
        "description": CALC.description,
        "parameters": CALC.parameters,
    }
    native = text("qwen25", renderer("qwen25").context([user("a")], [CALC]))
    assert native.startswith("<|im_start|>system\nYou are Qwen.\n\n# Tools\n<tools>\n")
    asked = text("llama31", renderer("llama31", tools="hermes").context([user("a")], [CALC]))
    assert "You can call these tools" in asked and "<tool_call>" in asked


def test_plain_tags():
    made = renderer("qwen25", tools="tags")
    shown = text("qwen25", made.context([user("a")], [CALC]))
    assert "- <calculator>expression</calculator>: Evaluates arithmetic." in shown and "# Tools" not in shown
    assert made.stop_strings([CALC]) == ("</calculator>",)
    assert renderer("qwen25").stop_strings([CALC]) == ()
    said = made.encode("Let me see.\n<calculator>1+1</calculator> and")
    message = made.parse(said, stop=made.stop_strings([CALC]), tools=[CALC])
    assert message == reply(
        "Let me see.",
        tool_calls=(ToolCall("calculator", {"expression": "1+1"}),),
        raw="Let me see.\n<calculator>1+1</calculator>",
    )


def test_a_plain_tag_inside_a_thought_stops_nothing():
    """Also if the prompt opened the thought, whose mark is not in the reply then."""
    for name, begins in (("r1", ""), ("chatml", "<think>")):
        made = renderer(name, tools="tags")
        prompt = made.context([user("a")], [CALC])
        said = begins + "I could <calculator>1</calculator>"
        assert made.thinks_on(prompt, made.encode(said), (), [CALC])
        assert not made.thinks_on(prompt, made.encode(f"{said}</think>"), (), [CALC])
        message = made.parse(made.encode(f"{said} or not</think>2"), prompt=prompt, tools=[CALC])
        assert (message.content, message.tool_calls) == ("2", ())


def test_tool_results_reach_the_model():
    last = renderer("qwen25").encode_reply("x")
    results = [Message("tool", "2", name="calculator"), Message("tool", "3")]
    wrapped = "<|im_start|>user\n<tool_response>\n2\n</tool_response>\n<tool_response>\n3\n</tool_response>"
    for name in ("chatml", "qwen25", "qwen3"):
        assert f"{wrapped}<|im_end|>\n" in text(name, renderer(name).extend(last, results))
    own_role = text("llama31", renderer("llama31").extend([], [Message("tool", 'a "b"\n')]))
    assert '<|start_header_id|>ipython<|end_header_id|>\n\n"a \\"b\\"\\n"<|eot_id|>' in own_role


def test_calls_of_replies_rendered_as_text():
    call = reply("See.", tool_calls=(ToolCall("calculator", {"expression": "é"}),))
    expected = (
        'See.\n<tool_call>\n{"name": "calculator", "arguments": {"expression": "é"}}\n</tool_call><|im_end|>'
    )
    for name in ("chatml", "qwen25", "qwen3"):
        assert expected in text(name, renderer(name).context([user("a"), call, Message("tool", "b")], [CALC]))


def test_a_malformed_reply_is_rendered_as_it_was_unless_edited():
    made = renderer("chatml")
    bad = made.parse(made.encode("Hm <tool_call>{]</tool_call>"))
    assert "Hm <tool_call>{]</tool_call><|im_end|>" in text(
        "chatml", made.context([user("a"), bad, user("b")])
    )
    edited = dataclasses.replace(bad, content="...")
    assert "assistant\n...<|im_end|>" in text("chatml", made.context([user("a"), edited, user("b")]))


# --- parsing


def test_parse_takes_a_reply_apart():
    made = renderer("qwen3")
    call = ToolCall("calculator", {"expression": "1"})
    said = "<think>\nadd\n</think>\n\nSure.\n" + write_calls([call])
    message = made.parse(made.encode_reply(said))
    assert message == reply("Sure.", reasoning="add", tool_calls=(call,), raw=said)


def test_parse_knows_thoughts_opened_by_template_or_prefill():
    by_template, by_prefill = renderer("r1"), renderer("chatml")
    for made, prefill in ((by_template, ""), (by_prefill, "<think>\n")):
        whole = made.parse(made.encode_reply("hm\n</think>\n\nup"), prefill=prefill)
        assert (whole.reasoning, whole.content, whole.raw) == ("hm", "up", "hm\n</think>\n\nup")
        cut = made.parse(made.encode("hm, well"), prefill=prefill)
        assert (cut.reasoning, cut.content) == ("hm, well", "")
    assert (
        by_prefill.parse(by_prefill.encode("up</answer>"), prefill="<answer>").content
        == "<answer>up</answer>"
    )


def test_parse_trims_the_text_only():
    made = renderer("chatml")
    end, eos = made.stop_token_ids
    tokens = [*made.encode("a"), end, *made.encode("b</x>c"), eos]
    message = made.parse(tokens, stop=("</y>", "</x>"))
    assert (message.content, message.raw) == ("ab</x>", "a<|im_end|>b</x>")
    assert made.parse(made.encode(" a ")).content == " a "


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 400) | st.sampled_from([-1, 2**40]), max_size=30),
    raw=st.binary(max_size=30),
    tags=st.booleans(),
)
def test_parse_never_raises(tokens, raw, tags):
    made = renderer("chatml", tools="tags" if tags else "auto")
    for sampled in (tokens, made.encode(raw.decode("utf-8", "replace"))):
        message = made.parse(sampled, stop=("</a>",), tools=[CALC])
        assert message.role == "assistant" and "<|im_end|>" not in message.content
        message.content.encode()  # valid text, whatever the bytes were
        assert made.context([user("a"), message, Message("tool", "b") if message.errors else user("b")])
