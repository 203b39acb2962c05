"""Messages for a chat API and back: each call has its result, malformed calls become errors."""

from __future__ import annotations

import json

import pytest
from tests.engines.chat_server import called, said

from silva.actors.chat_messages import chat_messages, most_tokens, read_answer
from silva.rendering.tool_calls import parse_hermes
from silva.types import Message, ToolCall, ToolSpec
from silva.wire.requests import Usage

ADD = ToolSpec("add", "adds", {"type": "object", "properties": {"a": {"type": "integer"}}})
COUNTS = {"prompt_tokens": 10, "completion_tokens": 4}
NOW = ToolSpec("now", "the time", {"type": "object", "properties": {}})


def read(**parts):
    return read_answer(json.dumps(said(**parts)), (ADD, NOW))[:3]


def test_a_dialogue_with_calls_and_results() -> None:
    calls = (ToolCall("add", {"a": 1}, "x1"), ToolCall("now", {}))
    messages = [
        Message("user", "go"),
        Message("assistant", "", tool_calls=calls, reasoning="hm"),
        Message("tool", "noon", name="now"),
        Message("tool", "2", name="add"),
        Message("user", "on"),
        Message("assistant", "done", reasoning="hm"),
    ]
    assert chat_messages(messages, "Be brief.") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "x1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
            {"id": "call_1_1", "type": "function", "function": {"name": "now", "arguments": "{}"}},
        ]},
        {"role": "tool", "tool_call_id": "call_1_1", "content": "noon"},
        {"role": "tool", "tool_call_id": "x1", "content": "2"},
        {"role": "user", "content": "on"},
        {"role": "assistant", "content": "done"},
    ]  # fmt: skip
    given = [Message("system", "Other."), *messages[:1]]
    assert chat_messages(given, "Be brief.")[0] == {"role": "system", "content": "Other."}


def test_what_has_no_partner_is_sent_so_that_the_api_takes_it() -> None:
    """A call without a result; a result without a call; an answer with a malformed call."""
    call = ToolCall("add", {"a": 1}, "x1")
    messages = [
        Message("assistant", "", tool_calls=(call,)),
        Message("user", "on"),
        Message("assistant", "so", tool_calls=(call,), raw="<think>hm</think>so\nRAW", errors=("bad",)),
        Message("tool", "Error: bad"),
        Message("tool", "2", name="add"),
    ]
    sent = chat_messages(messages)
    assert sent[1:] == [
        {"role": "tool", "tool_call_id": "x1", "content": "(no result)"},
        {"role": "user", "content": "on"},
        {"role": "assistant", "content": "so\nRAW"},
        {"role": "user", "content": "Error: bad"},
        {"role": "user", "content": "2"},
    ]


def test_an_answer_is_the_message_that_the_same_text_is() -> None:
    text = "<think>First.</think><answer>Up</answer>"
    message, finish, usage = read(content=text, finish="length", usage=(30, 7))
    assert (message.reasoning, message.content, message.raw) == ("First.", "<answer>Up</answer>", text)
    assert (finish, usage) == ("length", Usage(30, 7))
    apart, _, _ = read(content="Up", reasoning_content="First.", usage=None)
    assert (apart.reasoning, apart.content, apart.raw) == ("First.", "Up", "<think>\nFirst.\n</think>\n\nUp")
    assert read(content=None, refusal="No.")[0].content == "No."
    assert read(content=None)[0] == Message("assistant", "", raw="")


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (None, None),
        ({}, None),
        ({"prompt_tokens": None, "completion_tokens": 4}, None),
        ({"prompt_tokens": 1, "completion_tokens": -1}, None),
        (COUNTS | {"prompt_tokens_details": {"cached_tokens": 8}}, Usage(10, 4, 8)),
        (COUNTS | {"prompt_tokens_details": {"cached_tokens": None}}, Usage(10, 4)),
    ],
)
def test_a_usage_is_read_or_left_out(usage: object, expected: Usage | None) -> None:
    answer = read_answer(json.dumps(said(usage=None) | {"usage": usage}))
    assert answer == (Message("assistant", "yes", raw="yes"), "stop", expected, "")


def test_forms_that_some_servers_give() -> None:
    """Text in parts, thoughts in an object."""
    body = said(content=[{"type": "text", "text": "Up"}, {"type": "text", "text": "!"}], reasoning={"a": 1})
    message = read_answer(json.dumps(body)).message
    assert (message.content, message.reasoning) == ("Up!", None)


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_thoughts_go_back_with_their_calls_in_the_field_they_came_in(field: str) -> None:
    body = said(content=None, tool_calls=called(("now", "{}")), **{field: "First, the time."})
    answer = read_answer(json.dumps(body), (NOW,))
    assert answer.thoughts_in == field
    later = Message("assistant", "noon", reasoning="Easy.")
    dialogue = [Message("user", "go"), answer.message, Message("tool", "noon", name="now"), later]
    sent = chat_messages(dialogue, thoughts_in=answer.thoughts_in)
    assert sent[1][field] == "First, the time." and field not in sent[3]
    assert field not in chat_messages(dialogue)[1]


def test_calls_become_calls() -> None:
    calls = called(("add", '{"a": 1}'), ("now", ""), ("add", {"a": 2}), ("now", None))
    message, _, _ = read(content="Look.", tool_calls=calls)
    assert message.tool_calls == (
        ToolCall("add", {"a": 1}, "id0"), ToolCall("now", {}, "id1"), ToolCall("add", {"a": 2}, "id2"),
        ToolCall("now", {}, "id3"),
    )  # fmt: skip
    assert (message.content, message.errors) == ("Look.", ())
    assert message.raw.startswith(
        'Look.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
    )


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (
            '{"a": ',
            'tool call 1: not valid JSON (Expecting value: line 1 column 7 (char 6)); expected {"name"',
        ),
        ("[1]", 'tool call 1: "arguments" of add: got array, expected an object {"name"'),
        ('{"a": NaN}', "tool call 1: not valid JSON (NaN is no JSON number)"),
        ("", 'tool call 1: "arguments" of add are missing; expected {"name"'),
        (None, 'tool call 1: "arguments" of add are missing; expected {"name"'),
    ],
)
def test_malformed_arguments_are_errors_of_the_message(arguments, error: str) -> None:
    message, _, _ = read(content=None, tool_calls=called(("add", arguments), ("add", '{"a": 1}')))
    assert message.errors[0].startswith(error) and len(message.errors) == 1
    assert message.tool_calls == (ToolCall("add", {"a": 1}, "id1"),)
    assert message.raw.count("<tool_call>") == 2


def test_errors_are_those_of_local_text() -> None:
    """Where a call as text can have the same fault at all."""
    message, _, _ = read(content=None, tool_calls=called(("add", "[1]"), ("", "{}")))
    text = "\n".join(
        f"<tool_call>{body}</tool_call>"
        for body in ('{"name": "add", "arguments": [1]}', '{"name": "", "arguments": {}}')
    )
    assert message.errors == parse_hermes(text).errors


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("{", "Invalid JSON"),
        ("[]", "should be an object"),
        ('{"choices": []}', "choices: List should have at least 1 item"),
        ('{"choices": [{"message": null}]}', "choices.0.message"),
        ('{"choices": [{"message": {"content": 7}}]}', "choices.0.message.content"),
        ('{"error": {"message": "oops"}}', "choices: Field required"),
    ],
)
def test_what_is_no_answer_is_refused(body: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_answer(body)


def test_the_bound_on_input_counts_bytes() -> None:
    assert most_tokens({"messages": [{"role": "user", "content": "é"}]}) == len(
        '[[{"role": "user", "content": "é"}], null]'.encode()
    )
