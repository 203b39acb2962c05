"""`silva chat`: talk to a model in the terminal, through the same engine and renderer as training."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

from silva.assembly import Assembly
from silva.commands.command import Given
from silva.config.schema import run_config
from silva.config.sections import PretrainedModel
from silva.errors import ConfigError
from silva.models.sources import pinned, run_of
from silva.monitoring.printable import put
from silva.registries import REGISTRIES
from silva.run import loaded
from silva.signals import be_caught
from silva.types import Message, SamplingParams


def run(given: Given) -> int:
    given.only(1, "at most one path")
    be_caught()
    return chat(given.rest[0] if given.rest else None)


def chat(path: str | None, *, read: Callable[[str], str] = input, write: Callable[[str], None] = put) -> int:
    """Answer line by line until an empty line, end of input or Ctrl-C.

    Args:
        path: a run's folder (runs/lake, runs/lake@best, runs/lake@step_200), a model folder or hub id; the
            packaged model if None.
    """
    place = Path(path or "").expanduser()
    missing = path is not None and "/" in path and place.parent.is_dir() and not place.exists()
    if missing and run_of(str(path))[0] is None:
        raise ConfigError(
            f"silva chat: {path}: no such folder; expected a run's folder, a model folder or hub id"
        )
    model = PretrainedModel() if path is None else PretrainedModel(name=pinned(path))
    config = run_config(REGISTRIES).model_construct(model=model, environments=())
    with loaded(config) as assembly:
        write(f"{assembly.model.name}: an empty line ends the talk")
        asyncio.run(_talk(assembly, read, write))
    return 0


async def _talk(assembly: Assembly, read: Callable[[str], str], write: Callable[[str], None]) -> None:
    await assembly.connect()
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
            assembly.renderer.extend(last, [message]) if context else assembly.renderer.context([message])
        )
        room = assembly.engine.capabilities.context - len(context)
        if room < 1:
            write(f"the context of {assembly.engine.capabilities.context} tokens is full")
            return
        params = SamplingParams(
            max_tokens=min(512, room),
            temperature=0.7,
            stop_token_ids=assembly.renderer.stop_token_ids,
            seed=len(context),
        )
        answer = await assembly.engine.sample(context, params)
        reply = assembly.renderer.parse(answer.tokens, prompt=context)
        context += answer.tokens
        last = answer.tokens
        if reply.reasoning:
            write(f"({reply.reasoning.strip()})")
        write(reply.content.strip())
        sys.stdout.flush()
