"""Calls of a program as turns: what goes on from what, which tokens it has, and which of them are trained."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from silva.errors import ContextOverflow, PartLost
from silva.rollouts.calls import CallRecorder
from silva.rollouts.samples import trajectory_samples
from silva.rollouts.state import End, State, result
from silva.types import Message, Sample, ToolSpec

ADD = ToolSpec("add", "Adds.", {"type": "object", "properties": {}})


def user(text: str) -> Message:
    return Message("user", text)


def said(text: str) -> Message:
    return Message("assistant", text)


@pytest.fixture
def calls(policy, speaker, renderer, limits):
    """Calls of one episode, whose model gives these replies."""

    def make(*replies: str, **numbers: int) -> CallRecorder:
        most = {"max_turns": 100, "max_turn_tokens": 200, "max_episode_tokens": 900} | numbers
        return CallRecorder(
            policy(speaker(*replies)), renderer, limits(**most), id="e", seed=3, label="agent"
        )

    return make


async def ask(calls: CallRecorder, *messages: Message, tools: Sequence[ToolSpec] = ()) -> str:
    call = calls.ask(messages, tools)
    await call.answer(200, ())
    return calls._answered[-1].turn.messages[-1].content


def rows(calls: CallRecorder) -> list[Sample]:
    turns = calls.turns()
    return trajectory_samples(result(State(turns), End("terminated"), id="e", episode="e"), "g")


def trained(rows: Sequence[Sample], renderer) -> list[str]:
    return [renderer.decode(row.tokens[row.loss_weights > 0].tolist()) for row in rows]


async def test_a_history_that_goes_on_is_one_row_as_if_it_were_played_natively(
    calls, renderer, run, world, talk
):
    native = await asyncio.to_thread(run, world(talk), max_turns=3, max_turn_tokens=200)
    played, dialogue = calls("yes", "no"), list[Message]()
    for turn in native.turns:
        dialogue.append(user(turn.messages[0].content))
        dialogue.append(said(await ask(played, *dialogue)))
    (mine,), (expected,) = rows(played), trajectory_samples(native, "g")
    for name in ("tokens", "loss_weights", "logprobs", "temperatures", "versions", "entropies"):
        np.testing.assert_array_equal(getattr(mine, name), getattr(expected, name), err_msg=name)
    assert mine.turn_spans == expected.turn_spans
    assert [turn.after for turn in played.turns()] == ["", None, None]


async def test_two_ends_of_a_history_fork_and_nothing_is_trained_twice(calls, renderer) -> None:
    played = calls("a", "b")
    start = (user("hi"), said(await ask(played, user("hi"))))
    await ask(played, *start, user("one"))
    await ask(played, *start, user("two"))  # a side call
    await ask(played, *start, user("one"), said("b"), user("more"))
    turns = played.turns()
    assert [turn.id for turn in turns] == ["e/2", "e/0", "e/1", "e/3"], (
        "the path that was called last is last"
    )
    assert [turn.after for turn in turns] == ["e/0", "", None, None]
    side, main = rows(played)
    assert trained([side, main], renderer) == ["b<|end|>", "a<|end|>b<|end|>b<|end|>"]
    shared = len(renderer.context([user("hi")])) + 2
    assert side.tokens[:shared].tolist() == main.tokens[:shared].tolist()
    assert [message.content for message in played.dialogue()] == ["hi", "a", "one", "b", "more", "b"]


async def test_sub_agents_compaction_and_other_tools_begin_paths_of_their_own(calls, renderer) -> None:
    played = calls("a", "b", "c")
    start = (user("hi"), said(await ask(played, user("hi"))))
    await ask(played, Message("system", "You search."), user("find"))
    await ask(played, *start, user("on"), tools=[ADD])  # what is on offer stands at the beginning
    await ask(played, user("Summary: hi"), start[1], user("on"))  # it keeps a reply, and so its tokens
    await ask(played, user("hi"), said("edited"), user("on"))
    assert [turn.after for turn in played.turns()] == ["", "", "", "", ""]
    assert [turn.fresh for turn in played.turns()] == [True] * 5
    assert trained(rows(played), renderer) == ["a<|end|>", "a<|end|>", "b<|end|>", "b<|end|>", "b<|end|>"]
    kept = played.turns()[3].segments[0].tokens
    assert list(kept) == renderer.context(
        [user("Summary: hi"), Message("assistant", "a", id="x"), user("on")],
        sampled={"x": played.turns()[0].reply_tokens},
    )


async def test_of_calls_at_once_one_goes_on_and_the_others_fork(calls, renderer) -> None:
    played = calls("a", "b")
    start = (user("hi"), said(await ask(played, user("hi"))))
    await asyncio.gather(*(ask(played, *start, user(text)) for text in ("x", "y", "z")))
    assert sorted(turn.after or "-" for turn in played.turns() if turn.id != "e/0") == ["-", "e/0", "e/0"]
    assert len(rows(played)) == 3


async def test_what_is_sampled_depends_on_the_history_and_not_on_the_order(calls) -> None:
    seeds = []
    for order in (("x", "y", "x"), ("x", "x", "y")):
        played = calls("a")
        await asyncio.gather(*(ask(played, user(text)) for text in order))
        requests = played.actor.engine.requests
        seeds.append(sorted((prompt, params.seed) for prompt, params, _ in requests))
    assert seeds[0] == seeds[1] and len({seed for _, seed in seeds[0]}) == 3


async def test_replies_are_recognised_as_clients_send_them(calls) -> None:
    """Without thoughts, stripped, and calls with the ids of the client."""
    written = '<think>\nhm\n</think>\n\n ok \n<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    played = calls(written, "b")
    await ask(played, user("hi"), tools=[ADD])
    call = played.turns()[0].messages[-1].tool_calls
    reply, result = Message("assistant", "ok", tool_calls=call), Message("tool", "2", name="add")
    await ask(played, user("hi"), reply, result, tools=[ADD])
    assert [turn.fresh for turn in played.turns()] == [True, False]


async def test_limits_of_calls_and_tokens_are_kept_and_remembered(calls) -> None:
    played = calls("a", max_turns=1, max_episode_tokens=60)
    with pytest.raises(ContextOverflow, match="max_episode_tokens = 60"):
        played.ask([user("x" * 80)], [])
    assert played.limit == "context_overflow"
    played.limit = None
    await ask(played, user("hi"))
    with pytest.raises(PartLost, match="max_turns = 1 calls"):
        await ask(played, user("hi"))
    assert (played.limit, len(played.turns())) == ("max_turns", 1)
