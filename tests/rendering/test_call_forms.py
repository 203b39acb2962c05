"""Calls as the families of models write them."""

from __future__ import annotations

import json
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from silva.config.sections import Rendering
from silva.rendering.call_forms import FORMS, foreign
from silva.types import ToolCall, ToolSpec

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**9), 10**9)
    | st.text(alphabet=st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(alphabet="ab", max_size=2), inner, max_size=2)
    ),
    max_leaves=4,
)

PROPERTIES = {"query": {"type": "string"}, "limit": {"type": "integer"}, "more": {}}
SEARCH = ToolSpec("search", "Searches.", {"type": "object", "properties": PROPERTIES, "required": ["query"]})
CALL = ToolCall("search", {"query": "Rome"})


def test_every_form_can_be_set() -> None:
    assert set(get_args(Rendering.model_fields["tools"].annotation)) == {"auto", *FORMS}


@pytest.mark.slow
@pytest.mark.parametrize("form", [name for name in FORMS if name != "tags"])
@settings(deadline=None, max_examples=40)
@given(
    query=st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\r")),
    more=JSON,
)
def test_what_is_written_is_read_back(form: str, query: str, more: object) -> None:
    """Tags of a form inside its own values aside: only JSON and Python can hold those."""
    values = {"query": query, "limit": 3}
    if form not in ("qwen_xml", "glm"):  # there a text that looks like JSON is JSON, unless the schema knows
        values["more"] = more  # type: ignore[assignment]
    calls = (ToolCall("search", values), ToolCall("now", {}))
    read = FORMS[form].parse(FORMS[form].write(calls), [SEARCH])
    assert [(c.name, c.arguments) for c in read.calls] == [(c.name, c.arguments) for c in calls]
    assert (read.content, read.errors) == ("", ())


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", '{"query": "print(\'<tool_call></tool_call><think>\')"}'),
        ("mistral", '{"query": "a [TOOL_CALLS] b"}'),
        ("llama", '{"query": "; {\\"name\\": 1}"}'),
        ("pythonic", '{"query": ")] f(x=1"}'),
    ],
)
def test_a_value_may_hold_the_marks_of_its_form(form: str, text: str) -> None:
    call = ToolCall("search", json.loads(text))
    read = FORMS[form].parse(FORMS[form].write([call]), [SEARCH])
    assert [(c.name, c.arguments) for c in read.calls] == [(call.name, call.arguments)]


# As released models write them: copied from the model cards' examples in form, not in words.
WRITTEN = [
    ("llama", '<|python_tag|>{"name": "search", "parameters": {"query": "Rome"}}'),
    ("llama", '{"type": "function", "name": "search", "parameters": {"query": "Rome"}}'),
    ("mistral", '[TOOL_CALLS] [{"name": "search", "arguments": {"query": "Rome"}}]'),
    ("mistral", '[TOOL_CALLS]search[ARGS]{"query": "Rome"}'),
    ("qwen_xml", "<tool_call>\n<function=search>\n<parameter=query>\nRome\n</parameter>\n</function>\n"
                 "</tool_call>"),
    ("qwen_xml", "<function=search>\n<parameter=query>\nRome\n</parameter>\n</function>\n</tool_call>"),
    ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>search\n```json\n"
                 '{"query": "Rome"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'),
    ("deepseek", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>search<｜tool▁sep｜>{"query": "Rome"}'
                 "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
    ("glm", "<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>"),
    ("glm", "<tool_call>search<arg_key>query</arg_key><arg_value>Rome</arg_value></tool_call>"),
    ("kimi", "<|tool_calls_section_begin|><|tool_call_begin|>functions.search:0<|tool_call_argument_begin|>"
             '{"query": "Rome"}<|tool_call_end|><|tool_calls_section_end|>'),
    ("pythonic", '[search(query="Rome")]'),
    ("pythonic", "<|tool_call_start|>[search(query='Rome')]<|tool_call_end|>"),
    ("pythonic", "See.<|tool_call_start|>[search(query='Rome')]<|tool_call_end|>"),
    ("hermes", '<tool_call>\n{"name": "search", "arguments": {"query": "Rome"}}\n</tool_call>'),
    ("tags", "<search>Rome</search>"),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text"), WRITTEN)
def test_a_call_is_read_in_its_form_and_refused_in_words_in_the_others(form: str, text: str) -> None:
    (call,) = FORMS[form].parse(text, [SEARCH]).calls
    assert (call.name, call.arguments) == (CALL.name, CALL.arguments)
    for other in FORMS.keys() - {form}:
        read = FORMS[other].parse(text, [SEARCH])
        if not read.errors and not text.startswith("See."):
            told = foreign(text, [SEARCH], other)
            assert not read.calls and f"in the form {form}" in told and FORMS[other].example in told


@pytest.mark.parametrize(
    ("form", "text", "error"),
    [
        ("llama", "<|python_tag|>search Rome", "<|python_tag|> without a call after it"),
        ("mistral", "[TOOL_CALLS][{]", "[TOOL_CALLS] without a call after it"),
        ("mistral", "[TOOL_CALLS]search[ARGS][1]", '"arguments" of search: got array, expected an object'),
        ("qwen_xml", "<tool_call>\n<function=search>\nRome\n</function>\n</tool_call>", "is no argument"),
        ("qwen_xml", "<tool_call><function=search>", "<tool_call> does not begin a whole call"),
        ("glm", '<tool_call>{"name": "search"}</tool_call>', "<tool_call> does not begin a whole call"),
        ("deepseek", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>search\n```json\n{\n```<｜tool▁call▁end｜>",
         "not valid JSON"),
        ("kimi", "<|tool_call_begin|>functions.search:0", "does not begin a whole call"),
        ("pythonic", "[search(x=open('a'))]", "is no literal"),
        ("pythonic", "[search('Rome')]", "arguments need names"),
        ("pythonic", "See.<|tool_call_start|>search", "without a list of calls after it"),
        ("pythonic", "[search(" + "(" * 10_000 + ")]", "not a list of calls"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_told_with_the_form(form: str, text: str, error: str) -> None:
    read = FORMS[form].parse(text, [SEARCH])
    assert not read.calls and error in read.errors[0]


@pytest.mark.parametrize(
    "text",
    ["It is [1] or [TOOL].", '{"answer": 4}', '{"name": "Rome", "parameters": {}}', "[1, 2]", "f(x=1)",
     "[f(x=1)]", "Use <search>Rome</search>.", ""],
)  # fmt: skip
def test_an_answer_is_no_call(text: str) -> None:
    for form in FORMS:
        assert not foreign(text, [SEARCH], form)
