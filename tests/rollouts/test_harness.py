"""Episodes that programs play: what is a result, what is none, and what limits do."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest

from silva.errors import CapabilityError, EngineError, NoReply, RewardError
from silva.protocols import Driven, Endpoint
from silva.types import Message, Step, Task, Trajectory

Program = Callable[[Any], Awaitable[Any]]


@dataclass
class Programs:
    """A task set of one program, and a gateway without HTTP: the program gets the session itself."""

    program: Program
    reward: float | None = None

    def __post_init__(self) -> None:
        self.harness = self.gateway = self
        self.graded_with: list[Message] = []

    @contextlib.asynccontextmanager
    async def open(self, session: Any, task: Task):
        self.session = session
        yield Endpoint("", "", lambda: session.posted, lambda: asyncio.sleep(0))

    async def run(self, task: Task, endpoint: Endpoint) -> Any:
        return await self.program(self.session)

    async def graded(self, task: Task, given: Step | None, messages: Any) -> Step:
        self.graded_with = list(messages)
        if given is None and self.reward is None:
            raise RewardError("nobody knows")
        return given or Step(rewards={"reward": self.reward or 0.0}, metrics={"success": 1.0})


async def ask(session: Any, *texts: str) -> None:
    messages = [Message("assistant" if i % 2 else "user", text) for i, text in enumerate(texts)]
    await session.ask(messages, []).answer(20, ())


def played(
    run: Any, program: Program, reward: float | None = None, **limits: Any
) -> tuple[Trajectory, Programs]:
    tasks = Programs(program, reward)
    assert isinstance(tasks, Driven)
    return run(tasks, **limits), tasks


def test_what_the_program_returns_is_the_result(run) -> None:
    async def program(session: Any) -> Step:
        await ask(session, "hi")
        await ask(session, "hi", "yes", "on")
        return Step(rewards={"reward": 0.5}, metrics={"success": 0.0})

    found, _ = played(run, program)
    assert (found.stop_reason, found.failure, found.rewards) == ("terminated", None, {"reward": 0.5})
    assert found.metrics == {"success": 0.0}
    assert [turn.rewards for turn in found.turns] == [{}, {"reward": 0.5}]
    assert (found.id, found.episode, len(found.turns)) == ("e", "e", 2)


def test_a_reward_grades_the_path_that_was_called_last(run) -> None:
    async def program(session: Any) -> None:
        await ask(session, "hi")
        await ask(session, "aside")
        await ask(session, "hi", "yes", "on")

    found, tasks = played(run, program, reward=1.0)
    assert [message.content for message in tasks.graded_with] == ["hi", "yes", "on", "no"]
    assert (found.rewards, [turn.fresh for turn in found.turns]) == ({"reward": 1.0}, [True, True, False])


@pytest.mark.parametrize(
    ("fails", "error"),
    [
        ("raises", "program: KeyError: 'lost'"),
        ("exits", "program: SystemExit: 3"),
        ("asks nothing", "the program ended without a call"),
        ("gives no reward", "reward: RewardError: nobody knows"),
        ("gives a bad reward", "step: reward 'reward' is nan"),
    ],
)
def test_a_program_that_fails_gives_no_result(run, fails: str, error: str) -> None:
    async def program(session: Any) -> Any:
        if fails == "asks nothing":
            return Step(rewards={"reward": 1.0})
        await ask(session, "hi")
        if fails == "raises":
            raise KeyError("lost")
        if fails == "exits":
            raise SystemExit(3)
        return Step(rewards={"reward": float("nan")}) if "bad" in fails else None

    found, _ = played(run, program)
    assert error in (found.error or "") and found.rewards == {}
    assert found.failure == ("mask" if fails == "gives a bad reward" else "redo")
    assert len(found.turns) == (fails != "asks nothing")


def test_at_the_time_limit_turns_are_kept_and_so_is_a_reward_that_was_posted(run) -> None:
    async def program(session: Any, reward: float | None = None) -> None:
        await ask(session, "hi")
        if reward is not None:
            session.posted.set_result(Step(rewards={"reward": reward}))
        await asyncio.sleep(60)

    found, _ = played(run, program, timeout=0.05)
    assert (found.stop_reason, found.failure, len(found.turns)) == ("timeout", "mask", 1)
    assert "rollout.limits.timeout = 0.05 s" in (found.error or "") and found.limited
    found, _ = played(run, lambda session: program(session, 0.25), timeout=0.05)
    assert (found.stop_reason, found.failure, found.rewards) == ("truncated", None, {"reward": 0.25})


def test_the_clock_stands_still_while_the_program_waits_for_its_model(run, speaker) -> None:
    engine = speaker("yes")
    sample = engine.sample

    async def slow(*args: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(0.15)
        return await sample(*args, **kwargs)

    engine.sample = slow

    async def program(session: Any) -> Step:
        await asyncio.gather(ask(session, "hi"), ask(session, "you"))
        with session.idle():  # as while no agent has called in
            await asyncio.sleep(0.15)
        return Step(rewards={"reward": 1.0})

    found, _ = played(lambda tasks, **limits: run(tasks, engine, **limits), program, timeout=0.1)
    assert (found.stop_reason, found.rewards) == ("terminated", {"reward": 1.0})


def test_a_program_that_may_not_call_any_more_is_graded_as_if_it_had_not_answered(run) -> None:
    async def program(session: Any) -> None:
        await ask(session, "hi")
        await ask(session, "hi", "yes", "on")

    found, tasks = played(run, program, reward=0.0, max_turns=1)
    assert (found.stop_reason, found.failure, found.rewards) == ("max_turns", None, {"reward": 0.0})
    assert [message.content for message in tasks.graded_with] == ["hi", ""]
    found, _ = played(run, program, max_turns=1)
    assert (found.stop_reason, found.failure) == ("max_turns", "mask")


@pytest.mark.parametrize("error", [EngineError("out of memory"), NoReply("lost")], ids=["engine", "request"])
def test_an_engine_that_fails_ends_the_run_and_a_request_that_does_the_episode(run, speaker, error) -> None:
    engine = speaker("yes")

    async def fails(*args: Any, **kwargs: Any) -> Any:
        raise error

    engine.sample = fails

    async def program(session: Any) -> Step:
        with contextlib.suppress(EngineError):  # as one that reads a status of 500 may go on
            await ask(session, "hi")
        return Step(rewards={"reward": 1.0})

    if isinstance(error, NoReply):
        found = run(Programs(program), engine)
        assert (found.failure, found.turns) == ("redo", ())
    else:
        with pytest.raises(EngineError, match="out of memory"):
            run(Programs(program), engine)


def test_a_program_needs_a_model_that_gives_tokens(run, policy, speaker) -> None:
    class Api:
        reads_tokens = False

    with pytest.raises(CapabilityError, match="its program must play with a model that Silva samples from"):
        run(Programs(lambda session: asyncio.sleep(0)), actor=Api())
