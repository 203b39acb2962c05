"""Rows of other tools say what the dialogue says: read again they are equal, or what differs is named."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from silva.data.dialogues import dialogue
from silva.data.row_shapes import problem, recognised
from silva.data.rows import Row
from silva.data.written import WRITERS, CannotHold, as_verl, lost, row_of
from silva.rendering.dialogue import Dialogue
from silva.types import Message, ToolCall, ToolSpec

ADD = ToolSpec("add", "Adds.", {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]})
SYSTEM, ASK = Message("system", "Be brief."), Message("user", "2 + 2?")
PLAIN = Dialogue((SYSTEM, ASK, Message("assistant", "4"), Message("user", "+ 1?"), Message("assistant", "5")))
CALLS = Dialogue(
    (
        ASK,
        Message("assistant", "", tool_calls=(ToolCall("add", {"a": 2, "b": [1, None]}),)),
        Message("tool", "4", name="add"),
        Message("assistant", "It is 4."),
    ),
    (ADD,),
)
SEARCH = Dialogue(
    (
        ASK,
        Message("assistant", "I look.", tool_calls=(ToolCall("search", {"query": "2 + 2"}),)),
        Message("tool", "four\nfive", name="search"),
        Message("assistant", "", tool_calls=(ToolCall("python", {"code": "print(2 + 2)"}),)),
        Message("tool", "4", name="python"),
        Message("assistant", "<answer>4</answer>"),
    )
)
THOUGHT = Dialogue((ASK, Message("assistant", "4", reasoning="Two and two.")))
IDS = Dialogue(
    (
        ASK,
        Message(
            "assistant", "", tool_calls=(ToolCall("add", {"a": 1}, "x1"), ToolCall("add", {"a": 2}, "x2"))
        ),
        Message("tool", "1", name="add"),
        Message("tool", "2", name="add"),
        Message("assistant", "Both."),
    )
)
HELD: list[tuple[Dialogue, dict[str, set[str]]]] = [
    (PLAIN, {"messages": set(), "trl": set(), "sharegpt": set(), "arpo": set()}),
    (CALLS, {"messages": set(), "trl": set(), "sharegpt": set()}),
    (SEARCH, {"messages": set(), "trl": set(), "sharegpt": {"calls"}, "arpo": set()}),
    (THOUGHT, {"messages": set(), "trl": set(), "sharegpt": {"thoughts"}, "arpo": {"thoughts"}}),
    (IDS, {"messages": set(), "trl": set(), "sharegpt": {"ids"}}),
]


@pytest.mark.parametrize(("said", "shapes"), HELD)
def test_what_a_shape_holds_comes_back(said: Dialogue, shapes: dict[str, set[str]]) -> None:
    for to, missing in shapes.items():
        values, found = row_of(said, to, {"id": 7})
        values = json.loads(json.dumps(values))
        assert (found, values.pop("id")) == (missing, 7)
        back = dialogue(Row("", values))
        if not missing:
            assert (back.messages, back.tools) == (said.messages, said.tools)


def test_the_forms_are_those_of_their_tools() -> None:
    """By hand, after the documentation of TRL and LLaMA-Factory and ARPO's rows."""
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": [1, null]}'}}
    tools = [{"type": "function", "function": {"name": "add", "description": "Adds.",
                                               "parameters": dict(ADD.parameters)}}]  # fmt: skip
    asked = {"role": "user", "content": "2 + 2?"}
    replies = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "4", "name": "add"},
        {"role": "assistant", "content": "It is 4."},
    ]
    assert WRITERS["messages"](CALLS) == {"messages": [asked, *replies], "tools": tools}
    assert WRITERS["trl"](CALLS) == {"prompt": [asked], "completion": replies, "tools": tools}
    found = WRITERS["sharegpt"](CALLS)
    assert json.loads(found.pop("tools")) == tools
    assert found == {
        "conversations": [
            {"from": "human", "value": "2 + 2?"},
            {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2, "b": [1, null]}}'},
            {"from": "observation", "value": "4"},
            {"from": "gpt", "value": "It is 4."},
        ]
    }
    assert WRITERS["arpo"](SEARCH)["conversations"][1]["value"] == (
        "I look.\n<search>2 + 2</search> <result>\nfour\nfive\n</result>\n"
        "<python>print(2 + 2)</python> <result>\n4\n</result>\n<answer>4</answer>"
    )
    assert WRITERS["trl"](PLAIN)["completion"] == [{"role": "assistant", "content": "5"}]
    assert WRITERS["sharegpt"](PLAIN)["system"] == "Be brief."
    ids = WRITERS["messages"](IDS)["messages"]
    assert [call["id"] for call in ids[1]["tool_calls"]] == ["x1", "x2"]
    assert [entry.get("tool_call_id") for entry in ids[2:4]] == ["x1", "x2"]


@pytest.mark.parametrize(
    ("said", "to", "why"),
    [
        (CALLS, "arpo", "a call has other arguments than one text"),
        (IDS, "arpo", "several calls stand in one reply"),
        (Dialogue((ASK, SYSTEM, Message("assistant", "4"))), "sharegpt", "a system message stands inside"),
        (Dialogue((ASK, Message("assistant", "4"), ASK)), "trl", "no reply follows the last question"),
    ],
)
def test_what_a_shape_has_no_place_for_is_refused(said: Dialogue, to: str, why: str) -> None:
    with pytest.raises(CannotHold, match=why):
        row_of(said, to, {})


WORDS = st.text("ab <>/\n{}é森", min_size=1, max_size=8)
CALL = st.builds(
    ToolCall, st.sampled_from(["add", "search"]), st.fixed_dictionaries({"x": WORDS | st.integers()})
)
REPLY = st.builds(
    lambda text, thought, calls: Message("assistant", text, thought, tuple(calls)),
    WORDS,
    st.none() | WORDS,
    st.lists(CALL, max_size=2),
)
TURN = st.tuples(st.builds(lambda text: Message("user", text), WORDS), REPLY)


@pytest.mark.slow
@given(st.booleans(), st.lists(TURN, min_size=1, max_size=3), st.sampled_from(sorted(WRITERS)))
@settings(max_examples=150)
def test_nothing_is_lost_in_silence(system: bool, turns: list[tuple[Message, Message]], to: str) -> None:
    messages = [SYSTEM] if system else []
    for asked, reply in turns:
        messages += [asked, reply]
        messages += [Message("tool", "ok", name=call.name) for call in reply.tool_calls]
    said = Dialogue(tuple(messages))
    try:
        values, missing = row_of(said, to, {})
    except CannotHold:
        assert to != "messages"
        return
    back = dialogue(Row("", json.loads(json.dumps(values))))
    assert (back.messages == said.messages) == (not missing)
    assert lost(said, back) == missing


def test_problems_of_any_shape_become_rows_of_verl() -> None:
    rows: list[tuple[dict[str, Any], Any]] = [
        ({"question": "2 + 2?", "answer": "Add.\n#### 4", "level": 3}, "4"),
        ({"prompt": [{"role": "user", "content": "2 + 2?"}], "answer": ["4", "four"]}, ["4", "four"]),
        ({"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]}, "4"),
    ]
    for number, (values, answer) in enumerate(rows):
        row = Row(f"x.jsonl:{number + 1}", values)
        written, missing = as_verl(row, number, "x")
        assert written == {
            "data_source": "x", "prompt": [{"role": "user", "content": "2 + 2?"}], "ability": "",
            "reward_model": {"style": "rule", "ground_truth": answer}, "extra_info": {"index": number},
        } | ({"level": 3} if "level" in values else {})  # fmt: skip
        assert not missing
        again = Row("", written)
        asked, before = problem(again, recognised(again)), problem(row, recognised(row))
        assert (asked.messages, asked.answer) == (before.messages, before.answer)
        assert as_verl(again, 9, "y") == (written, set())  # verl's own rows stay as they are
    with pytest.raises(CannotHold, match="no answer to grade by"):
        as_verl(Row("x", {"prompt": "2 + 2?"}), 0, "x")
