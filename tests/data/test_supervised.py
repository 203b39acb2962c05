"""Batches of supervised training: which rows, in which order, and the same ones again."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tests.rendering.test_renderer import renderer

from silva.data.settings import SupervisedData, SupervisedSource
from silva.data.supervised import SupervisedStream
from silva.errors import ConfigError
from silva.orchestrator.supervised import supervised_sample
from silva.rendering.supervised import SupervisedRow


def rows(count: int, name: str = "q") -> tuple[Mapping[str, Any], ...]:
    return tuple({"question": f"{name}{i}", "answer": f"a{i}"} for i in range(count))


def stream(*sources: Any, seed: int = 3, template: str = "chatml", history: str = "keep", **keys: Any) -> Any:
    """Sources are rows, paths, or pairs of one of them and a weight."""
    given = []
    for source in sources:
        what, weight = (
            source if isinstance(source, tuple) and isinstance(source[-1], float) else (source, 1.0)
        )
        place = {"path": str(what)} if isinstance(what, str | Path) else {"rows": what}
        given.append(SupervisedSource(**place, weight=weight))
    settings = SupervisedData(sources=tuple(given), **keys)
    return SupervisedStream(settings, renderer(template, history=history), seed)


def shown(found: list[SupervisedRow]) -> list[str]:
    """The questions of rows."""
    texts = [renderer("chatml").decode(row.tokens.tolist()) for row in found]
    return [text.split("user\n")[1].split("<|im_end|>")[0] for text in texts]


def test_each_row_comes_once_an_epoch_in_an_order_of_its_own() -> None:
    made = stream(rows(9))
    epochs = [shown(made.draw(9)) for _ in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [sorted(f"q{i}" for i in range(9))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert shown(stream(rows(9)).draw(9)) == epochs[0] != shown(stream(rows(9), seed=4).draw(9))


def test_a_weight_is_how_often_a_row_comes_in_an_epoch() -> None:
    made = stream((rows(6, "a"), 1.0), (rows(3, "b"), 2.0), (rows(8, "c"), 0.5))
    assert (made.steps(16, 1.0), made.steps(16, 2.0), made.steps(5, 2.0)) == (1, 2, 7)
    first = Counter(shown(made.draw(16)))
    assert Counter(name[0] for name in first.elements()) == {"a": 6, "b": 6, "c": 4}
    assert max(first[f"a{i}"] for i in range(6)) == 1 and {first[f"b{i}"] for i in range(3)} == {2}
    both = first + Counter(shown(made.draw(16)))
    assert {both[f"c{i}"] for i in range(8)} == {1} and made.state()["positions"] == [12, 12, 8]


def test_sources_are_mixed_all_along() -> None:
    names = [name[0] for name in shown(stream(rows(30, "a"), rows(10, "b")).draw(40))]
    assert [names[i : i + 4].count("b") for i in range(0, 40, 4)] == [1] * 10


def test_a_source_waits_until_a_row_of_it_is_due() -> None:
    found = shown(stream(rows(4), (rows(4, "z"), 0.25)).draw(5))
    assert [text[0] for text in found] == [*"qqqqz"]  # after 1/4, 2/4, 3/4 and 4/4 of the first, 1/1


@pytest.mark.slow
def test_a_stream_goes_on_from_any_state(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows(11)) + '{"question": 1}\n')
    keys: dict[str, Any] = {"max_bad_rows": 1, "validation": 0.2}
    whole = stream(file, (rows(4, "b"), 2.0), **keys)
    batches, states = [], []
    for _ in range(20):
        states.append(json.loads(json.dumps(whole.state())))
        batches.append(shown(whole.draw(3)))
    assert states[-1]["counts"]["bad"] == [f"{file}:12: question: got 1, expected text or messages"]
    for at, state in enumerate(states):
        again = stream(file, (rows(4, "b"), 2.0), **keys)
        again.load(state)
        assert [shown(again.draw(3)) for _ in range(at, 20)] == batches[at:]
        assert again.state() == whole.state()


def test_other_rows_than_before_are_refused() -> None:
    state = stream(rows(4)).state()
    with pytest.raises(ConfigError, match="rows: got 5 rows, expected 4 as before"):
        stream(rows(5)).load(state)


def test_held_out_is_the_prompt_whatever_the_answer() -> None:
    twice = tuple({**row, "answer": text} for row in rows(200) for text in ("x", "y"))
    made = stream(twice, validation=0.1)
    held_out = Counter(shown(made.validation()))
    assert (
        set(held_out.values()) == {2} and 10 <= len(held_out) <= 30
    )  # 20 are expected, 3 standard deviations
    drawn = Counter(shown(made.draw(400 - 2 * len(held_out))))
    assert (
        made.state()["positions"] == [400]
        and set(drawn.values()) == {2}
        and not drawn.keys() & held_out.keys()
    )
    assert len(drawn) + len(held_out) == 200
    other = stream(twice, validation=0.1, seed=8)  # another seed holds out the same
    assert Counter(shown(other.validation())) == held_out
    assert len(stream(twice, validation=0.1, validation_rows=4).validation()) == 4
    assert stream(twice).validation() == []
    spoken = tuple({**row, "system": row["answer"]} for row in twice)  # a system message is no other prompt
    assert {*shown(stream(spoken, validation=0.1).validation())} == held_out.keys()
    assert stream(rows(10), validation=0.5).steps(2, 2.0) == 5  # half of 10 rows, twice, 2 a step


def test_rows_of_their_own_are_held_out_and_not_trained(tmp_path: Path) -> None:
    file = tmp_path / "held_out.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows(3)))
    made = stream(rows(5), validation_path=str(file))
    assert shown(made.validation()) == ["q0", "q1", "q2"]
    assert sorted(shown(made.draw(2))) == ["q3", "q4"]
    with pytest.raises(ConfigError, match="no row is left to train on: all are held out"):
        stream(rows(3), validation_path=str(file)).draw(1)
    with pytest.raises(ConfigError, match=r"validation = 0\.001 holds out none of 3 rows"):
        stream(rows(3), validation=0.001).validation()
    with pytest.raises(ConfigError, match=r"held_out\.jsonl: got no row that can be .* at most 3 tokens"):
        stream(rows(5), validation_path=str(file), max_tokens=3).validation()


def test_bad_rows_are_named_and_some_may_pass(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    good = [json.dumps(row) for row in rows(3)]
    file.write_text("\n".join([good[0], "{", good[1], '{"question": "q", "answer": 4}', good[2]]))
    broken = [":2: not JSON: Expecting property name enclosed in double quotes, column 2",
              ":4: answer: got 4, expected text or messages"]  # fmt: skip
    with pytest.raises(ConfigError) as refused:
        stream(file).draw(5)
    assert str(refused.value).removeprefix(str(file)) in broken
    with pytest.raises(ConfigError) as refused:
        stream(file, max_bad_rows=1).draw(5)
    error, more = str(refused.value).removeprefix(str(file)).split("\n")
    assert error in broken and more == "data.max_bad_rows = 1: so many rows were bad before this one"
    made = stream(file, max_bad_rows=2)
    assert Counter(shown(made.draw(6))) == dict.fromkeys(["q0", "q1", "q2"], 2)
    assert sorted(made.counts.bad) == [f"{file}{each}" for each in broken]
    assert made.notes[-1].startswith(f"data: 2 bad rows left out, such as {file}:")
    made = stream(file, max_bad_rows=2, validation=0.5)
    made.validation()
    assert sorted(made.counts.bad) == [f"{file}{each}" for each in broken]  # they are bad whoever reads them


@pytest.mark.parametrize("first", ["{", '{"text": "q"}'])
def test_bad_rows_may_be_the_first_ones(tmp_path: Path, first: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join([first, *(json.dumps(row) for row in rows(3))]))
    for keys in ({}, {"validation_path": str(file), "sources": rows(1)}):
        with pytest.raises(ConfigError, match=r"rows\.jsonl:1: "):
            stream(keys.pop("sources", file), **keys)
    made = stream(file, max_bad_rows=1)
    assert sorted(shown(made.draw(3))) == ["q0", "q1", "q2"]
    made.draw(3)
    assert len(made.counts.bad) == 1 and made.counts.bad[0].startswith(f"{file}:1: ")


def test_what_a_template_refuses_is_a_bad_row() -> None:
    strict = (
        "{% for m in messages %}{% if 'no' in m.content %}{{ raise_exception('not this') }}{% endif %}"
        "{{ m.content + '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
    )
    with pytest.raises(ConfigError, match=r"rows\[1\]: the chat template refuses .*: not this"):
        stream(
            ({"prompt": "a", "completion": "b"}, {"prompt": "no", "completion": "b"}), template=strict
        ).draw(2)


def test_long_rows_are_cut_or_dropped_and_counted() -> None:
    long = ({"prompt": "q", "completion": "x" * 40}, {"prompt": "q" * 99, "completion": "x"})
    short = {"prompt": "q", "completion": "x"}
    size = len(stream((short,)).draw(1)[0])
    exact = stream((short,), max_tokens=size)
    assert len(exact.draw(1)[0]) == size and exact.counts.truncated == 0
    made = stream((*long, short), max_tokens=size + 10)
    assert sorted(map(len, made.draw(2))) == [size, size + 10]  # the prompt alone is too long
    made.draw(2)
    assert (made.counts.truncated, made.counts.dropped, made.counts.dialogues) == (2, 2, 4)
    made = stream((*long, short), max_tokens=size + 10, too_long="drop")
    assert [len(row) for row in made.draw(2)] == [size, size]
    visited = made.state()["positions"][0]
    assert 4 <= visited <= 6 and (made.counts.truncated, made.counts.dropped) == (0, visited - 2)
    assert made.notes[-1] == f"data: {visited - 2} rows left out, longer than {size + 10} tokens"


def test_roles_and_turns_are_those_of_the_settings() -> None:
    talk = (
        {
            "messages": [
                {"role": role, "content": f"{role}{i}"} for i in (1, 2) for role in ("user", "assistant")
            ]
        },
    )
    (row,) = stream(talk, roles=("user", "assistant"), turns="last").draw(1)
    trained = {
        role: renderer("chatml").decode(row.tokens[mask].tolist()) for role, mask in row.trained.items()
    }
    assert trained == {"user": "user2", "assistant": "assistant2<|im_end|>"}
    with pytest.raises(
        ConfigError, match=r"no row is left to train on: \d dialogues left out, without words of tool"
    ):
        stream(talk, roles=("tool",)).draw(1)


def test_a_run_says_how_rows_are_read_and_what_a_template_rewrites() -> None:
    talk = {"messages": [
        {"role": "user", "content": "1?"}, {"role": "assistant", "reasoning_content": "a", "content": "One."},
        {"role": "user", "content": "2?"}, {"role": "assistant", "content": "Two."},
    ]}  # fmt: skip
    made = stream((talk, talk), template="qwen3", history="template")
    held = stream((talk, talk), template="qwen3", history="template", validation=0.999, validation_rows=2)
    assert len(held.validation()) == 4  # of two dialogues
    first = "<|im_start|>user 1?<|im_end|> <|im_start|>assistant "
    assert made.notes == (
        "rows: 2 rows, weight 1, read as dialogue: the dialogue in `messages`, whose last answer is expected",
        "rows[0] becomes 2 rows, as the chat template rewrites earlier turns; what stands in ⟦ ⟧ is trained:",
        f"  {first}⟦<think> a </think> One.<|im_end|>⟧",
        f"  {first}One.<|im_end|> <|im_start|>user 2?<|im_end|> <|im_start|>assistant ⟦Two.<|im_end|>⟧",
    )
    assert len(made.draw(2)) == 4 and made.counts.rewritten == 2
    system = {"role": "system", "content": f"begin {'x' * 900} end"}
    long = stream(({"messages": [system, *talk["messages"]]},), turns="last")
    assert re.fullmatch(
        r"  <\|im_start\|>system begin x+ \.\.\. .*assistant ⟦Two\.<\|im_end\|>⟧", long.notes[-1]
    )
    kept = stream((talk,), template="qwen3")
    assert len(kept.draw(1)) == 1 and kept.notes[1] == "rows[0]; what stands in ⟦ ⟧ is trained:"


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        (
            {"validation": 0.1, "validation_path": "x"},
            "expected one of validation and validation_path, got both",
        ),
        ({"roles": ("user", "user")}, "roles: got user, user, expected each role once"),
        ({"roles": ()}, "at least 1 item"),
        ({"sources": ()}, "at least 1 item"),
        ({"validation": 1.0}, "less than 1"),
    ],
)
def test_settings_that_contradict_themselves_are_refused(keys: dict[str, Any], error: str) -> None:
    with pytest.raises(ValidationError, match=error):
        SupervisedData(**{"sources": (SupervisedSource(rows=rows(1)),), **keys})


def test_a_source_without_rows_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match=r"empty\.jsonl: got no rows, expected dialogues"):
        stream(tmp_path / "empty.jsonl")
    with pytest.raises(ConfigError, match="no column looks like a prompt: got 'text'"):
        stream(({"text": "q"},))


def test_a_column_weighs_the_loss_of_each_row() -> None:
    weights = {"q0": 0.25, "q1": 2, "q2": 0.0, "q3": None}
    given = tuple({**row, "how": {"good": weights[row["question"]]}} for row in rows(4))
    source = SupervisedSource(rows=given, weigh_by="how.good")
    made = SupervisedStream(SupervisedData(sources=(source,)), renderer("chatml"), 3)
    found = made.draw(2)  # two are left out
    by_question = dict(zip(shown(found), found, strict=True))
    assert {question: row.weight for question, row in by_question.items()} == {"q0": 0.25, "q1": 2.0}
    assert made.left_out == "2 dialogues left out, without words of assistant, or of weight 0"
    for row in found:
        sample = supervised_sample(row, "x")
        assert sample.loss_weights.tolist() == (row.trained["assistant"] * row.weight).tolist()


@pytest.mark.parametrize("weight", [-1, "2", True, float("nan"), float("inf"), 1e39, 10**400])
def test_a_weight_that_is_none_is_a_bad_row(weight: Any) -> None:
    given = ({"question": "q", "answer": "a", "good": weight},)
    source = SupervisedSource(rows=given, weigh_by="good")
    made = SupervisedStream(SupervisedData(sources=(source,)), renderer("chatml"), 3)
    with pytest.raises(ConfigError, match=r"rows\[0\]: good: got .*, expected a number from 0 to 1e\+30"):
        made.draw(1)


def test_a_column_of_weights_must_be_there() -> None:
    source = SupervisedSource(rows=rows(1), weigh_by="good")
    made = SupervisedStream(SupervisedData(sources=(source,)), renderer("chatml"), 3)
    with pytest.raises(ConfigError, match="good"):
        made.draw(1)
