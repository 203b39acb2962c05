"""The gateway: SDKs that we did not write play through it, and what is recorded is what was sampled."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from scripted_engine import ScriptedEngine
from tests.server.running import certificate, says, until

from silva.actors.policy import Policy
from silva.config.sections import EpisodeLimits, Sampling
from silva.errors import ConfigError
from silva.protocols import Endpoint
from silva.rendering.renderer import Renderer
from silva.rollouts.calls import CallRecorder
from silva.server.gateway import AGAIN, SessionGateway
from silva.types import Message, Task, ToolSpec
from silva.wire.listening import Bind

pytestmark = pytest.mark.slow
TASK = Task("t0", "agent", 3, {"question": "1 + 1?"}, "2")
LIMITS = EpisodeLimits(max_turns=1000, max_turn_tokens=400, max_episode_tokens=4096)
HELLO: list[Any] = [{"role": "user", "content": "1 + 1?"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA, "strict": True}}]
CALL = '<think>\nwell\n</think>\n\nI add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@dataclass
class Play:
    calls: CallRecorder
    endpoint: Endpoint
    engine: ScriptedEngine
    gateway: SessionGateway

    def openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.endpoint.openai, api_key="any", max_retries=0)

    def anthropic(self) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(base_url=self.endpoint.url, api_key="any", max_retries=0)

    async def post(self, path: str, *, timeout: float = 30, again: bool = False, **body: Any) -> Any:
        async with httpx2.AsyncClient(timeout=timeout, headers={AGAIN: "1"} if again else {}) as client:
            return await client.post(f"{self.endpoint.url}{path}", json=body)

    async def chat(self, messages: list[Any], **how: Any) -> Any:
        return await self.post("/v1/chat/completions", messages=messages, **how)

    def check_one_path(self, renderer: Renderer, *replies: str) -> None:
        """Turns that go on from each other, with the tokens of the engine and the renderer's between them."""
        turns = self.calls.turns()
        assert [turn.fresh for turn in turns] == [True] + [False] * (len(replies) - 1)
        asked: list[int] = []
        for turn, reply, (prompt, params, _) in zip(turns, replies, self.engine.requests, strict=True):
            asked += turn.segments[0].tokens
            assert asked == list(prompt)
            assert list(turn.reply_tokens) == renderer.encode_reply(reply)
            assert params.temperature == 0.7 and turn.reply[0].temperature == 0.7
            asked += turn.reply_tokens


@asynccontextmanager
async def playing(
    renderer: Renderer,
    *replies: str,
    engine: ScriptedEngine | None = None,
    limits: EpisodeLimits = LIMITS,
    gateway: SessionGateway | None = None,
) -> AsyncIterator[Play]:
    engine = engine or says(renderer, *replies, context=8192)
    policy = Policy(engine, renderer, Sampling(temperature=0.7))
    calls = CallRecorder(policy, renderer, limits, id="e", seed=7, label="agent")
    gateway = gateway or SessionGateway()
    async with gateway.open(calls, TASK) as endpoint:
        yield Play(calls, endpoint, engine, gateway)


async def test_the_tool_loop_of_openais_sdk_is_one_path(renderer: Renderer) -> None:
    async with playing(renderer, CALL, "it is 2", "bye") as play, play.openai() as client:
        dialogue = list(HELLO)
        for expected in ("tool_calls", "stop"):
            answer = await client.chat.completions.create(
                model="gpt-9", messages=dialogue, tools=TOOLS, temperature=0, seed=1, tool_choice="required"
            )
            (choice,) = answer.choices
            assert (answer.model, choice.finish_reason) == ("gpt-9", expected)
            dialogue.append(choice.message)
            for call in choice.message.tool_calls or ():
                dialogue.append({"role": "tool", "tool_call_id": call.id, "content": "2"})
        dialogue[-1] = dialogue[-1].model_dump()  # with every field that the client knows
        dialogue.append({"role": "user", "content": [{"type": "text", "text": "thanks"}]})
        await client.chat.completions.create(model="gpt-9", messages=dialogue, tools=TOOLS)
    play.check_one_path(renderer, CALL, "it is 2", "bye")
    spec = ToolSpec("add", "", SCHEMA)
    assert list(play.engine.requests[0][0]) == renderer.context([Message("user", "1 + 1?")], [spec])
    roles = [message.role for message in play.calls.dialogue()]
    assert roles == ["user", "assistant", "tool", "assistant", "user", "assistant"]
    assert play.calls.dialogue()[1].reasoning == "well"


async def test_a_stream_comes_token_by_token(renderer: Renderer) -> None:
    async with playing(renderer, "hello you", "bye") as play, play.openai() as client:
        stream = await client.chat.completions.create(model="m", messages=HELLO, stream=True)
        parts = [each.choices[0].delta.content async for each in stream if each.choices]
        parts = [part for part in parts if part]
        assert len(parts) > 3 and "".join(parts) == "hello you"
        said = [*HELLO, {"role": "assistant", "content": "hello you"}, {"role": "user", "content": "bye"}]
        await client.chat.completions.create(model="m", messages=said)
    play.check_one_path(renderer, "hello you", "bye")


@pytest.mark.parametrize("streams", [False, True])
async def test_the_tool_loop_of_anthropics_sdk(renderer: Renderer, streams: bool) -> None:
    async with playing(renderer, CALL, "it is 2", "bye") as play, play.anthropic() as client:
        asked: dict[str, Any] = {
            "model": "claude-9",
            "max_tokens": 1300,
            "system": [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}],
            "tools": [{"name": "add", "description": "Adds.", "input_schema": SCHEMA}],
            "thinking": {"type": "enabled", "budget_tokens": 1024},
        }
        dialogue, kinds = list(HELLO), list[list[str]]()
        for _ in range(2):
            count = await client.messages.count_tokens(
                model="claude-9", messages=dialogue, tools=asked["tools"], system=asked["system"]
            )
            if streams:
                async with client.messages.stream(messages=dialogue, **asked) as stream:
                    answer = await stream.get_final_message()
            else:
                answer = await client.messages.create(messages=dialogue, **asked)
            assert count.input_tokens == len(play.engine.requests[-1][0]) == answer.usage.input_tokens
            kinds.append([block.type for block in answer.content])
            dialogue.append({"role": "assistant", "content": answer.content})
            called = [block for block in answer.content if block.type == "tool_use"]
            assert [block.input for block in called] in ([{"a": 1}], [])
            results = [{"type": "tool_result", "tool_use_id": each.id, "content": "2"} for each in called]
            dialogue.append({"role": "user", "content": [*results, {"type": "text", "text": "go on"}]})
        assert kinds == [["thinking", "text", "tool_use"], ["text"]] and answer.stop_reason == "end_turn"
        async with client.beta.messages.stream(messages=dialogue, betas=["context-1m"], **asked) as last:
            texts = [text async for text in last.text_stream]
        assert "".join(texts) == "bye" and len(texts) > 1
    play.check_one_path(renderer, CALL, "it is 2", "bye")


@pytest.mark.parametrize("streams", [False, True])
async def test_the_tool_loop_of_responses(renderer: Renderer, streams: bool) -> None:
    async with playing(renderer, CALL, "it is 2") as play, play.openai() as client:
        tools: Any = [{"type": "function", "name": "add", "parameters": SCHEMA, "strict": True}]
        items: list[Any] = [{"role": "user", "content": "1 + 1?"}]
        for _ in range(2):
            asked: dict[str, Any] = {"model": "m", "instructions": "Be kind.", "input": items, "tools": tools}
            if streams:
                async with client.responses.stream(**asked) as stream:
                    kinds = [event.type async for event in stream]
                    answer: Any = await stream.get_final_response()
                assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
            else:
                answer = await client.responses.create(**asked)
            items += answer.output
            for item in answer.output:
                if item.type == "function_call":
                    assert item.arguments == '{"a": 1}'
                    items.append({"type": "function_call_output", "call_id": item.call_id, "output": "2"})
        assert answer.output_text == "it is 2" and answer.usage.output_tokens == len("it is 2") + 1
    play.check_one_path(renderer, CALL, "it is 2")


async def test_what_cannot_be_done_is_said(renderer: Renderer) -> None:
    limits = LIMITS.model_copy(update={"max_turns": 1, "max_episode_tokens": 300})
    async with playing(renderer, "yes", limits=limits) as play, play.openai() as client:
        ask = client.chat.completions.create
        with pytest.raises(openai.BadRequestError, match="expected text"):
            parts: Any = [{"type": "image_url", "image_url": {"url": "data:,"}}]
            await ask(model="m", messages=[{"role": "user", "content": parts}])
        with pytest.raises(openai.BadRequestError, match="nothing is stored"):
            await client.responses.create(model="m", input="hi", previous_response_id="r")
        with pytest.raises(openai.BadRequestError, match="web_search"):
            await client.responses.create(model="m", input="hi", tools=[{"type": "web_search"}])
        with pytest.raises(openai.BadRequestError, match="max_episode_tokens = 300") as overflow:
            await ask(model="m", messages=[{"role": "user", "content": "x" * 400}])
        assert overflow.value.code == "context_length_exceeded" and play.calls.limit == "context_overflow"
        async with play.anthropic() as other:
            with pytest.raises(anthropic.BadRequestError, match="a tool of type"):
                await other.messages.create(
                    model="m", max_tokens=9, messages=HELLO, tools=[{"type": "bash_20250124", "name": "bash"}]
                )
        await ask(model="m", messages=HELLO)
        with pytest.raises(openai.APIStatusError, match="max_turns = 1 calls") as over:
            await ask(model="m", messages=HELLO)
        assert over.value.status_code == 410
    assert len(play.calls.turns()) == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"messages": HELLO, "max_tokens": 9, "tool_choice": {"type": []}}),
        ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": []}]}], "max_tokens": 9}),
        (
            "/v1/messages",
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": 1}]}]},
        ),
        ("/v1/messages/count_tokens", {"messages": [None]}),
        ("/v1/responses", {"input": [{"type": "reasoning", "summary": 1.5}]}),
        ("/v1/responses", {"input": [{"type": "function_call", "call_id": "c", "arguments": None}]}),
        ("/v1/responses", {"input": [1], "tools": [[]]}),
        ("/v1/chat/completions", {"messages": [{"role": "assistant", "tool_calls": [None]}]}),
        ("/v1/chat/completions", {"messages": 7, "tools": {}}),
    ],
)
async def test_what_is_malformed_is_refused(renderer: Renderer, path: str, body: dict[str, Any]) -> None:
    async with playing(renderer, "yes") as play:
        assert (await play.post(path, **body)).status_code == 400


async def test_a_reward_is_posted_once_and_only_while_the_session_is_open(renderer: Renderer) -> None:
    async with playing(renderer, "yes") as play:
        assert (await play.post("/reward", reward=0.5, metrics={"steps": 3})).status_code == 200
        assert (await play.post("/reward", reward=1)).status_code == 409
        assert (await play.post("/reward", reward="much")).status_code == 400
    step = play.calls.posted.result()
    assert (step.rewards, step.metrics) == ({"reward": 0.5}, {"steps": 3.0})
    assert (await play.post("/reward", reward=1)).status_code == 410
    assert (await play.chat(HELLO)).status_code == 410
    async with play.gateway.open(play.calls, TASK):  # it still listens, and other sessions are no help
        assert (await play.post("/alive")).status_code == 410


class Slow(ScriptedEngine):
    """Says the word after "word-" in its prompt, once `go` is set."""

    def __init__(self, renderer: Renderer) -> None:
        def reply(tokens: Any, params: Any) -> list[int]:
            text = renderer.decode(tokens).rpartition("word-")[2].partition(".")[0]
            return renderer.encode_reply(text)

        super().__init__(reply, context=8192)
        self.go, self.asked, self.running = asyncio.Event(), list[int](), 0

    async def sample(self, tokens: Any, params: Any, *, session: str = "") -> Any:
        self.asked.append(params.seed)
        self.running += 1
        try:
            await self.go.wait()
            return await super().sample(tokens, params, session=session)
        finally:
            self.running -= 1


async def test_a_session_that_closes_answers_whoever_waits(renderer: Renderer) -> None:
    engine = Slow(renderer)
    async with playing(renderer, engine=engine) as play:
        waiting = asyncio.ensure_future(play.chat(HELLO))
        await until(lambda: engine.running == 1, "the call has begun")
    assert (await waiting).status_code == 410
    assert play.calls.turns() == () and engine.running == 0


async def test_a_client_that_goes_away_leaves_no_turn_and_asks_again_for_the_same(renderer: Renderer) -> None:
    engine = Slow(renderer)
    async with playing(renderer, engine=engine) as play:
        gone = asyncio.ensure_future(play.chat(HELLO))
        await until(lambda: engine.running == 1, "the call has begun")
        gone.cancel()
        await until(lambda: engine.running == 0, "the call has ended")
        engine.go.set()
        await play.chat(HELLO)
        assert engine.asked[0] == engine.asked[1] and len(play.calls.turns()) == 1
        await play.chat(HELLO, again=True)  # its answer was lost on the way
        assert len(engine.asked) == 2 and len(play.calls.turns()) == 1
        await play.chat(HELLO)  # asked once more on purpose
        assert engine.asked[2] != engine.asked[1]
        assert [turn.after for turn in play.calls.turns()] == ["", ""]


async def test_no_answer_is_that_of_another_call(renderer: Renderer) -> None:
    """Clients that give up, retry and cut their connections: who gets an answer gets its own."""
    engine, rng = Slow(renderer), random.Random(3)
    engine.go.set()
    async with playing(renderer, engine=engine) as play:

        async def one(number: int) -> bool:
            said = [{"role": "user", "content": f"say word-{number}."}]
            try:
                answer = await play.chat(said, timeout=rng.choice([0.001, 0.02, 0.05, 20.0]))
            except httpx2.TransportError:
                return False
            assert answer.json()["choices"][0]["message"]["content"] == str(number)
            return True

        answered = sum(await asyncio.gather(*map(one, range(60))))
        assert answered
        await until(lambda: engine.running == 0, "no call is left")
    turns = play.calls.turns()
    assert len(turns) >= answered
    for turn in turns:
        shown, reply = renderer.decode(turn.segments[0].tokens), turn.messages[-1].content
        assert f"word-{reply}." in shown


async def test_an_agent_calls_in_takes_a_task_and_is_missed_if_it_goes(renderer: Renderer) -> None:
    async with playing(renderer, "it is 2") as play, httpx2.AsyncClient() as client:
        claim = play.endpoint.url.rpartition("/")[0] + "/claim"
        play.gateway.lease = 0.2
        assert (await client.post(claim, json={})).status_code == 404
        offered = asyncio.ensure_future(play.endpoint.offer())
        await asyncio.sleep(0)
        assert (await client.post(claim, json={"environment": "other"})).status_code == 404
        told = (await client.post(claim, json={"environment": "agent"})).json()
        assert told["task"] == {"id": "t0", "environment": "agent", "data": {"question": "1 + 1?"}}
        assert told["base_url"] == play.endpoint.openai
        await offered
        with pytest.raises(ConnectionError, match=r"no sign of life for 0\.2 s"):
            await play.endpoint.outcome()
        assert (await client.post(told["reward_url"], json={"reward": None})).status_code == 200
        outcome = asyncio.ensure_future(play.endpoint.outcome())  # done, and the reward comes later
        await asyncio.sleep(0.3)
        assert not outcome.done()
        await client.post(told["reward_url"], json={"reward": 1})
        assert (await outcome).rewards == {"reward": 1.0}


async def test_other_machines_need_the_key_to_call_in_and_a_session_is_the_key_of_its_own(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All interfaces and TLS; a proxy's name is that of the address in what agents are told."""
    files = certificate(tmp_path)
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0:0: other machines .* without a key.* AGENTS_KEY"):
        SessionGateway(Bind("0.0.0.0"), key_variable="AGENTS_KEY")
    monkeypatch.setenv("AGENTS_KEY", "k3y")
    monkeypatch.setenv("SSL_CERT_FILE", files["certificate"])
    gateway = SessionGateway(
        Bind("0.0.0.0", **files), key_variable="AGENTS_KEY", url="https://forest.example:1/silva/"
    )
    async with httpx2.AsyncClient() as client, playing(renderer, "it is 2", gateway=gateway) as play:
        here = (await gateway.listen()).replace("0.0.0.0", "127.0.0.1")
        assert here.startswith("https://") and play.endpoint.url.startswith("https://forest.example:1/silva/")
        offered = asyncio.ensure_future(play.endpoint.offer())
        await asyncio.sleep(0)
        for wrong in ({}, {"authorization": "Bearer k3"}, {"x-api-key": "k3y"}):
            for path in ("/claim", "/reward", "/docs", f"/{'a' * 23}/reward"):
                answer = await client.post(here + path, json={}, headers=wrong)
                assert answer.status_code == 401, path
        own = {"authorization": "Bearer k3y"}
        assert (
            await client.post(f"{here}/claim", json={}, headers=own | {"host": "evil"})
        ).status_code == 403
        told = (
            await client.post(f"{here}/claim", json={}, headers=own | {"host": "Forest.example:1"})
        ).json()
        assert told["reward_url"] == f"{play.endpoint.url}/reward"
        await offered
        session = play.endpoint.url.rpartition("/")[2]
        async with openai.AsyncOpenAI(base_url=f"{here}/{session}/v1", api_key="any", max_retries=0) as sdk:
            said = await sdk.chat.completions.create(model="m", messages=HELLO)
        assert said.choices[0].message.content == "it is 2"
        posted = await client.post(f"{here}/{session}/reward", json={"reward": 1})
        assert posted.status_code == 200
