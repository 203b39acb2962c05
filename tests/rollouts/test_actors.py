"""What a policy asks of its engine and makes of the answer; who can play itself."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from scripted_engine import ScriptedEngine

from silva.errors import CapabilityError
from silva.models.tiny import tiny_tokenizer
from silva.protocols import Reply, Request
from silva.rendering.renderer import Renderer
from silva.rollouts.actors import Script, ScriptFault
from silva.types import Completion, Message, Segment, ToolSpec

TOOL = ToolSpec(
    "search", "finds", {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
)


def ask(actor: Any, environment: Any = None, **changes: Any) -> Reply:
    values: dict[str, Any] = (
        dict(label="w", messages=(), prefill="", tools=(), max_tokens=9, seed=4, session="s") | changes
    )
    request = Request(environment=environment, render=lambda: [1, 2, 3], **values)
    return asyncio.run(actor.reply(request))


def test_a_policy_samples_as_configured_and_keeps_what_was_recorded(policy) -> None:
    class Engine(ScriptedEngine):
        async def sample(self, tokens, params, *, session=""):
            await super().sample(tokens, params, session=session)
            return Completion((104, 257), (-1.0, -2.0), (-1.5, -2.5), (0.1, 0.2), (3, 4), "stop_token")

    engine = Engine(lambda tokens, params: ())
    actor = policy(engine, temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, stop=("###",))
    reply = ask(actor)
    ((prompt, params, session),) = engine.requests
    assert (prompt, session, params.max_tokens, params.seed) == ((1, 2, 3), "s", 9, 4)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.7, 0.9, 5, 0.1)
    assert params.stop == ("###",) and params.stop_token_ids == (257,)
    expected = Segment("policy", (104, 257), (-1.0, -2.0), (-1.5, -2.5), (0.1, 0.2), (3, 4), 0.7)
    assert reply.segments == (expected,)
    assert reply.message.role == "assistant" and reply.stop_reason == "stop_token"


def test_plain_tags_of_tools_stop_a_policy_and_the_text_past_them_is_cut(policy) -> None:
    renderer = Renderer(tiny_tokenizer(), tools="tags")
    engine = ScriptedEngine(lambda tokens, params: renderer.encode("<search>cats</search> and"))
    reply = ask(policy(engine, renderer, stop=("###",)), tools=(TOOL,), max_tokens=100)
    assert engine.requests[0][1].stop == ("###", "</search>")
    assert [(c.name, c.arguments) for c in reply.message.tool_calls] == [("search", {"query": "cats"})]
    assert reply.message.raw == "<search>cats</search>"
    assert (
        tiny_tokenizer().decode(reply.segments[0].tokens) == "<search>cats</search> and"
    )  # all that was sampled


def test_a_tag_inside_a_thought_does_not_end_the_reply(policy) -> None:
    """The policy goes on from there: one reply, of tokens that it sampled."""
    renderer = Renderer(tiny_tokenizer(), tools="tags")
    parts = iter(["<think>try <search>x</search>", " or </search>", " no</think><search>cats</search>"])

    class Engine(ScriptedEngine):
        async def sample(self, tokens, params, *, session=""):
            return replace(await super().sample(tokens, params, session=session), stop_reason="stop_string")

    engine = Engine(lambda tokens, params: renderer.encode(next(parts)))
    reply = ask(policy(engine, renderer), tools=(TOOL,), max_tokens=100)
    said = "<think>try <search>x</search> or </search> no</think><search>cats</search>"
    assert (reply.message.raw, reply.message.reasoning) == (said, "try <search>x</search> or </search> no")
    assert [c.arguments for c in reply.message.tool_calls] == [{"query": "cats"}]
    asked = [
        (tiny_tokenizer().decode(prompt[3:]), params.max_tokens) for prompt, params, _ in engine.requests
    ]
    assert asked == [("", 100), (said[:29], 71), (said[:42], 58)]
    assert len({params.seed for _, params, _ in engine.requests}) == 3
    (segment,) = reply.segments
    assert segment.tokens == tuple(renderer.encode(said)) and len(segment.logprobs) == len(said)


class Player:
    def expert_reply(self) -> str:
        return "<answer>up</answer>"

    def random_reply(self, seed: int) -> str:
        return f"<answer>{seed % 7}</answer>"


def test_a_script_plays_the_expert_after_its_prefill(renderer) -> None:
    reply = ask(Script(renderer), Player(), prefill="<answer>")
    tokens = (*renderer.encode("up</answer>"), renderer.stop_token_ids[0])
    assert reply.segments == (Segment("expert", tokens),)
    assert reply.message.content == "<answer>up</answer>"


def test_a_share_of_its_moves_are_mistakes_of_the_environment_s(renderer) -> None:
    replies = [ask(Script(renderer, mistakes=0.25), Player(), seed=seed) for seed in range(200)]
    wrong = [r for r in replies if r.segments[0].source == "environment"]
    assert 30 <= len(wrong) <= 70
    assert all("up" not in r.message.content for r in wrong)
    again = [ask(Script(renderer, mistakes=0.25), Player(), seed=seed) for seed in range(200)]
    assert again == replies


def test_what_cannot_play_itself_is_refused(renderer) -> None:
    with pytest.raises(
        CapabilityError, match=r"'towns' cannot play itself: .* expert_reply\(\) .* on object"
    ):
        ask(Script(renderer), object(), label="towns")


class Caller(Player):
    def expert_reply(self) -> str:
        return 'Look.\n<tool_call>\n{"name": "search", "arguments": {"query": "cats"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("form", "text"), [("hermes", Caller().expert_reply()), ("tags", "Look.\n<search>cats</search>")]
)
def test_an_expert_s_calls_are_written_in_the_form_in_use(form, text: str) -> None:
    reply = ask(Script(Renderer(tiny_tokenizer(), tools=form)), Caller(), tools=(TOOL,))
    assert tiny_tokenizer().decode(reply.segments[0].tokens[:-1]) == text
    assert [(c.name, c.arguments) for c in reply.message.tool_calls] == [("search", {"query": "cats"})]
    assert reply.message.errors == ()


def test_an_expert_that_gives_a_message_is_told_what_is_expected(renderer) -> None:
    class Wrong(Player):
        def expert_reply(self):
            return Message("assistant", "up")

    with pytest.raises(ScriptFault, match="expert_reply") as raised:
        ask(Script(renderer), Wrong())
    assert str(raised.value.__cause__) == "returned Message, expected the text of a reply (str)"


def test_a_world_without_an_expert_ends_scripted_play_at_once(renderer) -> None:
    class Mute(Player):
        def expert_reply(self):
            raise CapabilityError("no expert")

    with pytest.raises(CapabilityError, match="no expert"):
        ask(Script(renderer), Mute())
