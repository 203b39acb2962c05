"""Actors that play through messages: no tokens are rendered, limits count what they report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from silva.errors import CapabilityError, ContextOverflow, NoReply
from silva.protocols import Reply, Request
from silva.rollouts.samples import to_samples
from silva.types import Group, Message, Observation, Segment


class Chat:
    """Answers "yes" with 4 tokens; counts 10 tokens of context for each message."""

    reads_tokens: ClassVar[bool] = False

    def __init__(self, fails: Exception | None = None) -> None:
        self.requests: list[Request] = []
        self.fails = fails

    async def reply(self, request: Request) -> Reply:
        self.requests.append(request)
        if self.fails is not None and len(self.requests) == 2:
            raise self.fails
        segment = Segment("policy", (), reported=4)
        return Reply((segment,), Message("assistant", "yes"), "stop_token", 10 * len(request.messages))


def test_a_request_holds_the_whole_context_as_messages_and_renders_no_token(run, world, talk) -> None:
    chat = Chat()
    trajectory = run(world(talk), actor=chat, renderer=None)
    assert [[m.content for m in r.messages] for r in chat.requests] == [
        ["hello t0"],
        ["hello t0", "yes", "go on 1"],
        ["hello t0", "yes", "go on 1", "yes", "go on 2"],
    ]
    assert [m.id for m in chat.requests[2].messages] == ["e0", "e/0", "e1", "e/1", "e2"]
    assert (trajectory.stop_reason, trajectory.failure, trajectory.raw_reward) == ("terminated", None, 3.0)
    assert [[m.content for m in turn.messages] for turn in trajectory.turns] == [
        ["hello t0", "yes"], ["go on 1", "yes"], ["go on 2", "yes"]
    ]  # fmt: skip
    assert [turn.fresh for turn in trajectory.turns] == [True, False, False]
    # 10, 30 - 14, 50 - 34 tokens were new in the requests.
    assert [[s.count for s in turn.segments] for turn in trajectory.turns] == [[10, 4], [16, 4], [16, 4]]
    assert (trajectory.tokens("policy"), trajectory.tokens()) == (12, 54)
    assert all(s.tokens == () for turn in trajectory.turns for s in turn.segments)
    with pytest.raises(CapabilityError, match="an actor that reads tokens needs a renderer"):
        chat.requests[0].tokens  # noqa: B018


def test_tokens_are_there_for_an_actor_that_reads_them_after_all(run, world, talk, renderer) -> None:
    class Reader(Chat):
        async def reply(self, request: Request) -> Reply:
            self.texts = [*getattr(self, "texts", []), list(request.tokens)]
            return await super().reply(request)

    chat = Reader()
    trajectory = run(world(talk), actor=chat)
    assert chat.texts[2] == renderer.context(chat.requests[2].messages)
    assert [turn.fresh for turn in trajectory.turns] == [True] * 3  # no tokens that could be extended


@pytest.mark.parametrize(("most", "turns", "last"), [(14, 1, 9), (15, 2, 1), (34, 2, 9), (1000, 3, 9)])
def test_limits_count_the_tokens_that_are_reported(
    run, world, talk, most: int, turns: int, last: int
) -> None:
    """14 tokens after the first turn, 34 after the second."""
    chat = Chat()
    trajectory = run(world(talk), actor=chat, renderer=None, max_episode_tokens=most, max_turn_tokens=9)
    assert (len(trajectory.turns), trajectory.failure) == (turns, None)
    assert trajectory.stop_reason == ("terminated" if turns == 3 else "max_tokens")
    assert chat.requests[-1].max_tokens == min(last, most)


@pytest.mark.parametrize(
    ("fault", "stop_reason", "failure", "error"),
    [
        (NoReply("503 after 3 tries"), "error", "redo", "reply: 503 after 3 tries"),
        (ContextOverflow("too long"), "context_overflow", "mask", "too long"),
    ],
)
def test_a_request_without_a_reply_is_no_result(run, world, talk, fault, stop_reason, failure, error) -> None:
    places = world(talk)
    trajectory = run(places, actor=Chat(fault), renderer=None)
    assert (trajectory.stop_reason, trajectory.failure, trajectory.error) == (stop_reason, failure, error)
    assert (len(trajectory.turns), places.made[0].closed) == (1, 1)


def test_a_message_without_text_is_a_fault_of_the_environment(run, world, talk) -> None:
    class Mute(talk):
        def say(self, text: str) -> Observation:
            return Observation((Message("user", None if self.taken else text),))  # type: ignore[arg-type]

    trajectory = run(world(Mute), actor=Chat(), renderer=None)
    assert trajectory.failure == "redo" and trajectory.error.startswith(
        "observation: TypeError: got NoneType, expected str"
    )


def test_what_a_chat_api_played_cannot_be_trained(run, world, talk, task) -> None:
    trajectory = run(world(talk), actor=Chat(), renderer=None)
    with pytest.raises(
        CapabilityError, match=r"trajectory e cannot be trained: .* no token ids and no log-pro"
    ):
        to_samples([Group("g", task, (trajectory,))])


def test_tokens_are_rendered_once_a_turn(run, world, talk, renderer) -> None:
    """The local path: tokens are rendered once a turn, whoever reads them."""

    class Counting:
        calls = 0

        def __getattr__(self, name: str) -> Callable[..., Any]:
            if name in ("context", "extend"):
                Counting.calls += 1
            return getattr(renderer, name)

    run(world(talk), renderer=Counting())
    assert Counting.calls == 3
