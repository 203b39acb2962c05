"""OpenAI's own client against the server, over a connection and with a key."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import openai
import pytest
from tests.server.running import MODEL, guarded, listening, says

from silva.rendering.renderer import Renderer

KEY = "s3cret"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
HELLO: Any = [{"role": "user", "content": "hi"}]
ClientOf = Callable[..., AbstractAsyncContextManager[openai.AsyncOpenAI]]


@pytest.fixture
def client_of(renderer: Renderer) -> ClientOf:
    """A client of a server with these replies."""

    @asynccontextmanager
    async def made(*texts: str, key: str = KEY) -> AsyncIterator[openai.AsyncOpenAI]:
        app = guarded(says(renderer, *texts, context=4096), renderer, key=KEY)
        async with (
            listening(app) as address,
            openai.AsyncOpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0) as client,
        ):
            yield client

    return made


async def test_models_and_completions(client_of: ClientOf) -> None:
    async with client_of("two") as client:
        assert [model.id async for model in client.models.list()] == [MODEL]
        answer = await client.completions.create(model=MODEL, prompt="one", max_tokens=9, logprobs=1, n=2)
        assert [choice.text for choice in answer.choices] == ["two", "two"]
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None and logprobs.tokens == ["t", "w", "o", "<|end|>"]
        assert answer.usage is not None and answer.usage.completion_tokens == 8


async def test_a_stream_of_completions(client_of: ClientOf) -> None:
    async with client_of("yes", "no") as client:
        asked: Any = {"prompt": ["one", "two"], "max_tokens": 9, "stream_options": {"include_usage": True}}
        stream = await client.completions.create(model=MODEL, stream=True, **asked)
        chunks = [chunk async for chunk in stream]
        pieces = [(choice.index, choice.text) for chunk in chunks for choice in chunk.choices]
        assert [text for index, text in pieces if index == 0] == ["y", "e", "s", ""]
        assert [text for index, text in pieces if index == 1] == ["n", "o", ""]
        assert chunks[-1].usage is not None and chunks[-1].usage.prompt_tokens == 6


async def test_chat_with_tools_over_two_turns(client_of: ClientOf) -> None:
    async with client_of(CALL, "it is 2") as client:
        first = await client.chat.completions.create(model=MODEL, messages=HELLO, tools=TOOLS)
        message = first.choices[0].message
        assert first.choices[0].finish_reason == "tool_calls" and message.tool_calls is not None
        call = message.tool_calls[0]
        assert call.type == "function" and call.function.arguments == '{"a": 1}'
        result: Any = {"role": "tool", "tool_call_id": call.id, "content": "2"}
        dialogue: Any = [*HELLO, message, result]
        second = await client.chat.completions.create(model=MODEL, messages=dialogue, tools=TOOLS)
        assert (second.choices[0].message.content, second.choices[0].finish_reason) == ("it is 2", "stop")
        third: Any = [*HELLO, message.model_dump(), result]  # with every field that the client knows
        assert (await client.chat.completions.create(model=MODEL, messages=third)).choices


async def test_a_stream_of_chat(client_of: ClientOf) -> None:
    async with client_of("hello", CALL) as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=HELLO, tools=TOOLS, stream=True, n=2, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        content: dict[int, str] = {}
        ends: dict[int, str] = {}
        calls = []
        for choice in (choice for chunk in chunks for choice in chunk.choices):
            content[choice.index] = content.get(choice.index, "") + (choice.delta.content or "")
            calls += choice.delta.tool_calls or []
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
        assert (content, ends) == ({0: "hello", 1: ""}, {0: "stop", 1: "tool_calls"})
        functions = [(call.index, call.function) for call in calls]
        assert [(i, f and f.name, f and f.arguments) for i, f in functions] == [
            (0, "add", ""),
            (0, None, '{"a": 1}'),
        ]
        assert chunks[-1].usage is not None and not chunks[-1].choices
        async with client.chat.completions.stream(model=MODEL, messages=HELLO, tools=TOOLS) as events:
            final = await events.get_final_completion()
        assert final.choices[0].message.tool_calls is not None


async def test_errors_are_those_of_the_client(client_of: ClientOf) -> None:
    async with client_of("yes") as client:
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await client.chat.completions.create(model=MODEL, messages=HELLO, temperature=-1)
        with pytest.raises(openai.NotFoundError, match="this server has 'tiny'"):
            await client.chat.completions.create(model="gpt-9", messages=HELLO)
    async with client_of("yes", key="wrong") as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()
