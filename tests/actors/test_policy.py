"""What a policy asks of its engine and makes of the answer."""

from __future__ import annotations

from dataclasses import replace

from scripted_engine import ScriptedEngine
from tests.actors.asking import SEARCH, ask

from silva.actors.policy import Policy
from silva.config.sections import Sampling
from silva.models.tiny import tiny_tokenizer
from silva.rendering.renderer import Renderer
from silva.types import Completion, Segment

TAGS = Renderer(tiny_tokenizer(), tools="tags")


def test_a_policy_samples_as_configured_and_keeps_what_was_recorded() -> None:
    class Engine(ScriptedEngine):
        async def sample(self, tokens, params, *, session=""):
            await super().sample(tokens, params, session=session)
            return Completion((104, 257), (-1.0, -2.0), (-1.5, -2.5), (0.1, 0.2), (3, 4), "stop_token")

    engine = Engine(lambda tokens, params: ())
    sampling = Sampling(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, stop=("###",))
    reply = ask(Policy(engine, Renderer(tiny_tokenizer()), sampling))
    ((prompt, params, session),) = engine.requests
    assert (prompt, session, params.max_tokens, params.seed) == ((1, 2, 3), "s", 9, 4)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.7, 0.9, 5, 0.1)
    assert params.stop == ("###",) and params.stop_token_ids == (257,)
    expected = Segment("policy", (104, 257), (-1.0, -2.0), (-1.5, -2.5), (0.1, 0.2), (3, 4), 0.7)
    assert reply.segments == (expected,)
    assert reply.message.role == "assistant" and reply.stop_reason == "stop_token"


def test_plain_tags_of_tools_stop_a_policy_and_the_text_past_them_is_cut() -> None:
    text = "<search>cats</search> and"
    engine = ScriptedEngine(lambda tokens, params: TAGS.encode(text))
    reply = ask(Policy(engine, TAGS, Sampling(stop=("###",))), tools=(SEARCH,), max_tokens=100)
    assert engine.requests[0][1].stop == ("###", "</search>")
    assert [(c.name, c.arguments) for c in reply.message.tool_calls] == [("search", {"query": "cats"})]
    assert reply.message.raw == "<search>cats</search>"
    assert TAGS.decode(reply.segments[0].tokens) == text  # all that was sampled


def test_a_tag_inside_a_thought_does_not_end_the_reply() -> None:
    """The policy goes on from there: one reply, of tokens that it sampled."""
    parts = iter(["<think>try <search>x</search>", " or </search>", " no</think><search>cats</search>"])

    class Engine(ScriptedEngine):
        async def sample(self, tokens, params, *, session=""):
            return replace(await super().sample(tokens, params, session=session), stop_reason="stop_string")

    engine = Engine(lambda tokens, params: TAGS.encode(next(parts)))
    reply = ask(Policy(engine, TAGS, Sampling()), tools=(SEARCH,), max_tokens=100)
    said = "<think>try <search>x</search> or </search> no</think><search>cats</search>"
    assert (reply.message.raw, reply.message.reasoning) == (said, "try <search>x</search> or </search> no")
    assert [c.arguments for c in reply.message.tool_calls] == [{"query": "cats"}]
    asked = [(TAGS.decode(prompt[3:]), params.max_tokens) for prompt, params, _ in engine.requests]
    assert asked == [("", 100), (said[:29], 71), (said[:42], 58)]
    assert len({params.seed for _, params, _ in engine.requests}) == 3
    (segment,) = reply.segments
    assert segment.tokens == tuple(TAGS.encode(said)) and len(segment.logprobs) == len(said)
