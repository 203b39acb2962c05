"""A chat API on localhost that answers as a test says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.tools import web_server
from tests.tools.web_server import Reply, Request

Answer = dict[str, Any] | bytes | str | tuple[int, dict[str, str], Any]
Script = Callable[[int, dict[str, Any]], Answer]


def said(
    content: str | None = "yes", *, finish: str = "stop", usage: Any = (10, 4), **more: Any
) -> dict[str, Any]:
    """The body of an answer; `usage`: tokens of input and output, or None."""
    body: dict[str, Any] = {"choices": [{"message": {"role": "assistant", "content": content, **more},
                                         "finish_reason": finish}]}  # fmt: skip
    if usage:
        body["usage"] = {"prompt_tokens": usage[0], "completion_tokens": usage[1]}
    return body


def called(*calls: tuple[str, Any]) -> list[dict[str, Any]]:
    return [
        {"id": f"id{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]


class Server:
    """Attributes: `bodies` and `headers` of every request so far."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.url = ""

    def answer(self, number: int, request: Request) -> Any:
        if request.method == "GET":  # nothing but chats is served here
            return Reply(status=404)
        self.bodies.append(request.body)
        self.headers.append(request.headers)
        answer = self.script(len(self.bodies) - 1, request.body)
        if not isinstance(answer, tuple):
            return answer
        status, headers, content = answer
        return Reply(content, status, headers)


@contextmanager
def serving(script: Script) -> Iterator[Server]:
    server = Server(script)
    with web_server.serving(server.answer) as web:
        server.url = f"{web.url}/v1"
        yield server
