"""Messages and tools of a chat request as Silva's own, and checks of what belongs together in them."""

from __future__ import annotations

import json
from collections.abc import Sequence

from silva.rendering.openai import ROLES
from silva.rendering.tool_calls import read_call
from silva.server.bodies import TOOL_BYTES, ChatBody, MessageBody
from silva.server.parsing import shown
from silva.types import Message, ToolCall, ToolSpec
from silva.wire.guard import HttpError


def dialogue(bodies: Sequence[MessageBody]) -> list[Message]:
    """The messages of a chat request.

    Raises:
        HttpError: names the message.
    """
    found: list[Message] = []
    names: dict[str, str] = {}  # of the tools, by the id of the call
    for number, body in enumerate(bodies):
        where = f"messages.{number}"
        role = ROLES[body.role]
        calls = _calls(body, where) if role == "assistant" else ()
        if role != "assistant" and body.tool_calls:
            raise HttpError(400, f"{where}.tool_calls: got a message of {body.role}, expected assistant")
        if body.content is None and not (role == "assistant" and (calls or body.refusal)):
            raise HttpError(400, f"{where}.content: the field is missing, expected a text")
        names.update({call.id: call.name for call in calls if call.id})
        name = None
        if role == "tool":
            name = body.name
            if body.tool_call_id is not None:
                if body.tool_call_id not in names:
                    got = shown(body.tool_call_id)
                    raise HttpError(
                        400, f"{where}.tool_call_id: got {got}, expected the id of an earlier call"
                    )
                name = names[body.tool_call_id]
        found.append(
            Message(
                role=role,
                content=body.content or body.refusal or "",
                reasoning=body.reasoning_content or body.reasoning,
                tool_calls=calls,
                name=name,
            )
        )
    return found


def _calls(body: MessageBody, where: str) -> tuple[ToolCall, ...]:
    found = []
    for number, call in enumerate(body.tool_calls or ()):
        read = read_call(call.function.name, call.function.arguments or "{}", call.id)
        if not isinstance(read, ToolCall):
            raise HttpError(400, f"{where}.tool_calls.{number}.function.arguments: {read}")
        found.append(read)
    return tuple(found)


def tool_specs(body: ChatBody) -> list[ToolSpec]:
    """The tools on offer.

    Raises:
        HttpError: names the tool.
    """
    if body.tool_choice == "none":
        return []
    found = []
    for number, tool in enumerate(body.tools):
        function, where = tool.function, f"tools.{number}.function"
        parameters = function.parameters or {"type": "object", "properties": {}}
        properties, required = parameters.get("properties", {}), parameters.get("required", [])
        if not isinstance(properties, dict):
            raise HttpError(400, f"{where}.parameters.properties: expected an object")
        if not isinstance(required, list) or not all(isinstance(each, str) for each in required):
            raise HttpError(400, f"{where}.parameters.required: expected an array of names")
        found.append(ToolSpec(function.name, function.description or "", parameters))
    if len({tool.name for tool in found}) < len(found):
        raise HttpError(400, "tools: got two of the same name, expected names that differ")
    size = sum(len(json.dumps([tool.description, dict(tool.parameters)])) for tool in found)
    if size > TOOL_BYTES:
        raise HttpError(400, f"tools: got {size} bytes, expected at most {TOOL_BYTES}")
    return found
