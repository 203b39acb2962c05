"""One reply of an actor, without an episode."""

from __future__ import annotations

import asyncio
from typing import Any

from silva.protocols import Actor, Reply, Request
from silva.types import ToolSpec

SEARCH = ToolSpec(
    "search", "finds", {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
)


def ask(actor: Actor, environment: Any = None, **changes: Any) -> Reply:
    values: dict[str, Any] = (
        dict(label="w", messages=(), prefill="", tools=(), max_tokens=9, seed=4, session="s") | changes
    )
    return asyncio.run(actor.reply(Request(environment=environment, render=lambda: [1, 2, 3], **values)))
