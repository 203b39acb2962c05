"""Answers that go out while they are sampled: server-sent events, and what is known of a choice so far.

    engine ──tokens──> Choice.text ──what no later token changes──> chunk ──tell──> Events ──> client

Not here: the form of chunks (chat.py, completions.py).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from silva.aio import cancelled
from silva.rendering.renderer import Renderer
from silva.server.bodies import SamplingBody
from silva.wire.guard import error_of

Tell = Callable[[dict[str, Any]], None]  # takes a chunk


class Choice:
    """Attributes: `tokens` and `logprobs` so far, `sent` of which were in chunks; `text`, as `GrowingText`.

    Args:
        ends: tokens that are no text where they end a reply.
    """

    def __init__(self, renderer: Renderer, ends: Collection[int], *, control: bool) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.sent = self._read = 0
        self._renderer, self._ends, self._control = renderer, ends, control
        self._growing = renderer.growing()

    @property
    def text(self) -> str:
        return self._growing.text

    def add(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        self.tokens += tokens
        self.logprobs += logprobs
        stop = len(self.tokens) - (self.tokens[-1] in self._ends)
        new = self.tokens[self._read : stop]
        self._read = max(self._read, stop)
        self._growing.add(new if self._control else self._renderer.words(new))


class Stream:
    """The chunks of one answer, in order."""

    def __init__(self, head: Mapping[str, Any], body: SamplingBody, tell: Tell) -> None:
        self._usage = body.stream_options is not None and body.stream_options.include_usage
        self._head = {**head, "usage": None} if self._usage else dict(head)
        self._tell = tell

    def send(self, choice: dict[str, Any], **more: Any) -> None:
        self._tell({**self._head, "choices": [choice], **more})

    def finish(self, usage: dict[str, Any]) -> None:
        if self._usage:
            self._tell({**self._head, "choices": [], "usage": usage})


class Events(Response):
    """Server-sent events, as OpenAI's streams are.

    An error before the first chunk is an answer of its own. Later it is the last event, and then the
    connection is cut, so that half an answer never looks like a whole one.

    Args:
        work: gives chunks to the function that it gets.
        named: events have the `type` of their chunk as a name, and the last chunk is the end, as in the
            streams of OpenAI's responses and of Anthropic.
    """

    media_type = "text/event-stream"

    def __init__(self, work: Callable[[Tell], Coroutine[Any, Any, None]], *, named: bool = False) -> None:
        super().__init__(headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._work, self._named = work, named

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        chunks: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        task = asyncio.ensure_future(self._work(chunks.put_nowait))
        task.add_done_callback(lambda _: chunks.put_nowait(None))
        started = False

        async def emit(event: str, *, more: bool = True) -> None:
            nonlocal started
            if not started:
                started = True
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": event.encode(), "more_body": more})

        try:
            while (chunk := await chunks.get()) is not None:
                await emit(self._written(chunk))
            await task
            await emit("" if self._named else "data: [DONE]\n\n", more=False)
        except Exception as error:
            if started:
                await emit(
                    self._written({"type": "error", **error_of(error)} if self._named else error_of(error))
                )
            raise
        finally:
            await cancelled((task,))

    def _written(self, chunk: Mapping[str, Any]) -> str:
        name = f"event: {chunk['type']}\n" if self._named else ""
        return f"{name}data: {dumped(chunk)}\n\n"


def dumped(content: Mapping[str, Any]) -> str:
    """Numbers keep all their bits."""
    return json.dumps(content, allow_nan=False, separators=(",", ":"))
