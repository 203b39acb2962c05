"""`silva chat`: talk to a model in the terminal, through the same engine and renderer as training."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

from silva.engines.settings import LocalEngineSettings
from silva.errors import ConfigError
from silva.session import Session, model_settings
from silva.types import Message, SamplingParams


def chat(
    path: str | None, *, read: Callable[[str], str] = input, write: Callable[[str], None] = print
) -> int:
    """Answer line by line until an empty line, end of input or Ctrl-C.

    Args:
        path: a run's folder, a model folder or hub id; the packaged model where None.
    """
    place = Path(path or "").expanduser()
    if path is not None and not place.exists() and place.parent.is_dir() and "/" in path:
        raise ConfigError(
            f"silva chat: {path}: no such folder; expected a run's folder, a model folder or hub id"
        )
    session = Session.of_model(model_settings(path), LocalEngineSettings(max_concurrent=1))
    write(f"{session.loaded.name}: an empty line ends the talk")
    try:
        asyncio.run(_talk(session, read, write))
    finally:
        session.close()
    return 0


async def _talk(session: Session, read: Callable[[str], str], write: Callable[[str], None]) -> None:
    context: list[int] = []
    last: tuple[int, ...] = ()
    while True:
        try:
            text = read("> ")
        except EOFError:
            return
        if not text.strip():
            return
        message = Message("user", text)
        context += (
            session.renderer.extend(last, [message]) if context else session.renderer.context([message])
        )
        room = session.engine.capabilities.context - len(context)
        if room < 1:
            write(f"the context of {session.engine.capabilities.context} tokens is full")
            return
        params = SamplingParams(
            max_tokens=min(512, room),
            temperature=0.7,
            stop_token_ids=session.renderer.stop_token_ids,
            seed=len(context),
        )
        answer = await session.engine.sample(context, params)
        context += answer.tokens
        last = answer.tokens
        reply = session.renderer.parse(answer.tokens)
        if reply.reasoning:
            write(f"({reply.reasoning.strip()})")
        write(reply.content.strip())
        sys.stdout.flush()
