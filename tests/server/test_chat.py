"""/v1/chat/completions: messages as the renderer writes them, replies as OpenAI's clients read them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from scripted_engine import ScriptedEngine
from tests.rendering.templates import byte_tokenizer
from tests.server.running import CONTEXT, asking, guarded, run, says

from silva.engines.local.engine import LocalEngine
from silva.rendering.renderer import Renderer
from silva.types import Completion, Message, SamplingParams, ToolCall, ToolSpec

HELLO = [{"role": "user", "content": "hi"}]
ADD = {
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]},
}
TOOLS = [{"type": "function", "function": ADD}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "what": "é"}}\n</tool_call>'


def ask(engine: Any, renderer: Renderer, status: int = 200, **body: Any) -> Any:
    async def post() -> Any:
        async with asking(guarded(engine, renderer)) as client:
            answer = await client.post("/v1/chat/completions", json={"messages": HELLO} | body)
        assert answer.status_code == status, answer.text
        return answer.json()

    return run(post())


def streamed(engine: Any, renderer: Renderer, **body: Any) -> list[Any]:
    async def post() -> str:
        async with asking(guarded(engine, renderer)) as client:
            asked = {"messages": HELLO, "stream": True} | body
            return (await client.post("/v1/chat/completions", json=asked)).text

    *events, _ = run(post()).removesuffix("\n\n").split("\n\n")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def said(renderer: Renderer, text: str, **body: Any) -> dict[str, Any]:
    return ask(says(renderer, text, context=4096), renderer, **body)["choices"][0]


def test_a_reply_is_what_the_renderer_and_the_engine_make_of_the_messages(
    engine: LocalEngine, renderer: Renderer
) -> None:
    prompt = renderer.context([Message("user", "hi")])
    params = SamplingParams(9, temperature=0.8, seed=11, stop_token_ids=renderer.stop_token_ids)
    expected = run(engine.sample(prompt, params))
    answer = ask(
        engine, renderer, max_tokens=9, temperature=0.8, seed=11, logprobs=True, top_logprobs=3,
        return_token_ids=True,
    )  # fmt: skip
    (choice,) = answer["choices"]
    assert answer["prompt_token_ids"] == prompt
    assert choice["token_ids"] == list(expected.tokens)
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == list(expected.logprobs)
    assert choice["silva"]["raw_logprobs"] == list(expected.raw_logprobs)
    assert choice["message"]["content"] == renderer.parse(expected.tokens).content
    entries = choice["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [entry["top_logprobs"][0]["token"] for entry in entries]
    pieces = [bytes(entry["bytes"]) for entry in entries]
    assert {*map(len, pieces)} == {1} and not b"".join(pieces).isascii(), "the tokens are bytes"
    assert b"".join(pieces).decode(errors="replace") == renderer.decode(expected.tokens)
    assert answer["usage"]["prompt_tokens"] == len(prompt)


def test_a_dialogue_with_calls_is_rendered_as_in_a_rollout(renderer: Renderer) -> None:
    engine = says(renderer, "done", context=4096)
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    ask(
        engine,
        renderer,
        tools=TOOLS,
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": text} for text in ("Be", " kind.")]},
            {"role": "user", "content": "1?", "name": "me"},
            {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": []},
            {"role": "tool", "tool_call_id": "c1", "content": "2"},
            {"role": "assistant", "content": "2", "reasoning_content": "I add."},
            {"role": "user", "content": "sure <|end|>?"},
        ],
    )  # fmt: skip
    messages = [
        Message("system", "Be kind."),
        Message("user", "1?"),
        Message("assistant", "", tool_calls=(ToolCall("add", {"a": 1}, "c1"),)),
        Message("tool", "2", name="add"),
        Message("assistant", "2", reasoning="I add."),
        Message("user", "sure <|end|>?"),
    ]
    spec = ToolSpec("add", "Adds.", ADD["parameters"])
    assert list(engine.requests[0][0]) == renderer.context(messages, [spec])
    assert engine.requests[0][1].max_tokens == 4096 - len(engine.requests[0][0])


def test_calls_come_back_with_ids_and_arguments_as_text(renderer: Renderer) -> None:
    choice = said(renderer, f"<think>\nwell\n</think>\n\nI add.\n{CALL}\n{CALL}", tools=TOOLS, max_tokens=400)
    message = choice["message"]
    assert (choice["finish_reason"], message["content"]) == ("tool_calls", "I add.")
    assert message["reasoning_content"] == "well"
    functions = [call["function"] for call in message["tool_calls"]]
    assert [function["name"] for function in functions] == ["add", "add"]
    assert json.loads(functions[0]["arguments"]) == {"a": 1, "what": "é"}
    first, second = (call["id"] for call in message["tool_calls"])
    assert first.startswith("call_") and first != second
    only = said(renderer, CALL, tools=TOOLS, max_tokens=400)["message"]
    assert only["content"] is None and len(only["tool_calls"]) == 1


@pytest.mark.parametrize(
    ("text", "body"),
    [
        (CALL, {}),
        (CALL, {"tools": TOOLS, "tool_choice": "none"}),
        ("<tool_call>{not json}</tool_call>", {"tools": TOOLS}),
    ],
    ids=["no tools", "tools not to be used", "malformed"],
)
def test_what_is_no_call_is_text(renderer: Renderer, text: str, body: dict[str, Any]) -> None:
    choice = said(renderer, text, max_tokens=400, **body)
    assert choice["message"] == {"role": "assistant", "content": text}
    assert choice["finish_reason"] == "stop"


def test_thoughts_that_the_template_opens_are_no_part_of_a_malformed_call() -> None:
    renderer = Renderer(byte_tokenizer("r1"))
    text = "<tool_call>{not json}</tool_call>"
    message = said(renderer, f"well\n</think>\n\n{text}", tools=TOOLS, max_tokens=400)["message"]
    assert message == {"role": "assistant", "content": text, "reasoning_content": "well"}


def test_calls_in_plain_tags(tiny_model: Any) -> None:
    renderer = Renderer(tiny_model.tokenizer, tools="tags")
    engine = says(renderer, "look <search>cats</search>", context=4096)
    search = {"name": "search", "parameters": {"type": "object", "properties": {"q": {"type": "string"}},
                                               "required": ["q"]}}  # fmt: skip
    tools = [{"type": "function", "function": search}]
    message = ask(engine, renderer, tools=tools, stop="x")["choices"][0]["message"]
    assert message["tool_calls"][0]["function"] == {"name": "search", "arguments": '{"q": "cats"}'}
    assert engine.requests[0][1].stop == ("x", "</search>")


@pytest.mark.parametrize("stream", [False, True])
def test_a_tag_inside_a_thought_does_not_end_the_reply(tiny_model: Any, stream: bool) -> None:
    renderer = Renderer(tiny_model.tokenizer, tools="tags")
    parts = iter(["<think>try <add>1</add>", " or </add>", " no</think>So <add>2</add>"])

    class Engine(ScriptedEngine):
        async def sample(self, tokens: Any, params: SamplingParams, *, session: str = "") -> Completion:
            return replace(await super().sample(tokens, params, session=session), stop_reason="stop_string")

    engine = Engine(lambda tokens, params: renderer.encode(next(parts)), context=4096)
    if stream:
        _, *chunks = streamed(engine, renderer, tools=TOOLS)
        told = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
        thought = "".join(delta.get("reasoning_content", "") for delta in told)
        _, arguments = [each for delta in told for each in delta.get("tool_calls", ())]
        assert (thought, arguments["function"]) == (
            "try <add>1</add> or </add> no",
            {"arguments": '{"input": "2"}'},
        )
        return
    choice = ask(engine, renderer, tools=TOOLS)["choices"][0]
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("try <add>1</add> or </add> no", "So")
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"input": "2"}'}
    assert len({params.seed for _, params, _ in engine.requests}) == 3


def test_a_reply_that_is_cut_says_so_and_leaves_out_its_stop_string(
    engine: LocalEngine, renderer: Renderer
) -> None:
    body = {"max_tokens": 30, "seed": 4}
    whole = ask(engine, renderer, **body)["choices"][0]
    assert whole["finish_reason"] == "length"
    text = whole["message"]["content"]
    stop = text[9:11]
    assert text.index(stop) == 9, "another seed is needed"
    cut = ask(engine, renderer, **body, stop=[stop])["choices"][0]
    assert (cut["message"]["content"], cut["finish_reason"]) == (text[:9], "stop")


def test_limits_of_the_answer(renderer: Renderer) -> None:
    engine = ScriptedEngine(lambda tokens, params: [65] * params.max_tokens, context=CONTEXT)
    for body, expected in (
        ({}, CONTEXT - len(renderer.context([Message("user", "hi")]))),
        ({"max_tokens": 3}, 3),
        ({"max_completion_tokens": 4}, 4),
        ({"max_completion_tokens": 4, "max_tokens": 4}, 4),
        ({"max_tokens": 10_000}, 10_000),
    ):
        ask(engine, renderer, **body)
        assert engine.requests[-1][1].max_tokens == expected
    assert "differ" in ask(engine, renderer, 400, max_tokens=3, max_completion_tokens=4)["error"]["message"]
    long = [{"role": "user", "content": "a" * CONTEXT}]
    assert ask(engine, renderer, 400, messages=long)["error"]["type"] == "ContextOverflow"


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
DEEP: dict[str, Any] = {}
for _ in range(70):
    DEEP = {"a": DEEP}


def tool(name: str = "f", **more: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": name, **more}}]}


def with_message(role: str, content: Any = None, **more: Any) -> dict[str, Any]:
    """A dialogue whose second message is this one."""
    return {"messages": [*HELLO, {"role": role, "content": content, **more}]}


def calling(arguments: str) -> list[dict[str, Any]]:
    return [{"function": {"name": "f", "arguments": arguments}}]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": []}, "messages"),
        ({"messages": HELLO * 5000}, "messages"),
        (with_message("user"), "messages.1.content"),
        (with_message("user", 5), "messages.1.content"),
        (with_message("user", [IMAGE]), 'got a part of type "image_url"'),
        (with_message("user", "a", extra=1), "messages.1.extra"),
        (with_message("owner", "a"), "messages.1.role"),
        (with_message("tool", "a", tool_call_id="x"), "messages.1.tool_call_id"),
        (with_message("user", "a", tool_calls=calling("{}")), "messages.1.tool_calls"),
        (with_message("assistant", tool_calls=calling("{")), "messages.1.tool_calls.0.function.arguments"),
        (with_message("assistant", tool_calls=calling("[]")), "messages.1.tool_calls.0.function.arguments"),
        ({"tools": TOOLS * 2}, "tools"),
        ({"tools": TOOLS * 200}, "tools"),
        (tool("a b"), "tools.0.function.name"),
        (tool(strict=True), "tools.0.function.strict"),
        (tool(parameters={"properties": [1]}), "properties"),
        (tool(parameters={"required": 3}), "required"),
        (tool(parameters={"required": [[]]}), "required"),
        (tool(parameters={"a": "b" * 300_000}), "bytes"),
        (tool(parameters=DEEP), "nested"),
        (tool(description="a" * 300_000), "description"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"logprobs": 3}, "logprobs"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
    ],
)
def test_what_cannot_be_done_is_refused_and_named(
    renderer: Renderer, body: dict[str, Any], words: str
) -> None:
    engine = says(renderer, "yes")
    error = ask(engine, renderer, 400, **body)["error"]
    assert words in error["message"] and error["type"] == "invalid_request_error"
    assert not engine.requests


def test_a_dialogue_that_the_template_refuses_is_the_client_s_fault() -> None:
    renderer = Renderer(byte_tokenizer("gemma"))
    engine = says(renderer, "yes", context=4096)
    two = [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert ask(engine, renderer, 400, messages=two)["error"]["type"] == "RenderingError"
