"""Whole dialogues in the shapes of the data sets of the field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from silva.data.dialogues import dialogue, shape_of
from silva.data.rows import Row
from silva.errors import ConfigError
from silva.rendering.dialogue import Dialogue
from silva.types import Message, ToolCall, ToolSpec

ADD = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
SPEC = ToolSpec("add", "Adds.", {"type": "object"})


def read(**values: Any) -> Dialogue:
    return dialogue(Row("rows.jsonl:1", values))


def user(text: str) -> Message:
    return Message("user", text)


def reply(text: str, *calls: ToolCall, thought: str | None = None) -> Message:
    return Message("assistant", text, thought, calls)


def result(text: str, name: str | None) -> Message:
    return Message("tool", text, name=name)


def asks(id: str, x: int, *, text: bool) -> dict[str, Any]:
    arguments = json.dumps({"x": x}) if text else {"x": x}
    return {"id": id, "type": "function", "function": {"name": "add", "arguments": arguments}}


@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize("tools", [[ADD], json.dumps([{"type": "function", "function": ADD}])])
def test_messages_hold_calls_thoughts_and_results(text: bool, tools: Any) -> None:
    """Results name their call by its id, in any order."""
    found = read(
        messages=[
            {"role": "user", "content": "1 and 2?"},
            {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [
                asks("a", 1, text=text), {"id": "b", "function": {"name": "sub", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "b", "content": "2"},
            {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "1"}]},
            {"role": "assistant", "content": "3"},
        ],
        tools=tools,
    )  # fmt: skip
    calls = (ToolCall("add", {"x": 1}, "a"), ToolCall("sub", {}, "b"))
    expected = (
        user("1 and 2?"),
        reply("", *calls, thought="hm"),
        result("2", "sub"),
        result("1", "add"),
        reply("3"),
    )
    assert found == Dialogue(expected, (SPEC,), "rows.jsonl:1")


def test_results_without_a_name_answer_the_calls_in_their_order() -> None:
    calls = [{"type": "function", "function": {"name": name, "arguments": {}}} for name in ("a", "b", "a")]
    said = [
        {"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": calls},
        *({"role": "tool", "content": text} for text in "123"), {"role": "assistant", "content": "x"},
    ]  # fmt: skip
    found = dialogue(Row("r", {"messages": said}))
    assert [m.name for m in found.messages if m.role == "tool"] == ["a", "b", "a"]


def test_prompts_with_completions_are_trl_s() -> None:
    assert read(prompt="Sky?", completion=" blue").messages == (user("Sky?"), reply(" blue"))
    prompt = [{"role": "system", "content": "S"}, {"role": "user", "content": "q"}]
    completion = [
        {"role": "assistant", "tool_calls": [asks("", 1, text=False)]},
        {"role": "tool", "name": "add", "content": "1"},
        {"role": "assistant", "content": "One."},
    ]
    assert read(prompt=prompt, completion=completion).messages == (
        Message("system", "S"), user("q"), reply("", ToolCall("add", {"x": 1})), result("1", "add"),
        reply("One."),
    )  # fmt: skip


def test_tables_and_verl_reply_with_their_whole_answer() -> None:
    assert read(question="2+2?", answer="It is\n#### 4").messages == (user("2+2?"), reply("It is\n#### 4"))
    row = {"instruction": "Add.", "input": "1, 2", "output": "3", "system": "S", "history": [["a", "b"]]}
    assert read(**row).messages == (
        Message("system", "S"), user("a"), reply("b"), user("Add.\n1, 2"), reply("3"),
    )  # fmt: skip
    verl = {
        "prompt": [{"role": "user", "content": "q"}],
        "reward_model": {"ground_truth": "4"},
        "data_source": "x",
    }
    assert read(**verl).messages == (user("q"), reply("4"))
    both = {
        "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
        "answer": "b",
    }
    assert read(**both).messages == (user("q"), reply("a"))


def test_sharegpt_of_llama_factory() -> None:
    call = json.dumps({"name": "add", "arguments": {"x": 1}})
    found = read(
        conversations=[
            {"from": "human", "value": "q"}, {"from": "function_call", "value": call},
            {"from": "observation", "value": "1"}, {"from": "function_call", "value": f"[{call}, {call}]"},
            {"from": "observation", "value": "2"}, {"from": "gpt", "value": "a"},
        ],
        system="S",
        tools=json.dumps([ADD]),
    )  # fmt: skip
    add = ToolCall("add", {"x": 1})
    assert found == Dialogue(
        (Message("system", "S"), user("q"), reply("", add), result("1", "add"), reply("", add, add),
         result("2", "add"), reply("a")), (SPEC,), "rows.jsonl:1")  # fmt: skip


def test_hermes_writes_calls_and_results_as_text() -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>'
    said = ["q", call, '<tool_response>\n{"sum": 1}\n</tool_response>', "a"]
    roles = ("human", "gpt", "tool", "gpt")
    row = [{"from": role, "value": text} for role, text in zip(roles, said, strict=True)]
    assert read(conversations=row).messages == (
        user("q"),
        reply(call),
        result('{"sum": 1}', "add"),
        reply("a"),
    )
    row[2]["value"] *= 2  # two results in one message
    assert read(conversations=row).messages[2] == result(said[2] * 2, "add")


SEARCH, PYTHON = ToolCall("search", {"query": "rome"}), ToolCall("python", {"code": "print(\n1)"})
TAGGED = (
    Message("system", "S"), user("q"), reply("<think>a</think>", SEARCH), result("In Italy <b>", "search"),
    reply("<think>b</think>", PYTHON), result("1", "python"), reply("<think>c</think> <answer>1</answer>"),
)  # fmt: skip


def test_arpo_s_tags_are_calls_and_results() -> None:
    said = [
        "<think>a</think> <search> rome </search>", "<result>\nIn Italy <b>\n</result>",
        "<think>b</think>\n<python>\nprint(\n1)\n</python>", " <result>1</result>\n",
        "<think>c</think> <answer>1</answer>",
    ]  # fmt: skip
    apart = [{"from": "human" if i % 2 else "gpt", "value": text} for i, text in enumerate(said)]
    start = {"from": "human", "value": "q"}
    assert read(system="S", conversations=[start, *apart]).messages == TAGGED
    together = [start, {"from": "gpt", "value": "\n".join(said)}]
    assert read(system="S", conversations=together).messages == TAGGED
    assert read(instruction="q", system="S", output="".join(said)).messages == TAGGED
    of_search_r1 = "".join(said).replace("result>", "information>")
    assert read(instruction="q", system="S", output=of_search_r1).messages == TAGGED


def test_tags_without_a_result_are_text() -> None:
    for text in (
        "Write <search>x</search> to search.",
        "<html><result>1</result></html>",
        "<b>x</b><result>1</result>",
    ):
        assert read(prompt="q", completion=text).messages == (user("q"), reply(text))
    said = ["q", "a", "<result>1</result>", "b"]
    row = [{"from": "gpt" if i % 2 else "human", "value": text} for i, text in enumerate(said)]
    assert read(conversations=row).messages == (user("q"), reply("a"), user("<result>1</result>"), reply("b"))
    cut = read(prompt="q", completion="<add>1</add><result>2", tools=[ADD]).messages
    assert cut == (user("q"), reply("", ToolCall("add", {"input": "1"})), result("2", "add"))


def test_columns_before_the_prompt_are_those_of_each_row() -> None:
    """The first row, which decides where prompt and answer stand, may have none of them."""
    shape = shape_of(Row("rows.jsonl:1", {"instruction": "a", "output": "b"}))
    row = Row(
        "rows.jsonl:2",
        {"instruction": "a", "output": "b", "input": "c", "system": "S", "history": [["d", "e"]]},
    )
    assert dialogue(row, shape).messages == (
        Message("system", "S"), user("d"), reply("e"), user("a\nc"), reply("b"),
    )  # fmt: skip
    talk = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    shape = shape_of(Row("rows.jsonl:1", {"conversations": talk}))
    found = dialogue(Row("rows.jsonl:2", {"conversations": talk, "system": "S"}), shape)
    assert found.messages == (Message("system", "S"), user("q"), reply("a"))


def test_odd_columns_are_named_by_key() -> None:
    row = Row("rows.jsonl:1", {"x": {"ask": "q"}, "said": "a", "question": "no"})
    assert dialogue(row, shape_of(row, "x.ask", "said")).messages == (user("q"), reply("a"))
    with pytest.raises(ConfigError, match=r"rows\.jsonl:1: no 'ask': got 'x', 'said', 'question'"):
        shape_of(row, "ask")


def test_a_step_of_act_prm_is_its_dialogue() -> None:
    row = {
        "system_prompt": {"role": "system", "content": "S"}, "state": [{"role": "user", "content": "q"}],
        "action": {"role": "assistant", "content": "a"}, "done": True, "return_": 1.0,
    }  # fmt: skip
    assert read(**row).messages == (Message("system", "S"), user("q"), reply("a"))


Q = {"role": "user", "content": "q"}
BROKEN = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ({"prompt": "q"}, "prompt: got a prompt without a reply, expected a column with one"),
        ({"question": "q", "answer": 4}, "answer: got 4, expected text or messages"),
        ({"question": "q", "answer": " "}, "answer: got ' ', expected text or messages"),
        ({"messages": [Q]}, "messages: got no reply, expected a dialogue with one"),
        ({"messages": [{"role": "assistant", "content": "a"}]},
         "messages: got a dialogue that begins with a reply"),
        ({"messages": [Q, BROKEN]}, "messages.1.tool_calls.0.arguments: got '{', expected JSON"),
        ({"messages": [Q, {"role": "assistant", "content": None}]},
         "messages.1.content: got None, expected text"),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "function_call", "value": "add"}]},
         "conversations.1.value: got 'add', expected JSON"),
        ({"prompt": "q", "completion": "a", "tools": "["}, "tools: got '[', expected JSON"),
        ({"prompt": "q", "completion": "a", "tools": [3]},
         "tools.0: got 3, expected a tool with the name of its function"),
        ({"prompt": "q", "completion": "a", "tools": [{"name": "f", "parameters": "x"}]},
         "tools.0.parameters: got 'x', expected a JSON schema"),
        ({"state": "q", "action": {}}, "state, action: expected a list of messages and a message"),
        ({"text": "q"}, "no column looks like a prompt: got 'text'; set `prompt` to the name of one (and "
                        "`answer`, where there is one)"),
    ],
)  # fmt: skip
def test_a_wrong_row_is_named_by_file_line_and_key(row: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read(**row)
    assert str(refused.value) == f"rows.jsonl:1: {error}"
