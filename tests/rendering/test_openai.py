"""The one codec of messages to and from OpenAI's form."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from silva.rendering.openai import (
    Malformed,
    as_function,
    call_entry,
    call_ids,
    message_of,
    reply_entry,
    spec_of,
    text_of,
    thoughts_apart,
)
from silva.types import Message, ToolCall, ToolSpec

TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)
CALLS = st.builds(ToolCall, TEXTS.filter(bool), st.dictionaries(TEXTS, VALUES, max_size=3), TEXTS)
REPLIES = st.builds(
    Message,
    st.just("assistant"),
    TEXTS,
    st.none() | TEXTS.filter(bool),
    st.lists(CALLS, max_size=3).map(tuple),
)
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
ADD = ToolCall("add", {"a": 1}, "1")


@pytest.mark.slow
@given(REPLIES, st.sampled_from(["reasoning_content", "reasoning"]))
def test_a_reply_goes_there_and_back(reply: Message, field: str) -> None:
    entry = reply_entry(reply, [call.id for call in reply.tool_calls], field)
    assert message_of(json.loads(json.dumps(entry))) == reply


@pytest.mark.slow
@given(CALLS)
def test_arguments_are_text_or_an_object(call: ToolCall) -> None:
    text, value = (call_entry(call, "x", as_text=as_text)["function"] for as_text in (True, False))
    assert json.loads(text["arguments"]) == value["arguments"] == dict(call.arguments)


@pytest.mark.slow
@given(st.lists(REPLIES, max_size=4), st.data())
def test_each_call_has_an_id_of_its_own_that_its_result_answers(replies: list[Message], data) -> None:
    dialogue = list[Message]()
    for reply in replies:
        results = [Message("tool", "r", name=call.name) for call in reply.tool_calls]
        dialogue += [Message("user", "u"), reply, *data.draw(st.permutations(results))]
    ids = call_ids(dialogue)
    asked = [id for each, message in zip(ids, dialogue, strict=True) if message.role != "tool" for id in each]
    answered = [
        id for each, message in zip(ids, dialogue, strict=True) if message.role == "tool" for id in each
    ]
    assert len({*asked}) == len(asked) and sorted(answered) == sorted(asked)


@given(TEXTS, TEXTS, st.dictionaries(TEXTS, VALUES, max_size=3))
def test_a_tool_goes_there_and_back(name: str, description: str, parameters: dict) -> None:
    tool = ToolSpec(name, description, parameters)
    assert spec_of(as_function(tool)["function"]) == tool


def test_a_reply_as_the_api_writes_it() -> None:
    assert reply_entry(Message("assistant", "", "hm", (ADD,)), ["c9"], "reasoning") == {
        "role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [CALL | {"id": "c9"}],
    }  # fmt: skip
    assert reply_entry(Message("assistant", "", "hm"), []) == {"role": "assistant", "content": ""}


def test_what_cannot_be_sent_becomes_a_question_mark() -> None:
    function = call_entry(ToolCall("add", {"a": "\ud800é"}), "1")["function"]
    assert function == {"name": "add", "arguments": '{"a": "?é"}'}


def test_ids_that_a_server_repeats_are_replaced() -> None:
    calls = (ToolCall("now", {}, "call_0"), ToolCall("now", {}, "call_0"))
    results = [Message("tool", str(i), name="now") for i in range(2)]
    turn = [Message("assistant", "", tool_calls=calls), *results]
    first, second = ("call_0", "call_0_1"), ("call_3_0", "call_3_1")
    assert call_ids([*turn, *turn]) == [
        first,
        ("call_0",),
        ("call_0_1",),
        second,
        ("call_3_0",),
        ("call_3_1",),
    ]


def test_a_result_of_a_malformed_call_answers_none() -> None:
    result, other = Message("tool", "1", name="add"), Message("tool", "2")
    broken = Message("assistant", "", tool_calls=(ADD,), errors=("malformed",))
    assert call_ids([broken, other, result, result]) == [("1",), (), ("1",), ()]
    assert call_ids([Message("assistant", "", tool_calls=(ADD,)), other]) == [("1",), ("1",)]
    assert call_ids([other]) == [()]


@pytest.mark.parametrize(
    ("reasoning", "content", "apart"),
    [
        (None, "up", ("", "up")),
        ("hm", "up", ("hm", "up")),
        (None, "<think> hm </think>up", ("hm", "up")),
        ("hm", "so</think> up", ("hm", " up")),
    ],
)
def test_thoughts_that_still_stand_in_the_content(reasoning, content, apart) -> None:
    assert thoughts_apart(Message("assistant", content, reasoning)) == apart


@pytest.mark.parametrize(
    "entry",
    [
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "assistant", "tool_calls": json.dumps([CALL])},
        {"role": "assistant", "content": "",
         "tool_calls": [{"id": "1", "function": {"name": "add", "arguments": {"a": 1}}}]},
        {"from": "gpt", "value": "", "tool_calls": [{"id": "1", "name": "add", "arguments": {"a": 1}}]},
    ],
)  # fmt: skip
def test_forms_of_calls(entry) -> None:
    assert message_of(entry) == Message("assistant", "", tool_calls=(ADD,))


def test_older_forms() -> None:
    call = {"name": "add", "arguments": '{"a": 1}'}
    read = message_of({"role": "assistant", "content": None, "function_call": call})
    assert read.tool_calls == (ToolCall("add", {"a": 1}),)
    assert message_of({"from": "human", "value": "q"}) == Message("user", "q")
    assert message_of({"role": "developer", "content": "q"}).role == "system"
    assert message_of({"role": "assistant", "content": "q", "reasoning": {"a": 1}}).reasoning is None


@pytest.mark.parametrize(
    ("content", "text"),
    [(None, ""), ("a", "a"), ([], ""), ([{"type": "text", "text": t} for t in "ab"], "ab")],
)
def test_a_content_is_a_text_or_parts_of_it(content, text) -> None:
    assert text_of(content) == text


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (7, "a message: got 7, expected a message"),
        ({"role": "robot", "content": ""}, "role: got 'robot', expected one of system, developer"),
        ({"role": "user", "content": None}, "content: got None, expected text"),
        ({"role": "user", "content": 7}, "content: got 7, expected text"),
        ({"role": "user", "content": [{"type": "image"}]}, "content: got [{'type': 'image'}], expected text"),
        ({"role": "user", "tool_calls": "[{bad"}, "tool_calls: got '[{bad', expected JSON"),
        ({"role": "user", "tool_calls": 7}, "tool_calls: got 7, expected a list of calls"),
        ({"role": "user", "tool_calls": [{"function": None}]},
         "tool_calls.0: got {'function': None}, expected a call with the name"),
        ({"role": "user", "tool_calls": [{"name": "f", "arguments": "{bad"}]},
         "tool_calls.0.arguments: got '{bad', expected JSON"),
        ({"role": "user", "tool_calls": [{"name": "f", "arguments": [1]}]},
         "tool_calls.0.arguments: got [1], expected an object"),
        ({"role": "user", "function_call": {"name": 1}}, "function_call: got {'name': 1}, expected a call"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named(entry, words) -> None:
    with pytest.raises(Malformed) as raised:
        message_of(entry)
    assert str(raised.value).startswith(words)
