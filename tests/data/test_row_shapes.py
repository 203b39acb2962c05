"""What rows of TRL, verl, ARPO, PRIME-RL, ShareGPT and plain tables ask."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.real_rows import DATA

from silva.data.row_shapes import Problem, Shape, problem, recognised, shown
from silva.data.rows import Row, read_rows
from silva.errors import ConfigError
from silva.types import Message


def understood(values: dict[str, Any], **keys: str) -> Problem:
    row = Row("rows.jsonl:1", values)
    return problem(row, recognised(row, **keys))


def asked(text: str) -> tuple[Message, ...]:
    return (Message("user", text),)


TRL = {"prompt": [{"role": "user", "content": "Sky?"}], "ground_truth": "blue", "level": 3}
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "system", "content": "Put it in \x08oxed."}, {"role": "user", "content": "2 + 2?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"index": 0},
}
SHAREGPT = {
    "conversations": [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "Hi"},
        {"from": "gpt", "value": "Hello"},
        {"from": "human", "value": "2 + 2?"},
        {"from": "gpt", "value": "4"},
    ]
}


def test_trl_prompts_are_text_or_messages_with_more_columns():
    assert understood({"prompt": "Sky?", "answer": "blue"}) == (asked("Sky?"), "blue", {})
    assert understood(TRL) == (asked("Sky?"), "blue", {"level": 3})
    assert understood({"prompt": "Sky?", "difficulty": 1}) == (asked("Sky?"), None, {"difficulty": 1})
    assert understood({"prompt": "The sky is", "completion": " blue."}) == (asked("The sky is"), " blue.", {})


def test_verl_and_arpo_keep_what_their_rewards_read():
    messages, answer, columns = understood(VERL)
    assert [(m.role, m.content) for m in messages] == [("system", "Put it in \x08oxed."), ("user", "2 + 2?")]
    assert answer == "4"
    assert columns == {key: VERL[key] for key in ("data_source", "ability", "reward_model", "extra_info")}


def test_sharegpt_and_dialogues_expect_their_last_answer():
    messages, answer, _ = understood(SHAREGPT)
    said = [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello"), ("user", "2 + 2?")]
    assert ([(m.role, m.content) for m in messages], answer) == (said, "4")
    entries = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    assert understood({"messages": entries}) == (asked("Hi"), "Hello", {})
    assert understood({"messages": entries[:1], "answer": "Hello"}) == (asked("Hi"), "Hello", {})


@pytest.mark.parametrize(
    "row, question, answer",
    [
        ({"question": "q", "answer": "a"}, "q", "a"),
        ({"problem": "q", "solution": "long", "answer": "a"}, "q", "a"),
        ({"Question": "q", "Final answer": "a"}, "q", "a"),
        ({"query": "q", "response": "a"}, "q", "a"),
        ({"instruction": "Add.", "input": "2 and 2", "output": "4"}, "Add.\n2 and 2", "4"),
        ({"instruction": "Add 2 and 2.", "input": "", "output": "4"}, "Add 2 and 2.", "4"),
        ({"question": "q", "answer": ["a", "A"]}, "q", ["a", "A"]),
        ({"question": "q", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"}, "q", "4"),
        ({"question": "q", "answer": "It is 19.\n####19"}, "q", "19"),
        ({"question": "q", "answer": "none of #### them"}, "q", "none of #### them"),
    ],
)
def test_plain_tables(row, question, answer):
    found = understood(row)
    assert (found.messages, found.answer) == (asked(question), answer)


def test_columns_that_come_before_the_prompt_are_shown():
    alpaca = {"instruction": "do 1", "input": "", "output": "o", "system": "You are a pirate.",
              "history": [["hi", "hello"]]}  # fmt: skip
    said = [("system", "You are a pirate."), ("user", "hi"), ("assistant", "hello"), ("user", "do 1")]
    found = understood(alpaca)
    assert [(m.role, m.content) for m in found.messages] == said and found.columns == {}
    assert "prompt in `system and history and instruction and input`" in str(recognised(Row("r:1", alpaca)))
    dialogue = {"conversations": SHAREGPT["conversations"][1:3], "system": "Be brief."}
    assert [m.content for m in understood(dialogue).messages] == ["Be brief.", "Hi"]
    assert understood(SHAREGPT | {"system": "Other."}).messages[0].content == "Be brief."
    assert understood({"question": "q", "answer": "a", "history": 3}).columns == {"history": 3}


def test_an_answer_of_messages_is_what_the_last_one_says():
    row = {
        "prompt": [{"role": "user", "content": "2 + 2?"}],
        "completion": [{"role": "assistant", "content": "4"}],
    }
    assert understood(row)[:2] == (asked("2 + 2?"), "4")


def test_recorded_calls_become_text():
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    written = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    dialogue = [{"role": "user", "content": "q"},
                {"role": "assistant", "content": None, "tool_calls": [call]}]  # fmt: skip
    row = {"messages": [*dialogue, {"role": "tool", "content": "1"}, {"role": "assistant", "content": "one"}]}
    assert [m.content for m in understood(row).messages] == ["q", written, "1"]
    assert understood({"messages": dialogue}).answer == written


def test_a_call_that_cannot_be_read_is_named():
    row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": "[{bad"}]}
    with pytest.raises(ConfigError) as raised:
        understood(row)
    assert str(raised.value) == "rows.jsonl:1: messages.1.tool_calls: got '[{bad', expected JSON"


def test_what_looks_wrong_is_told():
    rows = [
        {"prompt": "Put it in \x08oxed{}", "answer": "4", "tools": "[...]"},
        {"prompt": "q", "answer": "4"},
    ]
    read = [understood(row) for row in rows]
    lines = shown("w", recognised(Row("r:1", rows[0])), read)
    assert lines[-2] == "w: 1 prompts hold control characters, such as '\\x08oxed{}'"
    assert "column `tools` is not offered" in lines[-1]


def test_given_keys_are_not_guessed():
    row = {"text": "q", "meta": {"gold": "7"}, "answer": "no"}
    assert understood(row, prompt="text", answer="meta.gold") == (
        asked("q"),
        "7",
        {"meta": {"gold": "7"}, "answer": "no"},
    )
    assert understood({"question": "q", "answer": "x = 7"}, after="=").answer == "7"
    assert understood({"a.b": "q", "answer": "7"}, prompt="a.b").messages == asked("q")


@pytest.mark.parametrize(
    "row, words",
    [
        (VERL, "verl: prompt in `prompt`, answer in `reward_model.ground_truth`"),
        (SHAREGPT, "ShareGPT: the dialogue in `conversations`, whose last answer is expected"),
        ({"question": "q", "answer": "1\n#### 4"},
         "table: prompt in `question`, answer in `answer` after ####"),
        ({"prompt": "q"}, "table: prompt in `prompt`, no answer"),
        ({"instruction": "q", "input": "x", "output": "a"},
         "table: prompt in `instruction and input`, answer in `output`"),
    ],
)  # fmt: skip
def test_a_shape_is_told_in_words(row, words):
    assert str(recognised(Row("rows.jsonl:1", row))) == words


@pytest.mark.parametrize(
    "row, error",
    [
        ({"text": "q"}, "no column looks like a prompt: got 'text'; set `prompt` to the name of one (and "
                        "`answer`, where there is one)"),
        ({"prompt": 3}, "prompt: got 3, expected text or messages"),
        ({"prompt": " "}, "prompt: got ' ', expected text or messages"),
        ({"prompt": []}, "prompt: got [], expected text or messages"),
        ({"prompt": ["q"]}, "prompt.0: got 'q', expected a message"),
        ({"prompt": [{"role": "robot", "content": "q"}]},
         "prompt.0.role: got 'robot', expected one of system, developer, human, user, gpt, "
         "assistant, chatgpt, bot, tool, function, observation, function_call"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]},
         "prompt.0.content: got [{'type': 'image'}], expected text"),
        ({"question": "q", "answer": None}, "answer: got None, expected an answer"),
        ({"question": "q", "answer": ""}, "answer: got '', expected an answer"),
        ({"messages": [{"role": "user", "content": "q"}]},
         "messages: got 'user', expected a dialogue that ends with an answer"),
    ],
)  # fmt: skip
def test_a_wrong_row_is_named_by_its_key(row, error):
    with pytest.raises(ConfigError) as refused:
        understood(row)
    assert str(refused.value) == f"rows.jsonl:1: {error}"


def test_a_later_row_of_another_shape_is_named():
    shape = recognised(Row("rows.jsonl:1", {"question": "q", "answer": "1\n#### 4"}))
    with pytest.raises(ConfigError, match=r"rows\.jsonl:2: answer: got 'four', expected text with '####'"):
        problem(Row("rows.jsonl:2", {"question": "q", "answer": "four"}), shape)
    with pytest.raises(ConfigError, match=r"rows\.jsonl:3: no 'question': got 'query', 'answer'"):
        problem(Row("rows.jsonl:3", {"query": "q", "answer": "1\n#### 4"}), shape)


REAL = {
    "gsm8k_test.jsonl": (1319, Shape("table", "question", "answer", after="####")),
    "math500_test.jsonl": (500, None),
    "hotpotqa_200.jsonl": (200, None),
    "2wiki_200.jsonl": (200, None),
    "musique_200.jsonl": (200, None),
    "bamboogle_125.jsonl": (125, None),
    "simpleqa_500.jsonl": (500, None),
    "webwalkerqa_680.json": (680, None),
}


@pytest.mark.parametrize("name", REAL)
@pytest.mark.skipif(not DATA.is_dir(), reason="there is no shared/data beside the project")
def test_real_rows_are_read_by_their_shape(name):
    count, expected = REAL[name]
    rows = list(read_rows(str(DATA / name)))
    shape = recognised(rows[0])
    assert expected is None or shape == expected
    problems = [problem(row, shape) for row in rows]
    assert len(problems) == count
    assert all(p.messages[0].content.strip() and p.answer for p in problems)
    json.dumps([p.columns for p in problems], allow_nan=False)


def test_aliases_of_an_answer_are_as_right() -> None:
    asked = {"question": "Where?", "answer": "York", "answer_aliases": ["Eboracum", "Jorvik"]}
    assert understood(asked).answer == ["York", "Eboracum", "Jorvik"]
    assert understood({**asked, "answer_aliases": []}).answer == "York"
    with pytest.raises(ConfigError, match="answer_aliases: got 'Jorvik', expected a list of texts"):
        understood({**asked, "answer_aliases": "Jorvik"})
    assert understood({"question": "Where?", "golden_answers": ["York"], "metadata": {}}).answer == ["York"]
