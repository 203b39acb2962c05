"""Servers of OpenEnv: against what real ones (openenv 0.10.0) said, word for word."""

from __future__ import annotations

import asyncio
import threading

import pytest
from tests.environments.foreign.openenv_server import RECORDED, guessing, observed, replaying, server
from tests.environments.foreign.playing import call, fork_refused, played, texts, wrong

from silva.environments.foreign.openenv import OpenEnv, OpenEnvFault
from silva.errors import CapabilityError
from silva.types import Message, Task

pytest.importorskip("websockets", reason="pip install websockets")
TASK = Task("t", "openenv", 1, {"seed": 3})
TEXT = RECORDED["text"]["action"]


def openenv(url: str, **keys) -> OpenEnv:
    return OpenEnv(url=url, eval_size=4, train_size=20, **keys)


def play(url: str, *replies: Message | str, **keys):
    return played(openenv(url, **keys), *replies, task=TASK)


def after_reset(answer):
    """Connections of a server that answers so after the reset, which is fine."""
    return lambda: lambda sent: observed("Go.", None) if sent["type"] == "reset" else answer(sent)


def test_a_server_whose_action_is_a_text_gets_the_replies() -> None:
    with server(TEXT, replaying("text")) as url:
        first, steps = play(url, "four", "1", "<think>It is more.</think>2", reset={"high": 4}, solved_at=0.9)
    assert first.messages[0].content == "Guess a number from 1 to 4." and first.tools == ()
    assert texts(steps) == ["That is no number.", "Higher.", "Right."]
    assert [step.rewards["reward"] for step in steps] == [-0.1, 0.0, 1.0]
    assert [step.terminated for step in steps] == [False, False, True]
    assert steps[-1].metrics["success"] == 1.0


def test_the_sum_of_the_rewards_decides_about_success() -> None:
    with server(TEXT, replaying("text")) as url:
        _, steps = play(url, "four", "1", "2", reset={"high": 4})
    assert steps[-1].metrics["success"] == 0.0  # 0.9


def test_an_action_with_several_fields_is_a_tool() -> None:
    right = [call("act", direction="right", steps=steps) for steps in (1, 2)]
    with server(RECORDED["act"]["action"], replaying("act")) as url:
        first, steps = play(url, right[0], call("act", direction="up"), right[1])
    assert [spec.name for spec in first.tools] == ["act"]
    assert first.tools[0].parameters["required"] == ["direction", "steps"]
    assert first.tools[0].description == "Moves on the board."
    assert texts(steps)[0] == "At 1." and texts(steps)[2] == "At 3."
    assert texts(steps)[1].startswith("Error: Invalid message (VALIDATION_ERROR): [")
    assert steps[2].terminated and steps[2].rewards == {"reward": 1.0} and steps[2].metrics["success"] == 1.0
    assert steps[1].metrics["tool_errors"] == 1.0


def test_tools_of_mcp_are_offered_and_called() -> None:
    replies = call("add", a=2, b=40), call("fail"), call("add", a="x"), "42"
    with server(RECORDED["mcp"]["action"], replaying("mcp")) as url:
        first, steps = play(url, *replies)
    assert [spec.name for spec in first.tools] == ["add", "fail"]
    assert first.tools[0].parameters["properties"] == {"a": {"type": "integer"}, "b": {"type": "integer"}}
    assert texts(steps)[:2] == ["42", "Error: Error calling tool 'fail': broken on purpose"]
    assert texts(steps)[2].startswith("Error: 2 validation errors for call[add]")
    assert steps[3].terminated and steps[3].rewards == {"reward": 0.0}


def test_nothing_is_wrong_with_a_game_behind_a_server() -> None:
    with server(TEXT, guessing) as url:
        assert wrong(openenv(url)) == []


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, "step: no answer"),
        ({"type": "error", "data": {"message": "boom", "code": "EXECUTION_ERROR"}}, "boom"),
        ({"type": "observation"}, "expected an observation"),
        ({"type": "observation", "data": {"reward": 1.0}}, "expected `observation`"),
        (["no", "object"], "expected an observation"),
        (observed("Over.", None, True), "no answer had a reward"),
        (observed("Go.", 1.0, "yes"), "got done = 'yes'"),
        (observed("Go.", "much"), "got the reward 'much'"),
    ],
)
def test_a_server_that_fails_gives_no_result(answer, words) -> None:
    kind = ValueError if "reward '" in words else OpenEnvFault
    with server(TEXT, after_reset(lambda sent: answer)) as url, pytest.raises(kind, match=words):
        play(url, "1")


@pytest.mark.parametrize("kind", ["act", "mcp"])
def test_an_answer_that_comes_late_answers_nothing(kind) -> None:
    """The server answers the first action only when the client has given it up."""
    asked, gone = threading.Event(), threading.Event()

    def answer(sent):
        if sent["data"].get("type") == "list_tools":
            return RECORDED["mcp"]["exchanges"][1]["received"]
        assert not asked.is_set(), "another request on the same connection"
        asked.set()
        gone.wait(60)
        return observed("late", 1.0)

    async def run(url):
        environment = openenv(url).taskset().environment(TASK)
        message = call("act", direction="right", steps=1) if kind == "act" else call("add", a=1, b=2)
        try:
            await environment.reset()
            step = asyncio.create_task(environment.step(message))
            await asyncio.to_thread(asked.wait, 60)
            step.cancel()
            await asyncio.wait([step])
            gone.set()
            with pytest.raises(OpenEnvFault, match="an earlier request was cut off"):
                await environment.step(message)
        finally:
            gone.set()
            await environment.close()

    with server(RECORDED[kind]["action"], after_reset(answer)) as url:
        asyncio.run(run(url))


@pytest.mark.parametrize("kind", ["transport_error", "timeout", "something_new"])
def test_an_error_of_a_tool_that_is_the_servers_is_no_answer(kind) -> None:
    told = {"observation": {"error": {"error_type": kind, "message": "boom"}}, "done": False}

    def answer(sent):
        if sent["data"]["type"] == "list_tools":
            return RECORDED["mcp"]["exchanges"][1]["received"]
        return {"type": "observation", "data": told}

    with (
        server(RECORDED["mcp"]["action"], after_reset(answer)) as url,
        pytest.raises(OpenEnvFault, match="boom"),
    ):
        play(url, call("add", a=1, b=2))


def test_no_server_is_said() -> None:
    with server(TEXT, guessing) as url:
        pass  # its port is free again
    with pytest.raises(OpenEnvFault, match=f"openenv: no server at {url}"):
        play(url, "1")


def test_an_address_with_a_password_or_of_another_kind_is_refused() -> None:
    for url in ("ws://127.0.0.1:1", "http://name:secret@127.0.0.1:1", "127.0.0.1:8000"):
        with pytest.raises(ValueError, match="url"):
            OpenEnv(url=url)


def test_an_episode_on_a_server_cannot_be_forked() -> None:
    with server(TEXT, guessing) as url, pytest.raises(CapabilityError, match="cannot be forked"):
        fork_refused(openenv(url), TASK)
