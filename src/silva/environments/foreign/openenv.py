"""Environments that an OpenEnv server plays, over its WebSocket.

    type = "openenv"
    url = "http://127.0.0.1:8000"

What an action is, the server says:

    tools of MCP                    the model calls them
    one required field of text      a reply without a call is the action
    anything else                   a tool `act` with the fields of the action

One connection is one episode. `reset` gets the seed of the task, besides the keys of `reset`; a server that
ignores it gives the same problems in both splits.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from silva.config.sections import Above0, Positive, WebAddress
from silva.environments.foreign.dialogue import (
    ForeignDialogue,
    ForeignDialogueSettings,
    ForeignSession,
    Graded,
)
from silva.environments.foreign.library import as_json, finite, imported, solved
from silva.environments.foreign.seeds import seeded
from silva.errors import SilvaError
from silva.thoughts import answer_of
from silva.tools.calls import SessionTool
from silva.tools.function import ToolError
from silva.types import Message, Step, Task, ToolSpec

if TYPE_CHECKING:
    from silva.protocols import TaskSet

PACKAGE = "websockets>=14"
TOOL_ACTIONS = ("Action", "CallToolAction", "ListToolsAction")  # titles of an action schema
LARGEST = 16 << 20  # bytes of a message
MODELS_ERRORS = ("execution_error", "invalid_args", "tool_not_found")
"""Errors of tools that the model reads; all others, such as transport_error and timeout, are the server's."""
NOT_SHOWN = ("metadata", "done", "reward")


class OpenEnvFault(SilvaError, OSError):
    """The server failed: the episode has no result."""


class OpenEnv(ForeignDialogueSettings):
    """An environment behind an OpenEnv server."""

    licence: ClassVar[str] = "that of the server"
    needs: ClassVar[str] = "`url` of a running server"
    packages: ClassVar[tuple[str, ...]] = ("websockets",)

    type: Literal["openenv"] = "openenv"
    url: WebAddress
    """Address of the server, such as "http://127.0.0.1:8000"."""
    reset: Mapping[str, Any] = {}
    """Further arguments of its `reset`."""
    max_tool_calls: Positive = 50
    """Actions of one episode; one more ends it."""
    timeout: Above0 = 60.0
    """Seconds the server may take for one answer."""

    def taskset(self) -> TaskSet:
        library = imported("websockets.asyncio.client", self.type, PACKAGE)

        def build(task: Task) -> OpenEnvEpisode:
            return OpenEnvEpisode(self, task, lambda: OpenEnvSession(self, library, task.data["seed"]))

        return seeded(self, None, build)


class OpenEnvEpisode(ForeignDialogue):
    settings: OpenEnv

    async def step(self, message: Message) -> Step:
        step = await super().step(message)
        if self.session.done and not (step.terminated or step.truncated):
            final = await self.end(terminated=True)
            step = dataclasses.replace(
                final, observation=step.observation, metrics={**step.metrics, **final.metrics}
            )
        return dataclasses.replace(step, rewards={"reward": self.session.taken()})

    async def answered(self, message: Message) -> Step:
        if self.session.field is None:
            return await super().answered(message)
        if self.calls.left == 0:
            return await self.out_of_calls(message)
        self.calls.left -= 1
        reply = answer_of(message.content).strip()
        try:
            shown = await self.session.act({self.session.field: reply})
        except ToolError as error:
            shown = f"Error: {error}"
        return Step(self.show(self.say(shown)))

    async def end(self, *, terminated: bool) -> Step:
        step = await super().end(terminated=terminated)
        success = float(solved(self.session.total, self.settings.solved_at))
        return dataclasses.replace(step, metrics={**step.metrics, "success": success})


class OpenEnvSession(ForeignSession):
    """A connection.

    Attributes:
        field: of the action that a reply fills; None if tools are called instead.
        total: all rewards so far.
    """

    def __init__(self, settings: OpenEnv, library: Any, seed: int) -> None:
        self.settings, self.library, self.seed = settings, library, seed
        self.connection: Any = None
        self.tools: list[SessionTool] = []
        self.field: str | None = None
        self.done = False
        self.total = self._untaken = 0.0
        self._alone = asyncio.Lock()  # answers come in the order of the requests
        self._owed = False  # an answer to a request that was cut off: it would answer the next one
        self._graded = False

    async def start(self) -> None:
        """
        Raises:
            OpenEnvFault: there is no server, or it refuses.
        """
        settings = self.settings
        address = f"{settings.url.rstrip('/').replace('http', 'ws', 1)}/ws"
        try:
            schema = await asyncio.to_thread(_action_schema, settings)
            async with asyncio.timeout(settings.timeout):
                self.connection = await self.library.connect(address, max_size=LARGEST)
        except (OSError, TimeoutError, ValueError) as error:
            raise OpenEnvFault(f"openenv: no server at {settings.url}: {error or 'no answer'}") from error
        told = await self.ask("reset", {"seed": self.seed, **settings.reset})
        self.opening = [("user", _shown(told["observation"]) or "Begin.")]
        await self._offer(schema)

    async def ask(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """The server's observation.

        Raises:
            ToolError: it does not accept the action.
            OpenEnvFault: it fails, or there is no answer.
        """
        closed = imported("websockets.exceptions", self.settings.type, PACKAGE).WebSocketException
        try:
            async with self._alone, asyncio.timeout(self.settings.timeout):
                if self._owed:
                    raise OpenEnvFault(f"openenv: {kind}: an earlier request was cut off")
                self._owed = True
                await self.connection.send(as_json({"type": kind, "data": dict(data)}).decode())
                text = await self.connection.recv()
                self._owed = False
                answer = json.loads(text)
        except OpenEnvFault:
            raise
        except (OSError, TimeoutError, ValueError, closed) as error:
            raise OpenEnvFault(f"openenv: {kind}: no answer: {type(error).__name__}: {error}") from error
        told = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(told, dict):
            raise OpenEnvFault(f"openenv: {kind}: got {str(answer)[:200]!r}, expected an observation")
        if answer.get("type") == "error":
            said = f"{told.get('message')} ({told.get('code')})"
            if kind == "step" and told.get("code") == "VALIDATION_ERROR":
                raise ToolError(f"{said}: {json.dumps(told.get('errors'), default=str)[:500]}")
            raise OpenEnvFault(f"openenv: {kind}: {said}")
        if not isinstance(told.get("observation"), dict):
            raise OpenEnvFault(f"openenv: {kind}: got {str(told)[:200]!r}, expected `observation`")
        return told

    async def act(self, action: Mapping[str, Any]) -> str:
        """What the model sees after an action."""
        told = await self._played(action)
        return _shown(told["observation"])

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """The result of a tool of MCP."""
        told = await self._played({"type": "call_tool", "tool_name": tool, "arguments": dict(arguments)})
        observation = told["observation"]
        if error := observation.get("error"):
            kind = error.get("error_type") if isinstance(error, dict) else None
            if kind in MODELS_ERRORS:
                raise ToolError(str(error.get("message")))
            raise OpenEnvFault(f"openenv: {tool}: {str(error)[:300]}")
        return _result(observation.get("result"))

    async def grade(self, messages: Sequence[Message]) -> Graded:
        return Graded(0.0)  # every step has had its own reward

    def taken(self) -> float:
        """Rewards since this was last asked for."""
        reward, self._untaken = self._untaken, 0.0
        return reward

    async def close(self) -> None:
        connection, self.connection = self.connection, None
        if connection is not None:
            await connection.close()

    async def _played(self, action: Mapping[str, Any]) -> Mapping[str, Any]:
        if self.done:
            raise ToolError("the episode is over")
        told = await self.ask("step", action)
        reward = told.get("reward")
        if reward is not None:
            self._graded = True
            self.total += (reward := finite(reward, f"environment {self.settings.label}"))
            self._untaken += reward
        if not isinstance(told.get("done", False), bool):
            raise OpenEnvFault(f"openenv: step: got done = {told['done']!r}, expected true or false")
        self.done = told.get("done", False)
        if self.done and not self._graded:
            raise OpenEnvFault("openenv: step: the episode is over, and no answer had a reward")
        return told

    async def _offer(self, schema: Mapping[str, Any]) -> None:
        """Decides what an action is, by the schema of the server's actions."""
        if schema.get("title") in TOOL_ACTIONS:
            told = await self.ask("step", {"type": "list_tools"})
            for each in told["observation"].get("tools", ()):
                inputs = each.get("input_schema") or each.get("inputSchema")
                spec = ToolSpec(
                    each["name"],
                    each.get("description") or "",
                    inputs or {"type": "object", "properties": {}},
                )
                call = functools.partial(self.call, spec.name)
                self.tools.append(SessionTool(spec, self.settings.timeout, call))
            return
        fields = {k: v for k, v in schema.get("properties", {}).items() if k not in NOT_SHOWN}
        required = [name for name in schema.get("required", fields) if name in fields]
        if len(required) == 1 and fields[required[0]].get("type") == "string":
            self.field = required[0]
            return
        about = schema.get("description") or "Acts in the environment."
        parameters = {"type": "object", "properties": fields, "required": required}
        if "$defs" in schema:
            parameters["$defs"] = schema["$defs"]
        self.tools = [SessionTool(ToolSpec("act", about, parameters), self.settings.timeout, self.act)]


def _action_schema(settings: OpenEnv) -> Mapping[str, Any]:
    """Raises OSError or ValueError if the server gives none."""
    request = urllib.request.Request(f"{settings.url.rstrip('/')}/schema")
    with urllib.request.urlopen(request, timeout=settings.timeout) as answer:
        found = json.loads(answer.read(LARGEST))
    schema = found.get("action") if isinstance(found, dict) else None
    if not isinstance(schema, dict):
        raise ValueError("/schema has no `action`")
    return schema


def _shown(observation: Mapping[str, Any]) -> str:
    """The fields of an observation: the only one that is text as it is, otherwise a line for each."""
    fields = {k: v for k, v in observation.items() if k not in NOT_SHOWN and v not in (None, "", [], {})}
    if len(fields) == 1 and isinstance(text := next(iter(fields.values())), str):
        return text
    return "\n".join(
        f"{name}: {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
        for name, value in fields.items()
    )


def _result(result: Any) -> str:
    """The text in a result of MCP, or the result itself.

    Raises:
        ToolError: the tool says that it failed.
    """
    if isinstance(result, dict) and isinstance(result.get("content"), list):
        parts = [str(part.get("text", "")) for part in result["content"] if isinstance(part, dict)]
        text = "\n".join(filter(None, parts))
        if result.get("is_error") or result.get("isError"):
            raise ToolError(text or "the tool failed")
        return text
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
