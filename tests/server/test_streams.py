"""Streams: they give what the answer without streaming holds, to the character, and early."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from typing import Any

import openai
import pytest
from scripted_engine import ScriptedEngine
from tests.rendering.templates import byte_tokenizer
from tests.server.running import CONTEXT, MODEL, asking, connected, guarded, listening, run, says, until

from silva.engines.local.engine import LocalEngine
from silva.errors import EngineError
from silva.protocols import OnTokens
from silva.rendering.call_forms import FORMS
from silva.rendering.codec import TokenCodec
from silva.rendering.renderer import Renderer
from silva.types import Completion, SamplingParams, ToolCall

pytestmark = pytest.mark.slow

COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"
PATHS = pytest.mark.parametrize("path", [COMPLETE, CHAT])
HELLO: Any = [{"role": "user", "content": "hi"}]
TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": "é"}}\n</tool_call>'
FRAGMENTS = (
    "a", "b ", "\n", " ", "é", "😀", "<", "<think>", "</think>", "<thi", "<tool_call>", "</tool_call>", CALL,
    CALL, "STOP", "STO", "S", "|>", "<|im_end|>", "word ", "<add>", "</add>", "<add>1</add>", "漢",
)  # fmt: skip


class Stopping(ScriptedEngine):
    """Its replies end at stop strings, as those of an engine do."""

    def __init__(self, renderer: Renderer, reply: Sequence[int]) -> None:
        super().__init__(lambda tokens, params: reply, context=4096)
        self._renderer = renderer

    async def sample(self, tokens: Sequence[int], params: SamplingParams, *, session: str = "") -> Completion:
        found = await super().sample(tokens, params, session=session)
        for count in range(1, len(found.tokens) + 1):
            kept = found.tokens[:count]
            if any(stop in self._renderer.decode(kept) for stop in params.stop):
                zeros = (0.0,) * count
                return Completion(kept, zeros, zeros, zeros, (0,) * count, "stop_string")
        return found


def both(engine: Any, renderer: Renderer, path: str, **body: Any) -> tuple[Any, list[Any]]:
    """An answer and its stream, which must be of equal choices."""
    given = {"prompt": "hi"} if path == COMPLETE else {"messages": HELLO}

    async def ask() -> tuple[Any, list[Any]]:
        async with asking(guarded(engine, renderer)) as client:
            whole = await client.post(path, json={**given, **body})
            parts = await client.post(path, json={**given, **body, "stream": True})
        assert whole.status_code == 200, whole.text
        assert parts.headers["content-type"].startswith("text/event-stream")
        *events, done = parts.text.removesuffix("\n\n").split("\n\n")
        assert done == "data: [DONE]"
        return whole.json(), [json.loads(event.removeprefix("data: ")) for event in events]

    answer, chunks = run(ask())
    found = joined(chunks, path)
    assert [found[i] for i in range(len(found))] == [plain(choice) for choice in answer["choices"]]
    return answer, chunks


def plain(choice: dict[str, Any]) -> dict[str, Any]:
    """Without what differs from one request to the next, and with one way to say that there is nothing."""
    message = choice.get("message")
    if message is not None:
        for call in message.get("tool_calls", ()):
            assert call.pop("id")
        if message["content"] is None:
            del message["content"]
    choice.get("silva", {}).pop("cached_tokens", None)  # the second time more is known
    return {name: value for name, value in choice.items() if value is not None}


def joined(chunks: Sequence[Any], path: str) -> dict[int, dict[str, Any]]:
    """What a client makes of the chunks: texts and lists one after the other."""
    found: dict[int, dict[str, Any]] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        own = found.setdefault(choice["index"], {"text": ""} if path == COMPLETE else {"message": {}})
        assert "finish_reason" not in own, "nothing comes after the end"
        if path == CHAT:
            assert own["message"] or choice["delta"] == {"role": "assistant"}, "the role comes first"
        for name, value in choice.items():
            if name == "silva":
                del value["cached_tokens"]
            if name == "delta":
                message_of(own["message"], value)
            elif value is not None and isinstance(value, list) and name == "token_ids":
                own[name] = own.get(name, []) + value
            elif value is not None and name == "logprobs":
                log = own.setdefault(name, {key: None if each is None else [] for key, each in value.items()})
                for key, each in value.items():
                    log[key] = None if each is None else log[key] + each
            elif value is not None:
                own[name] = own[name] + value if name == "text" else value
    return {index: {**choice, "index": index} for index, choice in found.items()}


def message_of(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for name, value in delta.items():
        if name == "role":
            message[name] = value
        elif name != "tool_calls":
            message[name] = message.get(name, "") + value
        for call in value if name == "tool_calls" else ():
            calls = message.setdefault("tool_calls", [])
            if call["index"] == len(calls):
                function = {**call["function"]}
                assert call["id"]
                calls.append({"type": call["type"], "function": function})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]


@pytest.mark.parametrize("template", ["chatml", "r1"])
@pytest.mark.parametrize(("path", "form"), [(COMPLETE, "hermes"), *((CHAT, form) for form in FORMS)])
def test_the_pieces_are_the_answer_whatever_is_said(path: str, template: str, form: Any) -> None:
    renderer, codec = Renderer(byte_tokenizer(template), tools=form), TokenCodec(byte_tokenizer(template))
    rng, streamed = random.Random(f"{template} {form}"), 0
    call = FORMS[form].write([ToolCall("add", {"a": "é </think>"})])
    own = [call, call[: len(call) // 2], *FORMS[form].marks, *FORMS[form].markers, FORMS[form].whole]
    for _ in range(40):
        said = [rng.choice(own if rng.random() < 0.3 else FRAGMENTS) for _ in range(rng.randrange(9))]
        reply = [t for each in said for t in codec.encode_escaped(each)]
        for _ in range(rng.randrange(3)):  # bytes, control tokens and the like
            reply.insert(rng.randrange(len(reply) + 1), rng.randrange(renderer.vocabulary))
        reply += renderer.stop_token_ids[:1] if rng.random() < 0.7 else []
        body: dict[str, Any] = {"max_tokens": rng.choice([400, len(reply) or 1])}
        body |= {"stop": ["STOP", "b \n"]} if rng.random() < 0.5 else {}
        body |= {"logprobs": True if path == CHAT else 1} if rng.random() < 0.3 else {}
        body |= {"tools": TOOLS} if path == CHAT and rng.random() < 0.7 else {}
        body |= {"echo": True} if path == COMPLETE and rng.random() < 0.3 else {}
        if reply:
            _, chunks = both(Stopping(renderer, reply), renderer, path, **body)
            streamed += len(chunks)
    assert streamed > 100


@pytest.mark.parametrize("form", FORMS)
def test_text_before_a_call_comes_as_it_grows_and_the_call_at_the_end(form: Any) -> None:
    made, arguments = byte_tokenizer("chatml"), {"a": "é"} if form != "tags" else {"input": "é"}
    renderer = Renderer(made, tools=form)
    text = "See this." + FORMS[form].between + FORMS[form].write([ToolCall("add", arguments)])
    reply = [*TokenCodec(made).encode_escaped(text), renderer.stop_token_ids[0]]
    _, chunks = both(Stopping(renderer, reply), renderer, CHAT, tools=TOOLS)
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    pieces = [delta["content"] for delta in deltas if "content" in delta]
    _, last = [delta["tool_calls"][0]["function"] for delta in deltas if "tool_calls" in delta]
    assert json.loads(last["arguments"]) == arguments
    assert "".join(pieces) == "See this." and len(pieces) > 5


@PATHS
def test_the_pieces_are_the_answer_of_a_model(engine: LocalEngine, renderer: Renderer, path: str) -> None:
    for seed in range(4):
        body = {"max_tokens": 40, "n": 2, "seed": seed, "stop": ["e", "xy"], "return_token_ids": True}
        for stop in (body["stop"], []):
            answer, chunks = both(
                engine, renderer, path, **body | {"stop": stop, "logprobs": True if path == CHAT else 0},
                stream_options={"include_usage": True},
            )  # fmt: skip
            assert answer["usage"]["completion_tokens"] == chunks[-1]["usage"]["completion_tokens"]
            assert all(chunk["usage"] is None for chunk in chunks[:-1])


def test_what_looks_like_a_tag_or_a_stop_string_waits_and_the_rest_does_not(renderer: Renderer) -> None:
    text = "one <two STOR é"
    engine = says(renderer, text, context=4096)
    _, chunks = both(engine, renderer, CHAT, stop="STOP", tools=TOOLS, max_tokens=100)
    deltas = [choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"]]
    assert deltas == ["", "o", "n", "e", " <tw", "o", " STOR", " é", ""]


class Waiting(ScriptedEngine):
    """Samples its last token when it is told to; then it may fail. `cancelled`: how often that was cut."""

    def __init__(self, renderer: Renderer, text: str, error: Exception | None = None) -> None:
        super().__init__(lambda tokens, params: renderer.encode_reply(text), context=CONTEXT)
        self.go, self.cancelled, self._error = asyncio.Event(), 0, error

    async def stream(self, tokens: Sequence[int], params: SamplingParams, on_tokens: OnTokens) -> Completion:
        found = await self.sample(tokens, params)
        on_tokens(found.tokens[:-1], found.logprobs[:-1])
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self._error is not None:
            raise self._error
        return found


def client_of(address: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="-", max_retries=0)


async def asked(client: openai.AsyncOpenAI, path: str) -> Any:
    if path == COMPLETE:
        return await client.completions.create(model=MODEL, prompt="hi", max_tokens=50, stream=True)
    return await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)


def text_of(chunk: Any) -> str:
    (choice,) = chunk.choices
    return choice.text if hasattr(choice, "text") else choice.delta.content or ""


@PATHS
async def test_the_first_piece_comes_before_the_last_token_is_sampled(renderer: Renderer, path: str) -> None:
    engine = Waiting(renderer, "hello")
    async with listening(guarded(engine, renderer)) as address, client_of(address) as client:
        text, reasons = "", []
        async for chunk in await asked(client, path):
            text += text_of(chunk)
            reasons.append(chunk.choices[0].finish_reason)
            if text == "hello" and not engine.go.is_set():
                assert reasons == [None] * len(reasons)
                engine.go.set()
        assert (text, reasons[-1]) == ("hello", "stop")


@PATHS
async def test_an_error_after_the_first_piece_is_the_last_event(renderer: Renderer, path: str) -> None:
    lines: list[str] = []
    engine = Waiting(renderer, "hello", EngineError("sampling failed: broken"))
    async with (
        listening(guarded(engine, renderer, lines=lines)) as address,
        client_of(address) as client,
        connected(address) as peer,
    ):
        text = ""
        with pytest.raises(openai.APIError, match="sampling failed: broken") as caught:
            async for chunk in await asked(client, path):
                text += text_of(chunk)
                engine.go.set()
        assert text == "hello" and caught.value.type == "EngineError"
        await until(lambda: bool(lines), "the error is in the log")
        assert (await peer.get("/alive"))["role"] == "inference"  # and it goes on
    assert "500 EngineError: sampling failed: broken" in lines[0]


async def test_an_error_before_the_first_piece_is_an_answer(renderer: Renderer) -> None:
    async with asking(guarded(says(renderer, "yes"), renderer)) as client:
        body = {"prompt": "a" * CONTEXT, "stream": True}
        answer = await client.post(COMPLETE, json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


@PATHS
async def test_a_client_that_goes_away_in_the_middle_cancels_the_sampling(
    renderer: Renderer, path: str
) -> None:
    engine = Waiting(renderer, "hello")
    async with listening(guarded(engine, renderer)) as address, client_of(address) as client:
        stream = await asked(client, path)
        async for _ in stream:
            break
        await stream.close()
        await until(lambda: engine.cancelled > 0, "the sampling is cancelled")
    assert engine.cancelled == 1
