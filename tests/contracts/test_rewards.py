"""What every reward does. A new one adds itself to `CASES`, with replies and what must be refused."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from tests.engines.chat_server import said, serving
from tests.rewards.attempts import attempt, grade

from silva.errors import RecordError, RewardError, SilvaError
from silva.protocols import ChecksTasks, Reward, Score
from silva.rewards import REWARDS
from silva.rewards.choice import AnyReward
from silva.rewards.judge import word
from silva.sandbox.walls import _chosen

READ: TypeAdapter[Any] = TypeAdapter(AnyReward)
ANSWER = "C"
RIGHT = "<think>C</think><answer>\\boxed{C}</answer>"
WRONG = "<think>C</think><answer>\\boxed{D}</answer>"
NO_TEXT: tuple[Any, ...] = (None, "", " ", [], ["C", ""], {"a": 1}, [None])
OWN = """
def exact(reply, answer):
    return reply.partition("boxed{")[2].partition("}")[0] == answer

def broken(reply):
    raise KeyError("level")
"""
DOUBLE = [{"input": "3\n", "output": "6\n"}, {"input": "21\n", "output": "42\n"}]
Change = Mapping[str, Any]


class Case(NamedTuple):
    """Settings as a configuration has them; `broken` are keys with which the grader fails at the right reply.

    refused: keys that are no settings, by what is said of them. ungradable: answers that no task may have.
    partial: replies that earn something and solve nothing. lowest: the least that an attempt may earn.
    """

    keys: Change
    answer: Any = ANSWER
    right: str = RIGHT
    wrong: str = WRONG
    partial: tuple[str, ...] = ()
    refused: Mapping[str, Change] = {}
    ungradable: tuple[Any, ...] = NO_TEXT
    broken: Change | None = None
    lowest: float = 0.0
    needs: str = ""


FAILS = {"type": "function", "function": "own.py:broken"}
EXACT, F1 = {"type": "exact_match"}, {"type": "token_f1"}
SUM: list[dict[str, Any]] = [{"reward": EXACT}, {"reward": F1, "weight": 0.5}]
CASES = {
    "exact_match": Case({}, refused={"or 'gaia'": {"rules": "no"}, "extract": {"extract": "top"}}),
    "exact_match, SQuAD's rules": Case({"rules": "squad"}),
    "exact_match, GAIA's rules": Case({"rules": "gaia"}),
    "exact_match, answer_tag": Case({"extract": "answer_tag"}, right="<answer>C</answer>"),
    "exact_match, boxed": Case({"extract": "boxed"}, right="\\boxed{C}"),
    "exact_match, last_line": Case({"extract": "last_line"}, right="so\nC"),
    "letter": Case({}, ungradable=(*NO_TEXT, "AB", 2, ["A", "B"], "Paris", True)),
    "token_f1": Case(
        {"least": 0.2}, answer="the big Nile river", right="big Nile river", wrong="Amazon",
        partial=("Nile river", "big blue Nile river"),
        refused={"greater than 0": {"solved_at": 0.0}, "equal to 1": {"least": 1.5}},
    ),
    "math": Case(
        {"workers": 1}, answer="\\frac{1}{2}", right="\\boxed{0.5}", wrong="\\boxed{2}", needs="math_verify",
        refused={"seconds": {"seconds": 0}, "workers": {"workers": 0}},
    ),
    "deep_research": Case(
        {"tools": []}, answer="Stephen Sauvestre", lowest=-1.0, ungradable=(None, "", []),
        right="<think>a</think><answer>\\boxed{Stephen Sauvestre}</answer>", wrong="Stephen Sauvestre",
        partial=("<think>a</think><answer>\\boxed{Stephen Eiffel}</answer>",),
        refused={"tag 'weighted'": {"correctness": {"type": "weighted"}}, "partial": {"partial": 1.0},
                 "format_share": {"format_share": 1.0}, "penalty": {"penalty": -1.0}},
        broken={"correctness": FAILS},
    ),
    "deep_research, shares": Case(
        {"format_share": 0.2, "think": False, "tools": [], "correctness": EXACT}, partial=(WRONG, "C")
    ),
    "function": Case(
        {"function": "own.py:exact"}, ungradable=(), broken=FAILS,
        refused={"timeout": {"timeout": 0}, "'messages' or 'text'": {"completions": "lines"}},
    ),
    "instructions": Case(
        {}, answer={"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": ["river"]}]},
        right="A river.", wrong="A rover.", needs="if_verifiable",
        refused={"'ifeval' or": {"benchmark": "no"}},
    ),
    "judge": Case(
        {"model": "j", "key_variable": "", "cache": "", "retries": 0}, needs="openai",
        refused={"expected an odd number": {"votes": 2}, "temperature": {"temperature": -1},
                 "without a name or password": {"base_url": "http://me:secret@host/v1"}},
        broken={"base_url": "http://127.0.0.1:9/v1"},
    ),
    "code_tests": Case(
        {"partial": 0.9, "seconds": 20.0}, answer=DOUBLE, right="```python\nprint(2 * int(input()))\n```",
        wrong="```python\nprint(0)\n```", partial=("```python\nprint(6)\n```",), needs="walls",
        refused={"keep_state: each test runs": {"keep_state": True}, "partial": {"partial": 1.0}},
        ungradable=(None, "", "{}", [], [{"input": "1"}], {"inputs": ["1"], "outputs": []},
                    [{"input": 1, "output": 2}], {"fn_name": "f(", "inputs": [[1]], "outputs": [1]},
                    {"fn_name": "f", "inputs": ["1"], "outputs": [1]}, 5),
    ),
    "weighted": Case(
        {"parts": SUM, "partial": 0.5}, answer="big Nile", right="big Nile", wrong="Amazon",
        partial=("Nile",),
        refused={"at least 1 item": {"parts": []},
                 "tag 'weighted'": {"parts": [{"reward": {"type": "weighted"}}]},
                 "are called token_f1; give each a `name`": {"parts": [*SUM, {"reward": F1}]},
                 "`decides` at one part": {"parts": [{**part, "decides": True} for part in SUM]}},
        broken={"parts": [*SUM, {"reward": FAILS}]},
    ),
}  # fmt: skip


def made(name: str, **more: Any) -> Any:
    """The settings of a case."""
    return READ.validate_json(json.dumps({"type": name.partition(",")[0], **CASES[name].keys, **more}))


def fair(index: int, body: Any) -> Any:
    """A judge that compares texts."""
    case, _ = json.JSONDecoder().raw_decode(body["messages"][1]["content"])
    says = "correct" if case["answer"] in case["references"] else "wrong"
    return said(f"{word(body['messages'])}: {says}")


@pytest.fixture(scope="module")
def judge_url() -> Iterator[str]:
    with serving(fair) as server:
        yield server.url


@pytest.fixture(autouse=True)
def _own_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)


Build = Callable[..., Reward]


@pytest.fixture
def build(request: pytest.FixtureRequest) -> Build:
    """Of the settings of a case, with more keys."""

    def make(name: str, **more: Any) -> Reward:
        skip_without(CASES[name].needs)
        if name == "judge" and "base_url" not in more:
            more["base_url"] = request.getfixturevalue("judge_url")
        reward: Reward = made(name, **more).build()
        return reward

    return make


def skip_without(part: str) -> None:
    if part == "walls":
        if isinstance(walls := _chosen("auto"), str):
            pytest.skip(walls)
    elif part and importlib.util.find_spec(part) is None:
        pytest.skip(f"needs {part}")


every = pytest.mark.parametrize("name", CASES)


def test_every_reward_is_looked_at() -> None:
    assert {name.partition(",")[0] for name in CASES} == set(REWARDS)


@every
def test_settings_are_the_same_after_json(name: str) -> None:
    settings_ = made(name)
    assert READ.validate_json(settings_.model_dump_json()) == settings_


@every
def test_settings_that_make_no_sense_are_refused(name: str) -> None:
    for message, keys in {**CASES[name].refused, "no_such_key": {"no_such_key": 1}}.items():
        with pytest.raises(ValidationError, match=message):
            made(name, **keys)


@pytest.mark.slow
@every
def test_only_a_solution_is_worth_one(name: str, build: Build) -> None:
    """Right, partly right, wrong, nothing, a flood, characters that nobody sees or of other scripts."""
    case, reward = CASES[name], build(name)
    solution = grade(reward, case.right, case.answer)
    assert solution.solved and solution.value >= 1.0
    for reply in case.partial:
        score = grade(reward, reply, case.answer)
        assert not score.solved and 0 < score.value < 1, reply
    if (known := made(name).reward_range) is not None:
        assert known[0] == case.lowest and solution.value <= known[1]
    for reply in (case.wrong, "", " \n", "\u200b", "\x00", "<answer>", "\\boxed{", "答え: С", "🙂" * 50_000,
                  "9" * 100_000, "(" * 100_000):  # fmt: skip
        score = grade(reward, reply, case.answer)
        assert not score.solved and case.lowest <= score.value < 1, reply[:20]


@every
def test_the_same_attempt_has_the_same_score_beside_any_other(name: str, build: Build) -> None:
    case, reward = CASES[name], build(name)

    async def run() -> list[Score]:
        replies = (case.right, case.wrong, *case.partial)
        return await asyncio.gather(
            *(reward.score(attempt(r, case.answer)) for r in [*replies, *replies[::-1]])
        )

    scores = asyncio.run(run())
    assert scores == scores[::-1] and scores[0].solved
    assert all(type(value) is float for score in scores for value in (score.value, *score.metrics.values()))


@every
def test_a_task_that_cannot_be_graded_is_an_error_before_and_after_an_attempt(
    name: str, build: Build
) -> None:
    case, reward = CASES[name], build(name)
    if isinstance(reward, ChecksTasks):
        reward.check(case.answer, {})
    for answer in case.ungradable:
        with pytest.raises(RecordError, match="answer of the task: got"):
            grade(reward, case.right, answer)
        assert isinstance(reward, ChecksTasks)
        with pytest.raises(RecordError, match="answer of the task: got"):
            reward.check(answer, {})


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.broken])
def test_a_grader_that_fails_leaves_no_result(name: str, build: Build) -> None:
    case = CASES[name]
    with pytest.raises(RewardError) as caught:
        grade(build(name, **case.broken or {}), case.right, case.answer)
    assert isinstance(caught.value, SilvaError) and str(caught.value).startswith("reward ")


PIECES = ["<answer>", "</answer>", "<think>", "</think>", "\\boxed{", "}", "{", "A", "B", "C", " or ", "\n",
          "The answer is ", "####", ".", "not ", "(C)", "c", "C.", " ", "\u200b", "$"]  # fmt: skip
LETTERED = [name for name, case in CASES.items() if case.answer == ANSWER and not case.needs]


@pytest.mark.slow
@pytest.mark.parametrize("name", LETTERED)
@settings(max_examples=60)
@given(reply=st.lists(st.sampled_from(PIECES), max_size=8).map("".join) | st.text(max_size=30))
@example(reply=RIGHT)
def test_no_text_that_solves_nothing_is_worth_a_solution(name: str, reply: str) -> None:
    score = grade(made(name).build(), reply, ANSWER)
    assert score.value >= 1.0 if score.solved else score.value < 1.0
