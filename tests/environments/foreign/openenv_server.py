"""Servers that speak OpenEnv's protocol on 127.0.0.1: one replays a recording, one plays a game."""

from __future__ import annotations

import contextlib
import http
import json
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

RECORDED = json.loads((Path(__file__).parent / "recordings" / "openenv.json").read_text())
"""What servers of openenv 0.10.0 said: actions of one text, of two fields, and tools of MCP."""
Answer = Callable[[dict[str, Any]], "dict[str, Any] | None"]


@contextlib.contextmanager
def server(action_schema: dict[str, Any], connected: Callable[[], Answer]) -> Iterator[str]:
    """Its address. `connected` makes what answers on one connection; an answer of None closes it."""
    from websockets.datastructures import Headers
    from websockets.exceptions import ConnectionClosed
    from websockets.http11 import Response
    from websockets.sync.server import serve

    def plain_http(connection: Any, request: Any) -> Any:
        if request.path == "/schema":
            body = json.dumps({"action": action_schema}).encode()
            headers = Headers([("Content-Length", str(len(body))), ("Connection", "close")])
            return Response(http.HTTPStatus.OK, "OK", headers, body)
        return (
            None if request.path == "/ws" else connection.respond(http.HTTPStatus.NOT_FOUND, "no such page")
        )

    def handler(connection: Any) -> None:
        answer = connected()
        with contextlib.suppress(ConnectionClosed):
            for text in connection:
                told = answer(json.loads(text))
                if told is None:
                    return
                connection.send(json.dumps(told))

    with serve(handler, "127.0.0.1", 0, process_request=plain_http) as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{running.socket.getsockname()[1]}"
        running.shutdown()
        thread.join(5)


def replaying(name: str) -> Callable[[], Answer]:
    """Answers as recorded; anything else than the recorded requests, in their order, is an error."""

    def connected() -> Answer:
        waiting = list(RECORDED[name]["exchanges"])

        def answer(sent: dict[str, Any]) -> dict[str, Any]:
            exchange = waiting.pop(0) if waiting else {"sent": "nothing more"}
            if sent != exchange["sent"]:
                said = f"got {sent}, recorded {exchange['sent']}"
                return {"type": "error", "data": {"message": said, "code": "EXECUTION_ERROR"}}
            return exchange["received"]

        return answer

    return connected


def guessing() -> Answer:
    """Guess a number from 1 to 9 in three turns."""
    state: dict[str, int] = {}

    def answer(sent: dict[str, Any]) -> dict[str, Any]:
        if sent["type"] == "reset":
            state.update(secret=random.Random(sent["data"]["seed"]).randint(1, 9), left=3)
            return observed("Guess a number from 1 to 9.", None)
        state["left"] -= 1
        right = sent["data"]["message"].strip() == str(state["secret"])
        return observed("Right." if right else "Wrong.", float(right), right or not state["left"])

    return answer


def observed(text: str, reward: Any, done: Any = False) -> dict[str, Any]:
    return {
        "type": "observation", "data": {"observation": {"text": text}, "reward": reward, "done": done}
    }  # fmt: skip
