"""Limits of an episode: turns, tokens, the context of the engine, time."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from scripted_engine import ScriptedEngine

from silva.models.tiny import tiny_tokenizer
from silva.rollouts import episode, state
from silva.types import Message, Observation, Step

WHOLE = "<|user|>hello t0<|end|><|assistant|>yes<|end|><|user|>go on 1<|end|><|assistant|>no<|end|>"


@pytest.mark.parametrize("reason", ["max_turns", "truncated", "max_tokens", "terminated"])
def test_what_would_have_been_answered_next_is_noted_where_a_limit_cuts(run, world, talk, reason) -> None:
    class Cut(talk):
        async def step(self, message: Message) -> Step:
            step = await super().step(message)
            ends = self.taken == 2
            return replace(
                step, terminated=ends and reason == "terminated", truncated=ends and reason == "truncated"
            )

    limits = {"max_turns": {"max_turns": 2}, "max_tokens": {"max_episode_tokens": 11 + 4 + 10 + 3}}
    trajectory = run(world(Cut), **limits.get(reason, {}))
    assert (trajectory.stop_reason, len(trajectory.turns), trajectory.failure) == (reason, 2, None)
    expected = "" if reason == "terminated" else WHOLE + "<|user|>go on 2<|end|><|assistant|>"
    assert tiny_tokenizer().decode(trajectory.next_context) == expected


@pytest.mark.parametrize("last", [Observation(), Observation((Message("user", 7),))])  # type: ignore[arg-type]
def test_a_cut_without_a_next_state_keeps_its_result(run, world, talk, last) -> None:
    """The world shows nothing more, or something that cannot be rendered and that nobody has to answer."""

    class Ends(talk):
        async def step(self, message: Message) -> Step:
            return replace(await super().step(message), observation=last, truncated=True)

    trajectory = run(world(Ends))
    assert (trajectory.stop_reason, trajectory.failure, trajectory.next_context) == ("truncated", None, ())
    assert trajectory.rewards == {"talk": 1.0}


def test_max_turn_tokens_cut_the_reply_and_the_turn_is_closed_for_it(run, world, talk, speaker) -> None:
    trajectory = run(world(talk), speaker("yes indeed"), max_turn_tokens=4)
    decode = tiny_tokenizer().decode
    assert [turn.stop_reason for turn in trajectory.turns] == ["length"] * 3
    assert decode(trajectory.turns[0].segments[1].tokens) == "yes "
    assert decode(trajectory.turns[1].segments[0].tokens) == "<|end|><|user|>go on 1<|end|><|assistant|>"
    assert trajectory.stop_reason == "terminated"


@pytest.mark.parametrize("most", [12, 13, 16, 17, 26, 27, 28, 30])
def test_max_episode_tokens_bound_the_longest_context(run, world, talk, speaker, most: int) -> None:
    """The first observation has 11 tokens, a reply 4 and an observation between 10."""
    trajectory = run(world(talk), speaker("yes"), max_episode_tokens=most)
    replies = [len(turn.segments[1].tokens) for turn in trajectory.turns]
    answered = sum(len(s.tokens) for turn in trajectory.turns for s in turn.segments)
    assert answered <= most
    assert (trajectory.stop_reason, trajectory.failure) == ("max_tokens", None)
    assert replies[0] == min(4, most - 11)
    assert len(replies) == 1 + (most > 11 + 4 + 10)
    assert trajectory.rewards == {"talk": float(len(replies))}  # what was earned so far is real


def test_long_texts_become_tokens_in_a_thread(run, world, talk, monkeypatch) -> None:
    """Nobody else waits for them, and the tokens are the same; the first observation has 8 characters."""
    usual, threads = run(world(talk)), []

    def render(*arguments: Any) -> None:
        threads.append(threading.current_thread() is threading.main_thread())
        state.render(*arguments)

    monkeypatch.setattr(episode, "render", render)
    monkeypatch.setattr(episode, "LONG_TEXT", 7)
    assert run(world(talk)) == usual
    assert threads == [False, True, True]  # "hello t0", "go on 1", "go on 2"


@pytest.mark.parametrize("most", [5, 11])
def test_a_prompt_without_room_for_an_answer_is_no_result(run, world, talk, most: int) -> None:
    """The policy said nothing, so an evaluation leaves it out."""
    trajectory = run(world(talk), max_episode_tokens=most)
    assert (trajectory.stop_reason, trajectory.failure, trajectory.turns) == ("error", "mask", ())
    assert not trajectory.has_result
    assert "11 tokens" in trajectory.error and f"max_episode_tokens = {most}" in trajectory.error


def test_a_full_engine_ends_the_episode(run, world, talk, speaker) -> None:
    cut = run(world(talk), speaker("yes", context=13))
    assert (cut.stop_reason, cut.failure, len(cut.turns)) == ("context_overflow", None, 1)
    assert cut.turns[0].stop_reason == "context_overflow" and len(cut.turns[0].segments[1].tokens) == 2
    later = run(world(talk), speaker("yes", context=25))
    assert (later.stop_reason, later.failure, len(later.turns)) == ("context_overflow", "mask", 1)
    assert later.error == "prompt of 25 tokens in a context of 25"


@pytest.mark.parametrize(
    ("where", "stop_reason", "failure"), [("reset", "error", "redo"), ("step", "timeout", "mask")]
)
def test_a_timeout_ends_the_episode(run, world, talk, where: str, stop_reason: str, failure: str) -> None:
    """A reset knows nothing of the policy, so it is tried again; a step answers the policy."""

    class Stuck(talk):
        async def reset(self):
            if where == "reset":
                await asyncio.Event().wait()
            return await super().reset()

        async def step(self, message):
            if where == "step" and self.taken == 1:
                await asyncio.Event().wait()
            return await super().step(message)

    places = world(Stuck)
    trajectory = run(places, timeout=0.05)
    assert (trajectory.stop_reason, trajectory.failure) == (stop_reason, failure)
    assert trajectory.error == f"{where}: no end within rollout.limits.timeout = 0.05 s"
    assert trajectory.limited == (where == "step")
    assert len(trajectory.turns) == (1 if where == "step" else 0) and places.made[0].closed == 1


class Busy(ScriptedEngine):
    """Each answer takes an hour in the queue, by the clock of the event loop."""

    async def sample(self, *arguments: Any, **more: Any):
        loop = asyncio.get_running_loop()
        real = loop.time
        loop.time = lambda: real() + 3600 * len(self.requests)  # type: ignore[method-assign]
        for _ in range(3):  # whatever is due by then happens
            await asyncio.sleep(0)
        return await super().sample(*arguments, **more)


def test_time_in_the_engine_s_queue_is_not_the_episode_s(run, world, talk, renderer) -> None:
    engine = Busy(lambda tokens, params: renderer.encode_reply("yes"))
    trajectory = run(world(talk), engine, timeout=600.0)
    assert (trajectory.stop_reason, trajectory.failure, len(trajectory.turns)) == ("terminated", None, 3)


def test_what_the_environment_took_before_the_engine_counts(run, world, talk, speaker) -> None:
    """400 s of the reset and 400 s of the first step, by the clock of the event loop: more than 600 s."""

    class Slow(talk):
        async def wait(self) -> None:
            loop = asyncio.get_running_loop()
            real, late = loop.time, 400.0
            loop.time = lambda: real() + late  # type: ignore[method-assign]
            for _ in range(3):
                await asyncio.sleep(0)

        async def reset(self):
            await self.wait()
            return await super().reset()

        async def step(self, message):
            await self.wait()
            return await super().step(message)

    trajectory = run(world(Slow), timeout=600.0)
    assert (trajectory.stop_reason, len(trajectory.turns)) == ("timeout", 0)
    assert run(world(Slow), timeout=2000.0).stop_reason == "terminated"


@pytest.mark.parametrize(("where", "turns"), [("reset", 0), ("step", 1)])
def test_a_cancellation_that_the_environment_swallows_ends_the_episode_before_the_next_reply(
    run, world, talk, speaker, where: str, turns: int
) -> None:
    class Deaf(talk):
        async def wait(self) -> None:
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

        async def reset(self):
            if where == "reset":
                await self.wait()
            return await super().reset()

        async def step(self, message):
            if where == "step":
                await self.wait()
            return await super().step(message)

    engine = speaker("yes")
    trajectory = run(world(Deaf), engine, timeout=0.05)
    assert len(trajectory.turns) == len(engine.requests) == turns
    assert trajectory.stop_reason == ("timeout" if where == "step" else "error")
    assert trajectory.error == f"{where}: no end within rollout.limits.timeout = 0.05 s"


def test_a_close_that_never_returns_does_not_hold_the_run(run, world, talk) -> None:
    class Stuck(talk):
        async def close(self) -> None:
            await asyncio.Event().wait()

    trajectory = run(world(Stuck), timeout=0.05)
    assert (trajectory.stop_reason, trajectory.failure) == ("terminated", None)
    assert trajectory.error.startswith("close: TimeoutError")
