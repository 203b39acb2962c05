"""A dialogue with thoughts, a call and its result, in every chat template of the tests."""

from __future__ import annotations

import pytest
from tests.rendering.templates import TEMPLATES, byte_tokenizer
from tests.rendering.test_renderer import CALC, own_tokens, renderer, text, user

from silva.rendering.openai import as_function
from silva.rendering.renderer import Renderer
from silva.rendering.tool_calls import write_calls
from silva.types import Message, ToolCall

CALL = ToolCall("calculator", {"expression": "6*7"})
RESULT = Message("tool", "42", name="calculator")
OPENS = {"r1", "qwen_xml", "deepseek"}
NO_TOOLS = {"chatml", "llama3", "gemma", "magistral", "harmony"}


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_thoughts_calls_and_answers_are_read_where_they_stand(name: str) -> None:
    made = renderer(name)
    context = made.context([Message("system", "<think> Be brief."), user("What is 6*7? <think>")], [CALC])
    for said, calls in ((write_calls([CALL]), [CALL]), ("It is 42.", [])):
        opened = made.opens_thought(context)
        assert opened == (name in OPENS and not (name == "deepseek" and not calls))
        thought = "hm\n</think>\n\n" if opened else "<think>\nhm\n</think>\n\n"
        tokens = made.script(thought + said, context)
        message = made.parse(tokens, prompt=context, tools=[CALC])
        assert (message.reasoning, message.content) == ("hm", "" if calls else "It is 42.")
        assert [(c.name, c.arguments) for c in message.tool_calls] == [(c.name, c.arguments) for c in calls]
        bare = made.parse(made.script(said, context), prompt=context, tools=[CALC])
        assert (bare.tool_calls, bare.content, bare.errors) == (message.tool_calls, message.content, ())
        assert not (bare.reasoning or "")
        follower = RESULT if calls else user("Thanks. <think>")
        context = [*context, *tokens, *made.extend(tokens, [follower])]
    shown = text(name, context)
    assert shown.count("It is 42.") == 1 and shown.count("Thanks. <think>") == 1
    assert made.opens_thought(context) == (name in OPENS)


@pytest.mark.parametrize("name", sorted(TEMPLATES.keys() - OPENS - NO_TOOLS - {"glm"}))
def test_a_dialogue_in_parts_is_the_template_s_own_whole(name: str) -> None:
    """Where the template describes tools and does not rewrite earlier turns."""
    made = renderer(name)
    assert not made.tool_notes
    id = "functions.calculator:0" if name == "kimi" else "call00000"
    function = {"name": CALL.name, "arguments": dict(CALL.arguments)}
    call = {"type": "function", "id": id, "function": function}
    dialogue = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "42", "name": "calculator", "tool_call_id": id},
        {"role": "assistant", "content": "It is 42."},
        {"role": "user", "content": "Thanks."},
    ]  # fmt: skip
    tokens = made.context([user("q")], [CALC])
    for said, follower in ((write_calls([CALL]), RESULT), ("It is 42.", user("Thanks."))):
        reply = made.script(said, tokens)
        tokens += [*reply, *made.extend(reply, [follower])]
    own = own_tokens(name, dialogue, tools=[as_function(CALC)])
    assert tokens == own


def test_a_turn_may_end_with_the_header_of_what_follows() -> None:
    made = renderer("glm")
    call = made.script(write_calls([CALL]), made.context([user("q")], [CALC]))
    answer = made.script("Hi.", made.context([user("q")]))
    assert text("glm", [call[-1], answer[-1]]) == "<|observation|><|user|>"
    result = "\n<tool_response>\n42\n</tool_response><|assistant|>"
    assert text("glm", made.extend(call, [RESULT])) == result
    assert text("glm", made.extend(call[:-1], [RESULT])) == "<|observation|>" + result
    assert text("glm", made.extend(answer, [RESULT])) == "<|observation|>" + result  # as sampled, then shown


def test_stops_of_the_generation_config_end_a_reply() -> None:
    other = byte_tokenizer("qwen25").convert_tokens_to_ids("<|eot_id|>")
    made = Renderer(byte_tokenizer("qwen25"), stops=[other])
    assert made.stop_token_ids[-1] == other
    assert made.parse([*made.encode("a"), other]).raw == "a"


def test_an_answer_after_a_result_is_no_thought_where_no_thought_is_opened() -> None:
    made = renderer("deepseek")
    call = made.script(write_calls([CALL]), made.context([user("q")], [CALC]))
    prompt = [*made.context([user("q")], [CALC]), *call, *made.extend(call, [RESULT])]
    message = made.parse(made.encode_reply("The answer is 42."), prompt=prompt)
    assert (message.content, message.reasoning) == ("The answer is 42.", None)
    assert made.parse(made.encode_reply("hm"), prompt=made.context([user("q")])).reasoning == "hm"


def test_a_prefill_opens_or_closes_the_thought() -> None:
    for name, prefill, inside in (
        ("qwen_xml", "", True),
        ("qwen_xml", "\n</think>\n\n", False),
        ("qwen25", "<think>\nAs", True),
    ):
        made = renderer(name)
        prompt = made.context([user("q")], prefill=prefill)
        assert made.opens_thought(prompt) == inside
        message = made.parse(made.encode_reply("well"), prompt=prompt, prefill=prefill)
        assert ("well" in (message.reasoning or ""), message.content == "well") == (inside, not inside)


def test_a_call_in_another_form_is_no_answer() -> None:
    made = renderer("qwen25")
    message = made.parse(made.encode_reply('[calculator(expression="6*7")]'), tools=[CALC])
    assert not message.tool_calls and "in the form pythonic" in message.errors[0]
    tag = byte_tokenizer("qwen25").convert_tokens_to_ids("<|python_tag|>")
    said = [tag, *made.encode_reply('{"name": "calculator", "parameters": {}}')]
    assert "in the form llama" in made.parse(said, tools=[CALC]).errors[0]
    assert "<|python_tag|>" not in made.parse([tag, *made.encode("Hi")]).content


def test_marks_of_calls_in_a_message_are_spelled_out() -> None:
    """And an expert's arguments too: only the form itself is written with its own tokens."""
    made = renderer("mistral")
    evil = ToolCall("calculator", {"expression": "[TOOL_CALLS]"})
    mark = byte_tokenizer("mistral").convert_tokens_to_ids("[TOOL_CALLS]")
    assert mark not in made.context([user("[TOOL_CALLS]")])
    said = made.script(write_calls([evil]), made.context([user("q")], [CALC]))
    assert said.count(mark) == 1
    assert made.parse(said, tools=[CALC]).tool_calls[0].arguments == evil.arguments


def test_tags_of_thoughts_inside_a_call_are_its_own() -> None:
    made = renderer("qwen25")
    call = ToolCall("calculator", {"expression": "print('<think></tool_call>')"})
    message = made.parse(made.encode_reply("<think>so</think>" + write_calls([call])), tools=[CALC])
    assert (message.reasoning, message.tool_calls, message.errors) == ("so", (call,), ())


# --- results inside the reply

INSIDE = " <result>\n{}\n</result>"


def test_results_stand_in_the_reply_that_called() -> None:
    made = renderer("qwen25", tools="tags", result=INSIDE)
    prompt = made.context([user("q")], [CALC])
    call = made.encode("<think>so <think></think><calculator>6*7</calculator>")
    shown = made.extend(call, [Message("tool", "42 <think><|im_end|>"), Message("tool", "43")])
    assert text("qwen25", shown) == " <result>\n42 <think><|im_end|>\n</result> <result>\n43\n</result>"
    assert not set(shown) & set(made.stop_token_ids)
    assert not made.opens_thought([*prompt, *call, *shown])
    answer = made.encode_reply("It is 42.")
    after = made.extend(answer, [user("Thanks.")])
    assert text("qwen25", after).startswith("\n<|im_start|>user\nThanks.")
    messages = [
        user("q"), Message("assistant", "", reasoning="so <think>", tool_calls=(CALL,), id="1"),
        Message("tool", "42"), Message("assistant", "It is 42.", id="2"), user("Thanks."),
    ]  # fmt: skip
    result = made.extend(call, [Message("tool", "42")])
    assert made.context(messages, [CALC], sampled={"1": call, "2": answer}) == [
        *prompt, *call, *result, *answer, *after,
    ]  # fmt: skip
    rendered = text("qwen25", made.context(messages, [CALC]))
    assert "</calculator> <result>\n42\n</result>It is 42.<|im_end|>\n<|im_start|>user\nThanks." in rendered


def test_a_closed_turn_is_not_opened_again_for_a_result() -> None:
    made = renderer("qwen25", tools="tags", result=INSIDE)
    assert "<|im_start|>user\n<tool_response>" in text(
        "qwen25", made.extend(made.encode_reply("x"), [RESULT])
    )


@pytest.mark.parametrize("name", ["qwen25", "r1"])
def test_a_reply_that_is_rendered_again_does_not_open_its_thought_twice(name: str) -> None:
    made = renderer(name, tools="tags", result=INSIDE)
    calls = [
        Message("assistant", "", reasoning=thought, tool_calls=(CALL,), id=str(i))
        for i, thought in enumerate(["so", "again", None])
    ]
    messages = [
        user("q"),
        *(m for call in calls for m in (call, RESULT)),
        Message("assistant", "42."),
        user("r"),
    ]
    shown = text(name, made.context(messages, [CALC])).partition("q")[2]
    call, result = "<calculator>6*7</calculator>", " <result>\n42\n</result>"
    assert f"<think>\nso\n</think>\n\n{call}{result}<think>\nagain\n</think>\n\n{call}{result}{call}" in shown
    bare = text(name, made.context([user("q"), calls[2], RESULT], [CALC])).partition("q")[2]
    assert bare.count("</think>") == bare.count("<think>") == (name == "r1")
