"""The inference server's routes: an engine and a renderer as an OpenAI-compatible API, and its weights.

    /v1/completions, /v1/chat/completions, /v1/models      OpenAI's API, with vLLM's fields
    /score, /capabilities, /load, /sleep                   what Silva's own client needs beside it
    /update_weights, /reload_weights                       as PRIME-RL has them
    /health, /alive, /metrics, /openapi.json               for whoever watches it

Not here: keys, hosts and the sizes of bodies (wire/guard.py, which stands before this), and listening
(wire/listening.py).
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from silva import __version__
from silva.errors import CapabilityError, ConfigError, ContextOverflow
from silva.models.snapshots import weight_folder
from silva.ports import CLOCK
from silva.protocols import Engine
from silva.rendering.renderer import Renderer
from silva.scratch import holds_weights
from silva.server import chat, completions, openapi
from silva.server.bodies import (
    ChatBody,
    CompletionBody,
    EmptyBody,
    LoadBody,
    ScoreBody,
    UpdateBody,
)
from silva.server.engine import GONE, ServerLimits, Service, apart
from silva.server.parsing import Body, parse, read
from silva.server.prometheus import ServerCounts
from silva.server.streams import Events, dumped
from silva.types import Snapshot, WeightFolder
from silva.wire.guard import Application, HttpError, fault_of

FOLDERS = frozenset({"folder", "parameters"})  # kinds of snapshots that can reach another process
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
T = TypeVar("T", bound=Body)


def inference_app(
    engine: Engine,
    renderer: Renderer,
    *,
    model: str,
    limits: ServerLimits,
    reload: Callable[[], Awaitable[None]] | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> Application:
    """The routes; whoever serves them puts a `Guard` before them.

    Args:
        model: its name; a request for another one is refused.
        reload: loads the weights that the engine began with.
        log: gets a line when the weights change.
    """
    return _Server(Service(engine, renderer, limits), model, reload, log).application()


class _Served(NamedTuple):
    method: str
    path: str
    handler: Callable[[Request], Coroutine[Any, Any, Response]]
    body: type[Body] | None
    summary: str


class _Counted:
    """A route whose requests are counted once their answers are sent. An object is an app to starlette."""

    def __init__(self, counts: ServerCounts, route: _Served) -> None:
        self._counts, self._route = counts, route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began, status = CLOCK.monotonic(), GONE
        counts, path = self._counts, self._route.path
        try:
            response = await self._route.handler(Request(scope, receive))
            await response(scope, receive, send)
            status = response.status_code
        except Exception as error:
            status = fault_of(error).status
            raise
        finally:
            counts.add("requests", route=path, status=str(status))
            counts.add("request_seconds", CLOCK.monotonic() - began, route=path)


class _Server:
    def __init__(
        self,
        service: Service,
        model: str,
        reload: Callable[[], Awaitable[None]] | None,
        log: Callable[[str], None],
    ) -> None:
        self.service, self.model, self.reload, self.log = service, model, reload, log
        self.started = int(CLOCK.time())

    def routes(self) -> Sequence[_Served]:
        return (
            _Served("POST", "/v1/completions", self.complete, CompletionBody, "continues prompts"),
            _Served("POST", "/v1/chat/completions", self.chat, ChatBody, "answers a dialogue"),
            _Served("GET", "/v1/models", self.models, None, "the model"),
            _Served("GET", "/v1/models/{model:path}", self.one_model, None, "the same, by its name"),
            _Served("POST", "/score", self.score, ScoreBody, "log-probabilities of given tokens"),
            _Served("GET", "/capabilities", self.capabilities, None, "what the engine can do"),
            _Served("POST", "/load", self.load, LoadBody, "loads a snapshot"),
            _Served("POST", "/sleep", self.sleep, EmptyBody, "gives memory back until the next request"),
            _Served("POST", "/update_weights", self.update, UpdateBody, "loads a folder as the next version"),
            _Served("POST", "/reload_weights", self.begin_again, EmptyBody, "loads the first weights again"),
            _Served("GET", "/health", self.health, None, "samples a token"),
            _Served("GET", "/alive", self.alive, None, "answers at once"),
            _Served("GET", "/metrics", self.metrics, None, "counts, for Prometheus"),
            _Served("GET", "/openapi.json", self.document, None, "this document"),
        )

    def application(self) -> Application:
        return Application([Route(r.path, self._counted(r), methods=[r.method]) for r in self.routes()])

    def _counted(self, route: _Served) -> ASGIApp:
        return _Counted(self.service.counts, route)

    async def _read(self, request: Request, kind: type[T]) -> tuple[T, int]:
        """The fields of the body, and its bytes."""
        data = await request.body()
        if not data and kind is EmptyBody:
            data = b"{}"
        return await apart(len(data), lambda: read(kind, parse(data))), len(data)

    def _check_name(self, model: str | None) -> None:
        if model not in (None, self.model):
            message = f"model: got {model!r}, this server has {self.model!r}"
            raise HttpError(404, message, code="model_not_found")

    # --- OpenAI's API

    async def complete(self, request: Request) -> Response:
        body, size = await self._read(request, CompletionBody)
        return await self._answered(completions, body, request, size)

    async def chat(self, request: Request) -> Response:
        body, size = await self._read(request, ChatBody)
        return await self._answered(chat, body, request, size)

    async def _answered(self, kind: Any, body: Any, request: Request, size: int) -> Response:
        """By `complete` or `stream` of a module."""
        self._check_name(body.model)
        weights = self._weights()

        def stamped(answer: dict[str, Any]) -> dict[str, Any]:
            own = {"weights": weights()} if body.return_token_ids else {}
            return {**answer, "model": self.model, **own}

        asked = (self.service, body, request.receive, size)
        if not body.stream:
            return _json(stamped(await kind.complete(*asked)))
        return Events(lambda tell: kind.stream(*asked, lambda chunk: tell(stamped(chunk))))

    def _weights(self) -> Callable[[], list[str]]:
        """What names all weights that the server has held since now."""
        held = self.service.held
        now = len(held) - 1
        return lambda: held[now:]

    async def models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [self._model()]})

    async def one_model(self, request: Request) -> Response:
        self._check_name(request.path_params["model"])
        return _json(self._model())

    def _model(self) -> dict[str, Any]:
        context = self.service.engine.capabilities.context
        return {"id": self.model, "object": "model", "created": self.started, "owned_by": "silva",
                "max_model_len": context}  # fmt: skip

    # --- Silva's own client

    async def score(self, request: Request) -> Response:
        body, _ = await self._read(request, ScoreBody)
        tokens, context = self.service.known(body.tokens, "tokens"), self.service.engine.capabilities.context
        if len(tokens) > context:
            raise ContextOverflow(f"tokens: got {len(tokens)}, expected at most {context}")
        if body.start > len(tokens):
            raise HttpError(400, f"start: got {body.start}, expected 1 to {len(tokens)}")
        weights = self._weights()
        (scores,) = await self.service.score(request.receive, [tokens], body.start)
        return _json(
            {
                "logprobs": scores.logprobs,
                "likeliest": scores.likeliest,
                "likeliest_logprobs": scores.likeliest_logprobs,
                "version": scores.version,
                "weights": weights(),
            }
        )

    async def capabilities(self, request: Request) -> Response:
        engine = self.service.engine
        context = engine.capabilities.context
        return _json(
            {
                "context": context,
                "entropies": engine.capabilities.entropies,
                "routes": engine.capabilities.routes,
                "loads": sorted(FOLDERS & engine.capabilities.loads),
                "machine": dict(engine.machine),
                "notes": list(engine.notes),
                "version": engine.version,
                "weights": self.service.held[-1],
                "model": self.model,
                "silva": __version__,
                "memory_per_token": engine.memory(1, context) / context,
            }
        )

    async def load(self, request: Request) -> Response:
        body, _ = await self._read(request, LoadBody)
        loads = self.service.engine.capabilities.loads
        if not FOLDERS & loads:
            raise CapabilityError(f"load: got a folder, this engine loads {', '.join(sorted(loads))}")

        def snapshot() -> Snapshot:
            path = self._folder(body.folder.path)
            return Snapshot(body.version, WeightFolder(str(path), body.folder.digest))

        return _json({"version": await self._loaded(snapshot, body.owner)})

    async def sleep(self, request: Request) -> Response:
        await self._read(request, EmptyBody)
        await self.service.engine.sleep()
        return _json({})

    # --- weights, as PRIME-RL's trainer sends them

    async def update(self, request: Request) -> Response:
        body, _ = await self._read(request, UpdateBody)

        def snapshot() -> Snapshot:
            return Snapshot(self.service.engine.version + 1, weight_folder(self._folder(body.weight_dir)))

        return _json({"status": "ok", "version": await self._loaded(snapshot)})

    async def begin_again(self, request: Request) -> Response:
        await self._read(request, EmptyBody)
        if self.reload is None:
            raise ConfigError("reload_weights: this server does not know the weights that it began with")
        await self.service.begin_again(self.reload)
        self.log(f"weights: the first ones again, as version {self.service.engine.version}")
        return _json({"status": "ok", "version": self.service.engine.version})

    async def _loaded(self, make: Callable[[], Snapshot], owner: str = "") -> int:
        version = await self.service.load(make, owner)
        self.log(f"weights: version {version}")
        return version

    def _folder(self, given: str) -> Path:
        """A folder of weights that requests may name."""
        path, allowed = Path(given), self.service.limits.folders
        try:
            if not path.is_absolute() or "\0" in given:
                raise ConfigError(f"weights: got the folder {given!r}, expected an absolute path")
            path = path.resolve()
            inside = any(path.is_relative_to(each.resolve()) for each in allowed)
            if allowed and not inside and not holds_weights(path):
                raise ConfigError(f"weights: {path} is outside the folders that this server loads from")
            if not path.is_dir():
                raise ConfigError(f"weights: {path} is no folder")
        except (OSError, RuntimeError) as error:  # a name that is too long, a circle of links
            raise ConfigError(f"weights: {given!r} cannot be read: {error}") from error
        return path

    # --- for whoever watches

    async def health(self, request: Request) -> Response:
        return _json(await self.service.health())

    async def alive(self, request: Request) -> Response:
        """Asked with `?owner=`, it is also the owner's sign of life."""
        engine, service = self.service.engine, self.service
        service.heard_of(request.query_params.get("owner", ""))
        state = {"version": engine.version, "weights": service.held[-1], "pid": os.getpid(),
                 "silva": __version__, "counts": engine.counts()}  # fmt: skip
        return _json({"role": "inference", **state})

    async def metrics(self, request: Request) -> Response:
        service = self.service
        gauges = {
            "requests_running": service.running,
            "requests_waiting": service.asked - service.running,
            "policy_version": service.engine.version,
        }
        return Response(service.counts.text(gauges, service.engine.counts()), media_type=PROMETHEUS)

    async def document(self, request: Request) -> Response:
        routes = {(r.method, r.path): (r.body, r.summary) for r in self.routes()}
        return _json(openapi.document(routes, vocabulary=self.service.renderer.vocabulary))


def _json(content: Mapping[str, Any]) -> Response:
    return Response(dumped(content), media_type="application/json")
