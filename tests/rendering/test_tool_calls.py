from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from silva.rendering.call_forms import FORMS, MARKERS, foreign
from silva.rendering.tool_calls import (
    Parsed,
    describe_tags,
    parse_hermes,
)
from silva.types import ToolCall, ToolSpec


def tool(name, required=(), **properties):
    return ToolSpec(
        name, f"Does {name}.", {"type": "object", "properties": properties, "required": list(required)}
    )


SEARCH = tool("search", ["query"], query={"type": "string"}, limit={"type": "integer"})
PYTHON = tool("python")
TAGS = FORMS["tags"]
EXPECTED = '{"name": "...", "arguments": {...}}'


def test_hermes_reads_several_calls():
    text = 'A\n<tool_call>{"name": "f", "arguments": {"x": [1]}, "id": "7"}</tool_call>\n'
    text += '<tool_call>{"name": "g"}</tool_call>'
    assert parse_hermes(text) == Parsed("A", (ToolCall("f", {"x": [1]}, "7"), ToolCall("g", {})))
    assert parse_hermes(" plain <b> ") == Parsed(" plain <b> ")


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ('{"name": "f", }', "tool call 1: not valid JSON (Illegal trailing comma|Expecting property name)"),
        ("[1]", "tool call 1: got JSON of type array, expected an object"),
        ('{"arguments": {}}', 'tool call 1: "name" is missing or not a text'),
        ('{"name": 3}', 'tool call 1: "name" is missing or not a text'),
        ('{"name": "f", "arguments": "x"}', 'tool call 1: "arguments" of f: got string, expected an object'),
        ('{"name": "f", "arguments": null}', 'tool call 1: "arguments" of f: got null, expected an object'),
        ('{"name": "f", "parameters": {}}', 'tool call 1: unexpected "parameters" in the call of f'),
        ('{"name": "f", "arguments": {"x": NaN}}', "tool call 1: not valid JSON (NaN is no JSON number)"),
        ('{"name": "f", "arguments": {"x": -Infinity}}', "tool call 1: not valid JSON (-Infinity is no JSON"),
        ('{"name": "f", "arguments": {"x": [1e999]}}', "tool call 1: not valid JSON (1e999 is too large"),
        (
            '{"name": "f", "arguments": {"x": "\\ud800"}}',
            "tool call 1: holds characters that are no valid Unicode",
        ),
        ("[" * 100_000, "tool call 1: JSON is nested too deeply"),
        (
            '{"name": "f", "arguments": {"x": ' + "9" * 5000 + "}}",
            "tool call 1: not valid JSON (Exceeds the limit",
        ),
    ],
)
def test_hermes_names_what_is_wrong(body, error):
    parsed = parse_hermes(f"B<tool_call>{body}</tool_call>")
    assert (parsed.content, parsed.calls) == ("B", ())
    (found,) = parsed.errors
    starts = [error.partition("(")[0] + "(" + e for e in error.partition("(")[2].rstrip(")").split("|")]
    assert found.startswith(tuple(starts) if "(" in error else error)


def test_hermes_keeps_good_calls_beside_bad_ones():
    parsed = parse_hermes('<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g"')
    assert parsed.calls == (ToolCall("f", {}),)
    assert parsed.errors == (
        f"tool call 2: <tool_call> is never closed; expected <tool_call>{EXPECTED}</tool_call>",
    )
    stray = parse_hermes("Hi</tool_call>")
    assert stray.content == "Hi" and stray.errors[0].startswith(
        "tool call 1: </tool_call> without <tool_call>"
    )


def test_tags_use_the_one_required_text_parameter():
    text = "See <search> Rome </search> then <python>print(1)\n</python>."
    parsed = TAGS.parse(text, [SEARCH, PYTHON])
    assert parsed.calls == (ToolCall("search", {"query": "Rome"}), ToolCall("python", {"input": "print(1)"}))
    assert (parsed.content, parsed.errors) == ("See  then .", ())


def test_tags_use_the_only_text_parameter_if_none_is_required():
    text = {"type": "string"}
    for found, parameters in [("expression", {"expression": text, "digits": {"type": "integer"}}),
                              ("input", {"one": text, "other": text})]:  # fmt: skip
        parsed = TAGS.parse("<calculator>6*7</calculator>", [tool("calculator", **parameters)])
        assert parsed.calls == (ToolCall("calculator", {found: "6*7"}),)


def test_tags_are_text_unless_the_tool_is_on_offer():
    text = " <python>1</python> "
    assert TAGS.parse(text, [SEARCH]) == Parsed(text)
    assert TAGS.parse(text) == Parsed(text)


def test_tags_unclosed():
    parsed = TAGS.parse("Hm <search>Rome", [SEARCH])
    assert parsed == Parsed(
        "Hm", (), ("tool call 1: <search> is never closed; expected <search>...</search>",)
    )


def test_an_error_names_what_was_got_and_the_form():
    (error,) = parse_hermes("<tool_call>[]</tool_call>").errors
    assert error == f"tool call 1: got JSON of type array, expected an object {EXPECTED}"


def test_tags_are_read_back_and_described():
    calls = (ToolCall("search", {"query": "Rome"}), ToolCall("python", {"input": "1"}))
    assert TAGS.parse(TAGS.write(calls), [SEARCH, PYTHON]).calls == calls
    described = describe_tags([SEARCH, PYTHON])
    assert "- <search>query</search>: Does search.\n- <python>input</python>: Does python.\n" in described


pieces = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "<search>",
        "</search>",
        '{"name":',
        '"f"',
        "}",
        "{",
        "[",
        "\\ud800",
        *MARKERS,
        "<function=f>",
        "</function>",
        "<parameter=x>",
        "</parameter>",
        "<arg_key>",
        "</arg_value>",
        "[f(x=",
        ")]",
        "```",
        ":0",
        '{"name": "f", "parameters": {}}',
        "é",
        "\n",
    ]
)


@pytest.mark.slow
@settings(deadline=None)
@given(
    text=st.lists(pieces | st.text(max_size=3), max_size=12).map("".join),
    form=st.sampled_from(sorted(FORMS)),
)
def test_parsers_never_raise_and_leave_no_markup(text, form):
    parsed = FORMS[form].parse(text, [SEARCH])
    assert len(parsed.calls) + len(parsed.errors) <= text.count("<") + text.count("[") + text.count("{")
    foreign(text, [SEARCH], form)
    assert "<tool_call>" not in parsed.content or form not in ("hermes", "qwen_xml", "glm")
