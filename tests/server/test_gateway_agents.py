"""Agents that others wrote play through the gateway, with what they are told and nothing else.

They run in .peers/agents (`make peers PEERS=agents`).
"""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from tests.server.running import says
from tests.server.test_gateway import LIMITS, playing

from silva.rendering.renderer import Renderer
from silva.server.gateway import SessionGateway

PYTHON = Path(__file__).parents[2] / ".peers/agents/bin/python"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"needs {PYTHON}: make peers PEERS=agents"),
]
PROGRAM = Path(__file__).with_name("agent_programs.py")
ROOM = 1 << 16  # tokens of bytes


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


ADDS = (call("add", a=2, b=3), "It is 5.")
REPLIES = {
    "openai_agents": ADDS,
    "openai_agents_responses": ADDS,
    "pydantic_ai": ADDS,
    "mini_swe_agent": (
        call("bash", command="expr 2 + 3 | tee sum"),
        call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    ),
    "langgraph": ADDS,
    "claude_agent_sdk": (call("Bash", command="expr 2 + 3", description="adds"), "It is 5."),
    "smolagents": (call("add", a=2, b=3), call("final_answer", answer="It is 5.")),
}


async def test_agents_that_others_wrote_are_recorded_token_by_token(renderer: Renderer) -> None:
    limits = LIMITS.model_copy(update={"max_episode_tokens": ROOM})
    async with AsyncExitStack() as stack:
        gateway, plays, words = SessionGateway(), {}, list[str]()
        for name, replies in REPLIES.items():
            engine = says(renderer, *replies, context=ROOM)
            play = await stack.enter_async_context(
                playing(renderer, engine=engine, limits=limits, gateway=gateway)
            )
            plays[name] = play
            words += [name, play.endpoint.url]
        pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE}
        process = await asyncio.create_subprocess_exec(str(PYTHON), str(PROGRAM), *words, **pipes)
        try:
            output, errors = await asyncio.wait_for(process.communicate(), 540)
        finally:
            if process.returncode is None:
                process.kill()
    answers = dict(zip(REPLIES, map(json.loads, output.splitlines()), strict=True))
    assert answers == dict.fromkeys(REPLIES, "It is 5.") | {"mini_swe_agent": "5"}, errors
    rows = [turn.fresh for turn in plays.pop("smolagents").calls.turns()]
    assert rows == [True, True]  # it sends its calls back as text
    for name in plays:
        plays[name].check_one_path(renderer, *REPLIES[name])
        said = plays[name].calls.dialogue()
        assert [message.role for message in said][-3:] == ["assistant", "tool", "assistant"]
        assert "5" in said[-2].content, name
