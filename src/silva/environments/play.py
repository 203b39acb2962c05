"""A person plays an episode in the terminal: the environment as a model sees it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from silva.environments.text_game import TextGame
from silva.errors import CapabilityError
from silva.protocols import Environment, Scripted, TaskSet
from silva.types import Message, Observation, Step, Task, ToolCall, ToolSpec

TOOL_HELP = "/tool {...} calls a tool, "
EXPERT_HELP = "/expert plays an expert's reply, "


async def play(
    taskset: TaskSet, task: Task, read: Callable[[str], str], write: Callable[[str], None]
) -> dict[str, float]:
    """Plays one episode.

    Args:
        read: asks for one line, given the prompt to show; EOFError ends the game.
        write: shows text.

    Returns:
        Raw rewards by name, summed over the turns.
    """
    environment = taskset.environment(task)
    rewards: dict[str, float] = {}
    try:
        observation = await environment.reset()
        tools = observation.tools
        expert = EXPERT_HELP if isinstance(environment, Scripted) else ""
        write(f"Write a reply. {TOOL_HELP if tools else ''}{expert}/quit leaves.")
        _show(observation, write, tools)
        turn = 0
        while (message := await _reply(environment, tools, turn, read, write)) is not None:
            step = await environment.step(message)
            for name, value in step.rewards.items():
                rewards[name] = rewards.get(name, 0.0) + value
            tools = step.observation.tools or tools
            _show(step.observation, write, ())
            turn += 1
            if step.terminated or step.truncated:
                _summary(step, rewards, write)
                break
    finally:
        await environment.close()
    return rewards


async def _reply(
    environment: Environment,
    tools: Sequence[ToolSpec],
    turn: int,
    read: Callable[[str], str],
    write: Callable[[str], None],
) -> Message | None:
    try:
        line = read("> ").strip()
    except EOFError:
        return None
    if line == "/quit":
        return None
    if line.startswith("/tool") and not tools:
        write("This environment has no tools.")
        return await _reply(environment, tools, turn, read, write)
    if line == "/expert":
        try:
            line = await _expert(environment)
        except CapabilityError as error:
            write(str(error))
            return await _reply(environment, tools, turn, read, write)
        write(line)
    text = line
    calls: tuple[ToolCall, ...] = ()
    errors: tuple[str, ...] = ()
    if line.startswith("/tool"):
        text, (calls, errors) = "", _tool_call(line.removeprefix("/tool").strip(), tools)
    elif line.startswith("<tool_call>"):
        body = line.removeprefix("<tool_call>").removesuffix("</tool_call>")
        text, (calls, errors) = "", _tool_call(body, tools)
    elif isinstance(environment, TextGame):
        text = environment.wrap(line)
    return Message("assistant", text, tool_calls=calls, raw=line, id=f"player-{turn}", errors=errors)


async def _expert(environment: Environment) -> str:
    if not isinstance(environment, Scripted):
        raise CapabilityError("This environment has no expert.")
    said = environment.expert_reply()
    return said if isinstance(said, str) else await said


def _tool_call(text: str, tools: Sequence[ToolSpec]) -> tuple[tuple[ToolCall, ...], tuple[str, ...]]:
    """{"name": ..., "arguments": {...}}, or the arguments alone where there is only one tool."""
    try:
        call = json.loads(text)
    except ValueError as error:
        return (), (f"malformed tool call: {error}",)
    if (
        isinstance(call, dict)
        and isinstance(call.get("arguments"), dict)
        and isinstance(call.get("name"), str)
    ):
        return (ToolCall(call["name"], call["arguments"]),), ()
    if isinstance(call, dict) and len(tools) == 1:
        return (ToolCall(tools[0].name, call),), ()
    return (), ('malformed tool call: expected {"name": ..., "arguments": {...}}',)


def _show(observation: Observation, write: Callable[[str], None], tools: Sequence[ToolSpec]) -> None:
    for tool in tools:
        write(f"[tool] {tool.name}: {tool.description} {json.dumps(tool.parameters['properties'])}")
    if observation.context is not None:
        write("[the whole context is now]")
    for message in observation.context if observation.context is not None else observation.messages:
        write(message.content if message.role == "user" else f"[{message.role}] {message.content}")


def _summary(step: Step, rewards: dict[str, float], write: Callable[[str], None]) -> None:
    end = "The episode is over" if step.terminated else "The episode was cut short"
    scores = ", ".join(f"{name} {value:g}" for name, value in rewards.items())
    success = f"; success {step.metrics['success']:g}" if "success" in step.metrics else ""
    write(f"{end}: {scores}{success}")
