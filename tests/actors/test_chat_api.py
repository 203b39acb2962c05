"""A chat API through the real SDK and a server on localhost: what becomes of each fault, and of the key."""

from __future__ import annotations

import asyncio
import json
import logging
import zlib
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
from tests.engines.chat_server import Answer, Script, Server, called, said, serving
from tests.tools.web_server import CUT, HANG
from tests.virtual_clock import NoWait

from silva.actors.chat_api import ChatModel
from silva.actors.settings import OpenAIEngineSettings
from silva.config.sections import EpisodeLimits, Eval, Sampling
from silva.environments.worlds.calculator import Calculator
from silva.environments.worlds.frozen_lake import FrozenLake
from silva.environments.worlds.guess_number import GuessNumber
from silva.errors import CapabilityError, ConfigError, CostLimit, EngineError
from silva.evaluation.evaluator import Evaluation, evaluate, records
from silva.models.tiny import tiny_tokenizer
from silva.ports import use_clock
from silva.protocols import Reply, Request
from silva.rendering.renderer import Renderer
from silva.rendering.tool_calls import parse_hermes
from silva.types import Segment

KEY = "sk-test-123456"
pytest.importorskip("openai")


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


@pytest.fixture
def clock():
    with use_clock(NoWait()) as fake:
        yield fake


def chat(url: str, sampling: Sampling | None = None, **settings: Any) -> ChatModel:
    return ChatModel(OpenAIEngineSettings(model="m", base_url=url, **settings), sampling or Sampling())


def play(
    script: Script,
    *worlds: Any,
    tasks: int = 1,
    redo: int = 0,
    sampling: Sampling | None = None,
    **settings: Any,
) -> tuple[list[Evaluation], Server, ChatModel]:
    """An evaluation of `worlds` (guess_number) through a server that answers with `script`."""
    worlds = worlds or (GuessNumber(numbers=3, guesses=2, eval_size=100),)

    async def go(url: str) -> tuple[list[Evaluation], ChatModel]:
        actor = chat(url, sampling, **settings)
        try:
            tasksets = {world.label: world.taskset() for world in worlds}
            return await evaluate(
                tasksets, actor, None, Eval(tasks=tasks), EpisodeLimits(), seed=0, redo=redo
            ), actor
        finally:
            await actor.close()

    with serving(script) as server:
        evaluations, actor = asyncio.run(go(server.url))
    return evaluations, server, actor


def failing(*faults: Answer) -> Script:
    """The first requests meet `faults`, the others are answered."""
    return lambda number, body: faults[number] if number < len(faults) else said("1")


# --- the same replies, the same score

MOVES = ("Right", "Down", "Right || Down", "Down || Right || Down", "nothing")


def words(question: str, turn: int) -> str:
    """What is said in a turn of a dialogue, as text with calls in <tool_call>."""
    number = zlib.crc32(question.encode())
    if question.startswith("You walk"):
        return f"<think>Go.</think><answer>{MOVES[(number + turn) % len(MOVES)]}</answer>"
    if question.startswith("Guess"):
        return f"I say {number % 90 + turn}"
    if turn == 0 and number % 5 == 0:
        return '<tool_call>\n{"name": "calculator", "arguments": {"expression": \n</tool_call>'
    *_, a, operator, b = question.replace("?", "").split()
    if turn < 2:
        call = {"name": "calculator", "arguments": {"expression": f"{a} {operator} {b}"}}
        return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
    return str(eval_sum(a, operator, b) + number % 2)


def eval_sum(a: str, operator: str, b: str) -> int:
    return int(a) + int(b) if operator == "+" else int(a) - int(b)


class Local:
    """Says the same through tokens."""

    reads_tokens: ClassVar[bool] = True

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer

    async def reply(self, request: Request) -> Reply:
        assert len(request.tokens) > 0
        turn = sum(message.role == "assistant" for message in request.messages)
        tokens = tuple(self.renderer.encode_reply(words(request.messages[0].content, turn)))
        message = self.renderer.parse(tokens, tools=request.tools)
        return Reply((Segment("expert", tokens),), message, "stop_token")


def through_the_api(number: int, body: dict[str, Any]) -> Answer:
    """The same words; calls as the API gives them."""
    turn = sum(message["role"] == "assistant" for message in body["messages"])
    text = words(body["messages"][0]["content"], turn)
    if "<tool_call>" not in text:
        return said(text)
    parsed = parse_hermes(text)
    calls = [("calculator", f'{{"expression": "{c.arguments["expression"]}"}}') for c in parsed.calls]
    calls += [("calculator", '{"expression": ') for _ in parsed.errors]
    return said(None, finish="tool_calls", tool_calls=called(*calls))


@pytest.mark.slow
def test_worlds_have_the_score_of_the_same_replies_played_locally() -> None:
    worlds: Sequence[Any] = (FrozenLake(), GuessNumber(eval_size=24), Calculator())
    evaluations, server, actor = play(through_the_api, *worlds, tasks=24)
    renderer = Renderer(tiny_tokenizer())
    local = asyncio.run(
        evaluate(
            {world.label: world.taskset() for world in worlds},
            Local(renderer),
            renderer,
            Eval(tasks=24),
            EpisodeLimits(max_episode_tokens=100_000, max_turn_tokens=1000),
            seed=0,
        )
    )
    assert records(evaluations) == records(local)
    rates = {e.environment: e.estimates["success"].mean for e in evaluations}
    assert all(0 < rate < 1 for rate in rates.values()), rates  # what never or always wins shows nothing
    for mine, theirs in zip(evaluations, local, strict=True):
        for (_, a), (_, b) in zip(mine.episodes, theirs.episodes, strict=True):
            assert (a.rewards, a.shaped, a.metrics, a.stop_reason) == (
                b.rewards,
                b.shaped,
                b.metrics,
                b.stop_reason,
            )
            assert [m.content for t in a.turns for m in t.messages if m.role == "user"] == [
                m.content for t in b.turns for m in t.messages if m.role == "user"
            ]
    turns = sum(len(t.turns) for e in evaluations for _, t in e.episodes)
    assert len(server.bodies) == turns
    assert actor.notes == [
        f"m: {turns} requests (0 retries, 0 without a reply); {10 * turns} tokens of input (0 cached), "
        f"{4 * turns} of output"
    ]


@pytest.mark.slow
def test_a_request_says_what_the_settings_say() -> None:
    sampling = Sampling(temperature=0.5, top_p=0.9, stop=("###",))
    _, server, _ = play(failing(), Calculator(), sampling=sampling, limit_name="max_tokens")
    body = server.bodies[0]
    assert {k: body[k] for k in ("model", "max_tokens", "temperature", "top_p", "stop")} == {
        "model": "m", "max_tokens": 128, "temperature": 0.5, "top_p": 0.9, "stop": ["###"]
    }  # fmt: skip
    assert 0 <= body["seed"] < 2**31 and body["messages"][0]["role"] == "user"
    assert body["tools"][0]["function"]["name"] == "calculator"
    assert server.headers[0]["authorization"] == f"Bearer {KEY}"
    _, server, _ = play(failing())
    assert {*server.bodies[0]} == {"model", "messages", "max_completion_tokens", "seed"}


# --- faults

BUSY = {"error": {"message": "slow down", "code": "rate_limit_exceeded"}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "pause"),
    [
        ((429, {"Retry-After": "7"}, BUSY), 7.0),
        ((503, {}, b"<html>down</html>"), None),
        (CUT, None),
        (b"{", None),
        ((200, {}, {"choices": []}), None),
    ],
    ids=["429", "503", "cut", "malformed", "empty"],
)
def test_a_fault_that_passes_costs_a_pause_and_nothing_else(
    clock, fault: Answer, pause: float | None
) -> None:
    (usual,), _, _ = play(failing())
    (found,), server, actor = play(failing(fault))
    assert records([found]) == records([usual]) and found.left_out == 0
    assert len(clock.slept) == 1
    assert clock.slept[0] == pause if pause else 0.5 <= clock.slept[0] <= 1.0
    assert server.bodies[0] == server.bodies[1]
    assert actor.notes[0].startswith(f"m: {len(server.bodies)} requests (1 retries, 0 without a reply)")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "settings", "error"),
    [
        ((429, {}, BUSY), {}, "reply: HTTP 429: slow down (after 3 tries)"),
        ((429, {"Retry-After": "3600"}, BUSY), {}, "reply: HTTP 429"),
        ((500, {}, {}), {}, "reply: HTTP 500"),
        (CUT, {}, "reply: connection to http://127.0.0.1:"),
        (b"{", {}, "reply: malformed answer: Invalid JSON"),
        (HANG, {"timeout": 0.05}, "reply: no answer within engine.timeout = 0.05 s"),
        ((400, {}, {"error": {"message": "odd name"}}), {}, "reply: HTTP 400"),
        (
            (200, {}, said(None, finish="content_filter")),
            {},
            "reply: the API cut the answer: its finish_reason is 'content_filter'",
        ),
    ],
    ids=["429", "long-wait", "500", "cut", "malformed", "time-out", "400", "filter"],
)
def test_a_fault_that_stays_is_no_result_and_never_a_reward(
    clock, fault: Answer, settings, error: str
) -> None:
    (found,), server, actor = play(lambda number, body: fault, redo=1, retries=2, **settings)
    ((_, trajectory),) = found.episodes
    assert (trajectory.failure, trajectory.stop_reason, trajectory.turns) == ("redo", "error", ())
    assert trajectory.error.startswith(error), trajectory.error
    assert (found.left_out, found.estimates) == (1, {}) and "1 x reply" in found.notes()[0]
    once = isinstance(fault, tuple) and (fault[0] in (200, 400) or "Retry-After" in fault[1])
    assert len(server.bodies) == (
        2 if once else 6
    )  # the episode was played twice, each request tried 3 times
    assert "2 without a reply" in actor.notes[0]


def test_an_unreachable_api_is_no_result(clock) -> None:
    async def go() -> Evaluation:
        actor = chat("http://127.0.0.1:9/v1", retries=1, input_price=1.0, max_cost=1.0)
        (found,) = await evaluate(
            {"g": GuessNumber(eval_size=1).taskset()},
            actor,
            None,
            Eval(tasks=1),
            EpisodeLimits(),
            seed=0,
            redo=0,
        )
        assert actor._requests.counts.unknown_cost == 0.0  # nobody was there to charge for it
        return found

    found = asyncio.run(go())
    assert found.left_out == 1 and "ConnectError" in found.notes()[0]


def test_a_call_without_arguments_is_answered_by_the_world(clock) -> None:
    def script(number: int, body: dict[str, Any]) -> Answer:
        return said(None, tool_calls=called(("calculator", None))) if number == 0 else said("1")

    (found,), server, _ = play(script, Calculator(tool_required=False))
    ((_, trajectory),) = found.episodes
    first = trajectory.turns[0].messages[-1]
    assert (first.tool_calls, len(first.errors)) == ((), 1)
    assert '"arguments" of calculator are missing' in first.errors[0]
    assert trajectory.turns[0].metrics["tool_errors"] == 1.0 and trajectory.failure is None
    assert server.bodies[1]["messages"][-1]["role"] == "user"
    assert server.bodies[1]["messages"][-1]["content"].startswith("Error: tool call 1: ")


@pytest.mark.slow
@pytest.mark.parametrize(
    "body",
    [
        {"error": {"message": "too long", "code": "context_length_exceeded"}},
        {"error": {"message": "This model's maximum context length is 4096 tokens.", "code": 400}},
        {"detail": "Input length 900 exceeds the maximum allowed length"},
        {"error": {"message": "prompt is too long: 208310 tokens > 200000 maximum"}},
        {"error": {"message": "The input token count (9) exceeds the maximum number of tokens allowed (8)."}},
        {"error": {"message": "The input (9 tokens) is longer than the model's context length (8 tokens)."}},
        {"error": {"message": "`inputs` tokens + `max_new_tokens` must be <= 4096"}},
        {"error": {"message": "Too many tokens: 9"}},
    ],
)
def test_a_full_context_counts_as_not_solved(clock, body: Any) -> None:
    (found,), _, _ = play(lambda number, request: (400, {}, body))
    ((_, trajectory),) = found.episodes
    assert (trajectory.failure, trajectory.stop_reason, found.left_out) == ("mask", "context_overflow", 0)


@pytest.mark.parametrize(
    "words",
    ["max_tokens is too large: 9. This model supports at most 8 completion tokens", "temperature exceeds 2"],
)
def test_other_refusals_give_no_result_and_are_shown(clock, words: str) -> None:
    (found,), _, _ = play(lambda number, request: (400, {}, {"detail": words}))
    assert found.left_out == 1 and words in found.notes()[0]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            (401, {}, {"error": {"message": f"bad key {KEY}"}}),
            r"HTTP 401: .*bad key \*\*\*.* key in OPENAI_API_KEY",
        ),
        (
            (404, {}, {"error": {"message": "no model"}}),
            r"HTTP 404: .*check engine.base_url = .* engine.model = m",
        ),
        ((429, {}, {"error": {"message": "pay", "code": "insufficient_quota"}}), "no quota left"),
    ],
    ids=["401", "404", "quota"],
)
def test_what_would_refuse_every_request_ends_the_evaluation(clock, answer: Answer, words: str) -> None:
    with pytest.raises(EngineError, match=words) as raised:
        play(lambda number, body: answer, tasks=4)
    assert KEY not in str(raised.value) and clock.slept == []


def test_a_cap_on_costs_ends_the_evaluation_before_it_is_exceeded(clock) -> None:
    """Each request costs 10 x 10 + 4 x 20 = 180 millionths."""
    seen: list[int] = []

    def script(number: int, body: dict[str, Any]) -> Answer:
        seen.append(number)
        return said("0")

    with pytest.raises(CostLimit, match=r"engine.max_cost = 0.01 would be exceeded: 0.00\d+ spent so far"):
        play(script, tasks=100, input_price=10.0, output_price=20.0, max_cost=0.01, max_concurrent=2)
    assert 10 < len(seen) <= 0.01 / 180e-6


# --- what is refused before anything is sent, and what is never told


def test_what_a_chat_api_cannot_do_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CapabilityError, match=r"^sampling.top_k = 5: a chat API has no top_k"):
        chat("http://localhost/v1", Sampling(top_k=5))
    with pytest.raises(CapabilityError, match=r"'frozen_lake' begins the answer \('<think>'\)"):
        play(failing(), FrozenLake(prefill=True))
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(ConfigError, match=r"engine.key_variable: OPENAI_API_KEY is not set"):
        chat("http://localhost/v1")
    (found,), server, _ = play(failing(), key_variable="")
    assert found.left_out == 0 and server.headers[0]["authorization"] == "Bearer none"


def test_the_key_is_in_no_log(clock, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        (found,), _, actor = play(lambda number, body: (400, {}, {"error": {"message": f"odd {KEY}"}}))
    told = "\n".join([caplog.text, *found.notes(), repr(actor.settings), *actor.notes])
    assert "odd ***" in told and KEY not in told


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"base_url": "localhost:8000"}, "begins with http://"),
        ({"base_url": "https://me:secret@host/v1"}, "without a name or password"),
        ({"max_cost": 1.0}, "max_cost needs input_price and output_price"),
        ({"model": ""}, "at least 1 character"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        OpenAIEngineSettings(**({"model": "m"} | settings))
