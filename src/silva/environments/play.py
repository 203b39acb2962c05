"""A person plays an episode in the terminal: the environment as a model sees it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from silva.environments.bases.text_game import TextGame
from silva.errors import CapabilityError
from silva.protocols import Environment, Scripted, TaskSet
from silva.types import Message, Observation, Step, Task, ToolCall, ToolSpec

TOOL_HELP = '/tool NAME {"argument": "value"} calls a tool, '
EXPERT_HELP = "/expert plays an expert's reply, "
HELP = "/prompt shows what the packaged model would read, /quit leaves; // begins a reply with /."

Render = Callable[[Sequence[Message], Sequence[ToolSpec], str], str]
"""What a model reads: of the dialogue so far, the tools on offer and the given beginning of the reply."""


async def play(
    taskset: TaskSet,
    task: Task,
    read: Callable[[str], str],
    write: Callable[[str], None],
    render: Render,
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
        tools, shown = observation.tools, _shown(observation, ())
        expert = EXPERT_HELP if await _expert(environment) is not None else ""
        write(f"Write a reply. {TOOL_HELP if tools else ''}{expert}{HELP}")
        _show(observation, write, tools)

        def prompt() -> str:
            return render(shown, tools, observation.prefill)

        turn = 0
        while (message := await _reply(environment, tools, turn, read, write, prompt)) is not None:
            step = await environment.step(message)
            observation, shown = step.observation, _shown(step.observation, (*shown, message))
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
    prompt: Callable[[], str],
) -> Message | None:
    try:
        line = read("> ").strip()
    except EOFError:
        return None
    if line == "/quit":
        return None
    command, _, rest = line.partition(" ")
    if line.startswith("//"):
        line = line[1:]
    elif line.startswith("/") and not (command == "/tool" and tools):
        said = await _expert(environment) if command == "/expert" else None
        if said is None:
            write(prompt() if command == "/prompt" else _no_command(command))
            return await _reply(environment, tools, turn, read, write, prompt)
        write(line := said)
        command = ""
    text = line
    calls: tuple[ToolCall, ...] = ()
    errors: tuple[str, ...] = ()
    if command == "/tool":
        text, (calls, errors) = "", _tool_call(rest.strip(), tools)
    elif line.startswith("<tool_call>"):
        body = line.removeprefix("<tool_call>").removesuffix("</tool_call>")
        text, (calls, errors) = "", _tool_call(body, tools)
    elif isinstance(environment, TextGame):
        text = environment.wrap(line)
    return Message("assistant", text, tool_calls=calls, raw=line, id=f"player-{turn}", errors=errors)


def _no_command(command: str) -> str:
    if command in ("/tool", "/expert"):
        return f"This environment has no {command[1:]}{'s' if command == '/tool' else ''}."
    return f"{command} is no command, and was not sent. {HELP}"


async def _expert(environment: Environment) -> str | None:
    """What the expert says; None without one."""
    if not isinstance(environment, Scripted):
        return None
    try:
        said = environment.expert_reply()
        return said if isinstance(said, str) else await said
    except CapabilityError:
        return None


def _shown(observation: Observation, before: Sequence[Message]) -> tuple[Message, ...]:
    """The dialogue with an observation."""
    return observation.context if observation.context is not None else (*before, *observation.messages)


def _tool_call(text: str, tools: Sequence[ToolSpec]) -> tuple[tuple[ToolCall, ...], tuple[str, ...]]:
    """NAME {...}, {"name": ..., "arguments": {...}}, or the arguments alone where there is only one tool."""
    name, _, rest = text.partition(" ")
    named = next((tool for tool in tools if tool.name == name), None)
    if named is not None:
        text, tools = rest or "{}", (named,)
    try:
        call = json.loads(text)
    except ValueError as error:
        form = 'expected NAME {"argument": "value"}'
        return (), (f"malformed tool call: {error}; {form}",)
    if (
        isinstance(call, dict)
        and isinstance(call.get("arguments"), dict)
        and isinstance(call.get("name"), str)
    ):
        return (ToolCall(call["name"], call["arguments"]),), ()
    if isinstance(call, dict) and len(tools) == 1:
        return (ToolCall(tools[0].name, call),), ()
    names = ", ".join(tool.name for tool in tools)
    return (), (f'malformed tool call: expected /tool NAME {{"argument": "value"}}, NAME one of {names}',)


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
