"""What everyone who answers does: a policy, an environment's own expert, a chat API. A new one adds itself to
`actor`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from scripted_engine import ScriptedEngine
from tests.contracts.doubles import Failing, Slow
from tests.engines.chat_server import Script, said, serving
from tests.tools.web_server import CUT

from silva.actors.chat_api import ChatModel
from silva.actors.policy import Policy
from silva.actors.script import Script as OwnScript
from silva.actors.settings import OpenAIEngineSettings
from silva.config.sections import EpisodeLimits, Sampling
from silva.environments.worlds.guess_number import GuessNumber
from silva.errors import EngineError
from silva.models.tiny import tiny_tokenizer
from silva.protocols import Actor, Request
from silva.rendering.renderer import Renderer
from silva.rollouts.episode import play
from silva.types import Message, SamplingParams, Trajectory

RENDERER = Renderer(tiny_tokenizer())
TASKSET = GuessNumber(train_size=8, eval_size=4).taskset()
TASK = TASKSET.tasks("train")[0]


def sevens(tokens: Sequence[int], params: SamplingParams) -> list[int]:
    return RENDERER.encode_reply("7")


def policy() -> Policy:
    return Policy(ScriptedEngine(sevens), RENDERER, Sampling())


def broken() -> Policy:
    return Policy(Failing(ScriptedEngine(sevens), "sample", 99), RENDERER, Sampling())  # type: ignore[arg-type]


@pytest.fixture(params=["policy", "slow policy", "expert", "chat API"])
def actor(request: pytest.FixtureRequest) -> Iterator[Actor]:
    if request.param == "chat API":
        pytest.importorskip("openai")
        with serving(lambda number, body: said("7")) as server:
            yield chat(server.url)
        return
    slow = Policy(Slow(ScriptedEngine(sevens)), RENDERER, Sampling())  # type: ignore[arg-type]
    yield {"policy": policy(), "slow policy": slow, "expert": OwnScript(RENDERER)}[request.param]


def chat(url: str, **settings: Any) -> ChatModel:
    return ChatModel(OpenAIEngineSettings(model="m", base_url=url, key_variable="", **settings), Sampling())


def request(environment: Any, *said_before: str, seed: int = 3) -> Request:
    messages = [Message("user", "Guess a number."), *(Message("user", text) for text in said_before)]
    return Request(
        label="guess_number",
        environment=environment,
        messages=messages,
        tools=(),
        prefill="",
        max_tokens=16,
        seed=seed,
        session="e",
        render=lambda: RENDERER.encode_reply("Guess a number."),
    )


def asked(actor: Actor, count: int = 1) -> list[Any]:
    async def run() -> list[Any]:
        environment = TASKSET.environment(TASK)
        await environment.reset()
        return await asyncio.gather(*(actor.reply(request(environment, seed=i)) for i in range(count)))

    return asyncio.run(run())


def episode(actor: Actor, **limits: Any) -> Trajectory:
    renderer = RENDERER if actor.reads_tokens else None
    return asyncio.run(play(TASK, TASKSET, actor, renderer, EpisodeLimits(**limits), id="e", seed=1))


def test_a_reply_is_a_message_with_its_tokens_or_their_number(actor: Actor) -> None:
    (reply,) = asked(actor)
    assert reply.message.role == "assistant" and reply.message.content.strip().isdigit()
    assert reply.segments[0].count >= 1
    if actor.reads_tokens:
        assert reply.segments[0].tokens and reply.segments[0].reported is None and reply.prompt_tokens is None
    else:
        assert not reply.segments[0].tokens and reply.segments[0].reported == 4 and reply.prompt_tokens == 10


def test_replies_at_the_same_time_do_not_meet(actor: Actor) -> None:
    assert len({reply.message.content for reply in asked(actor, 12)}) == 1


def test_an_episode_is_played_to_its_end(actor: Actor) -> None:
    played = episode(actor)
    assert played.failure is None and played.stop_reason in ("terminated", "truncated")
    assert played.turns and all(turn.messages[-1].role == "assistant" for turn in played.turns)


def test_limits_hold_for_everyone(actor: Actor) -> None:
    """No room for an answer: seen in the tokens of the first context, which leaves no result, or in what the
    first turn reports."""
    played = episode(actor, max_episode_tokens=3)
    expected = ("error", "mask", 0) if actor.reads_tokens else ("max_tokens", None, 1)
    assert (played.stop_reason, played.failure, len(played.turns)) == expected and not played.limited


@pytest.mark.parametrize("faults", [(CUT,), ((500, {}, {}),)], ids=["cut connection", "500"])
def test_a_reply_that_never_comes_leaves_no_result(faults: tuple[Any, ...]) -> None:
    """An API fails for one episode; an engine of ours that fails ends the run."""
    pytest.importorskip("openai")
    script: Script = lambda number, body: faults[0]  # noqa: E731
    with serving(script) as server:
        played = episode(chat(server.url, retries=0))
    assert played.failure == "redo" and played.error
    with pytest.raises(EngineError):
        episode(broken())
