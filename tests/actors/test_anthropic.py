"""Anthropic's API through its SDK and a server on localhost: forms by hand, and what each fault does."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.engines.chat_server import serving
from tests.virtual_clock import NoWait

from silva.actors.anthropic import AnthropicModel
from silva.actors.anthropic_messages import anthropic_dialogue, read_anthropic
from silva.actors.chat_messages import chat_messages
from silva.actors.settings import AnthropicEngineSettings
from silva.config.sections import EpisodeLimits, Eval, Sampling
from silva.environments.worlds.guess_number import GuessNumber
from silva.errors import CapabilityError, EngineError
from silva.evaluation.evaluator import Evaluation, evaluate
from silva.ports import use_clock
from silva.types import Message, ToolCall, ToolSpec

pytest.importorskip("anthropic")
KEY = "sk-ant-123456"


def said(*content: dict[str, Any] | str, stop: str = "end_turn", **usage: int) -> dict[str, Any]:
    blocks = [{"type": "text", "text": each} if isinstance(each, str) else each for each in content]
    return {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": blocks,
            "stop_reason": stop, "stop_sequence": None,
            "usage": {"input_tokens": 10, "output_tokens": 4, **usage}}  # fmt: skip


def refused(status: int, kind: str, words: str) -> tuple[int, dict[str, str], Any]:
    return status, {}, {"type": "error", "error": {"type": kind, "message": words}, "request_id": "r"}


def play(script: Any, monkeypatch, sampling: Sampling | None = None, **settings: Any):
    monkeypatch.setenv("ANTHROPIC_API_KEY", KEY)
    world = GuessNumber(numbers=3, guesses=2, eval_size=4)

    async def go(url: str) -> tuple[Evaluation, AnthropicModel]:
        chosen = AnthropicEngineSettings(model="m", base_url=url.removesuffix("/v1"), **settings)
        actor = AnthropicModel(chosen, sampling or Sampling(), system="Be short.")
        try:
            found = await evaluate(
                {"g": world.taskset()}, actor, None, Eval(tasks=2), EpisodeLimits(), seed=0, redo=0
            )
            return found[0], actor
        finally:
            await actor.close()

    with serving(script) as server, use_clock(NoWait()):
        found, actor = asyncio.run(go(server.url))
    return found, server, actor


def test_a_game_is_played_and_counted(monkeypatch) -> None:
    script = lambda number, body: said("1", cache_read_input_tokens=6, cache_creation_input_tokens=4)  # noqa: E731
    sampling = Sampling(temperature=0.5, top_k=5, stop=("\n\n",))
    found, server, actor = play(
        script, monkeypatch, sampling, input_price=1e6, cached_price=1e5, output_price=2e6
    )
    assert found.left_out == 0 and len(found.episodes) == 2
    body = server.bodies[0]
    assert {key: body[key] for key in body if key != "messages"} == {
        "model": "m", "max_tokens": 128, "system": "Be short.", "temperature": 0.5, "top_k": 5,
        "stop_sequences": ["\n\n"],
    }  # fmt: skip
    assert [message["role"] for message in body["messages"]] == ["user"]
    assert any(KEY in value for value in server.headers[0].values()) and KEY not in str(body)
    count = len(server.bodies)
    assert (actor.counts.input, actor.counts.cached, actor.counts.output) == (
        20 * count,
        6 * count,
        4 * count,
    )
    assert actor.counts.cost == pytest.approx(count * (14 * 1.0 + 6 * 0.1 + 4 * 2.0))


def test_calls_and_results_have_the_form_of_the_api() -> None:
    """The dialogue of Anthropic's documentation of tool use, with the calls of one reply answered at once."""
    call = ToolCall("get_weather", {"location": "Paris"}, "toolu_1")
    other = ToolCall("get_time", {}, "toolu_2")
    dialogue = [
        Message("system", "You help."),
        Message("user", "Weather and time?"),
        Message("assistant", "I look.", tool_calls=(call, other)),
        Message("tool", "15 degrees", name="get_weather"),
        Message("tool", "noon", name="get_time"),
        Message("user", "Well?"),
    ]
    system, messages = anthropic_dialogue(chat_messages(dialogue))
    assert system == "You help."
    assert messages == [
        {"role": "user", "content": [{"type": "text", "text": "Weather and time?"}]},
        {"role": "assistant", "content": [
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"location": "Paris"}},
            {"type": "tool_use", "id": "toolu_2", "name": "get_time", "input": {}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": "15 degrees"},
            {"type": "tool_result", "tool_use_id": "toolu_2", "content": "noon"},
            {"type": "text", "text": "Well?"},
        ]},
    ]  # fmt: skip


def test_an_answer_with_thoughts_and_calls_is_read() -> None:
    import json

    thought = {"type": "thinking", "thinking": "Hm.", "signature": "abc"}
    use = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1}}
    tools = [ToolSpec("add", "Adds.", {"type": "object", "properties": {"a": {"type": "integer"}}})]
    found = read_anthropic(json.dumps(said(thought, "So: ", use, stop="tool_use")), tools)
    message = found.message
    assert (message.reasoning, message.content, found.finish) == ("Hm.", "So: ", "tool_calls")
    assert message.tool_calls == (ToolCall("add", {"a": 1}, "toolu_1"),)
    assert (found.usage.input, found.usage.output) == (10, 4)
    with pytest.raises(ValueError, match="type: "):
        read_anthropic('{"type": "error", "content": []}')


@pytest.mark.parametrize(
    ("answer", "failure", "words"),
    [
        (
            refused(400, "invalid_request_error", "prompt is too long: 9 tokens > 8 maximum"),
            "mask",
            "too long",
        ),
        (refused(400, "invalid_request_error", "tools: odd"), "redo", "HTTP 400: tools: odd"),
        (said("No.", stop="refusal"), "redo", "its finish_reason is 'refusal'"),
        (refused(529, "overloaded_error", "Overloaded"), "redo", "HTTP 529: Overloaded (after 2 tries)"),
    ],
    ids=["overflow", "bad request", "refusal", "overloaded"],
)
def test_faults_of_one_episode(monkeypatch, answer, failure: str, words: str) -> None:
    found, _, _ = play(lambda number, body: answer, monkeypatch, retries=1)
    (_, trajectory), _ = found.episodes
    assert trajectory.failure == failure and words in trajectory.error


def test_an_overloaded_server_is_asked_again(monkeypatch) -> None:
    busy = refused(529, "overloaded_error", "Overloaded")
    found, _, actor = play(lambda number, body: busy if number < 2 else said("1"), monkeypatch)
    assert found.left_out == 0 and actor.counts.retries == 2


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            refused(400, "invalid_request_error", "Your credit balance is too low"),
            "has no money left",
        ),
        (
            refused(401, "authentication_error", f"invalid x-api-key {KEY}"),
            "the key in ANTHROPIC_API_KEY",
        ),
        (refused(404, "not_found_error", "model: m"), "check engine.base_url"),
    ],
    ids=["credit", "key", "model"],
)
def test_faults_that_end_the_evaluation(monkeypatch, answer, words: str) -> None:
    with pytest.raises(EngineError, match=words) as caught:
        play(lambda number, body: answer, monkeypatch)
    assert KEY not in str(caught.value)


def test_what_the_api_cannot_do_is_refused(monkeypatch) -> None:
    with pytest.raises(CapabilityError, match=r"temperature = 1\.5: the API takes at most 1"):
        play(lambda number, body: said("1"), monkeypatch, Sampling(temperature=1.5))
    with pytest.raises(CapabilityError, match=r"min_p = 0\.1"):
        play(lambda number, body: said("1"), monkeypatch, Sampling(min_p=0.1))
