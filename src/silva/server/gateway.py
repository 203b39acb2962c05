"""The gateway: a model for programs that drive themselves, at an address for each episode.

    /SESSION/v1/chat/completions, /responses, /models      OpenAI's clients: base URL .../SESSION/v1
    /SESSION/v1/messages, /messages/count_tokens           Anthropic's clients: base URL .../SESSION
    /SESSION/reward                                        what the episode was worth, once
    /SESSION/alive                                         a sign of life
    /claim                                                 a task and its session, for an agent that calls in

A session is open as long as whoever opened it waits for its end, and its name cannot be guessed: it is the
key of its own paths, so that an agent needs no other. All else asks for a key if there is one. When a session
closes, its requests are cancelled and answered with 410, as all later ones are. The gateway listens
while its event loop runs. Not here: how calls become turns (rollouts/calls.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope

from silva.aio import cancelled, first, gather
from silva.errors import ConfigError, PartLost
from silva.ports import CLOCK
from silva.protocols import Endpoint
from silva.rollouts.calls import CallRecorder, PlacedCall
from silva.server import chat
from silva.server.anthropic import MESSAGES
from silva.server.bodies import ChatBody, Name
from silva.server.engine import Listener, apart, unless_gone
from silva.server.forms import CHAT, ApiForm
from silva.server.parsing import Body, parse, read
from silva.server.responses import RESPONSES
from silva.server.streams import Events, dumped
from silva.types import Completion, Message, SamplingParams, Step, Task, ToolSpec
from silva.wire.guard import Application, Guard, HttpError, check_key
from silva.wire.listening import Bind, check_bind, serve
from silva.wire.requests import key_of

MODEL = "silva"
MAX_BODY = 32 << 20  # bytes: long histories with results of tools
AGAIN = "x-stainless-retry-count"  # how often the SDKs of OpenAI and Anthropic have asked before
LOOK = 0.2  # seconds between two looks at a lease
SECRET = 18  # bytes of a session's name
SESSION = re.compile(rf"/[\w-]{{{SECRET * 4 // 3}}}/.*", re.ASCII)


class RewardBody(Body):
    """`reward`: null says that the agent is done, and that somebody posts the reward later."""

    reward: float | None = None
    metrics: Annotated[dict[Name, float], Field(max_length=256)] = Field(default_factory=dict)


class ClaimBody(Body):
    environment: Name | None = None


@dataclass(eq=False)
class _Live:
    """A session that is open.

    Attributes:
        heard: when its agent gave the last sign of life; `leased`: it must give them, unless it waits for
            one of `asking` answers.
    """

    name: str
    calls: CallRecorder
    task: Task
    heard: float = 0.0
    leased: bool = False
    asking: int = 0
    claimed: asyncio.Event = field(default_factory=asyncio.Event)
    closed: asyncio.Event = field(default_factory=asyncio.Event)


class SessionGateway:
    """Implements `protocols.Gateway`.

    Args:
        bind: where it listens.
        key_variable: of the environment, with the key of agents that call in; "" for none.
        url: what programs call the gateway by, if not by the address where it listens.
        lease: seconds without a sign of life after which an agent that has called in counts as gone.
        log: gets a line for each fault of the server, and one that says where it listens.

    Raises:
        ConfigError: other machines could use it without a key, or as `listening.check_bind`.
    """

    def __init__(
        self,
        bind: Bind = Bind(),
        *,
        key_variable: str = "",
        url: str = "",
        lease: float = 60.0,
        log: Callable[[str], None] = lambda line: None,
    ):
        self.bind, self.url, self.lease, self.log = bind, url.rstrip("/"), lease, log
        self.key = key_of(key_variable)
        check_bind(bind, self.key, key_variable)
        self._live: dict[str, _Live] = {}
        self._offers: deque[_Live] = deque()
        self._told = False
        self._serving: asyncio.Task[None] | None = None
        self._address: asyncio.Future[str] | None = None

    @contextlib.asynccontextmanager
    async def open(self, calls: CallRecorder, task: Task) -> AsyncIterator[Endpoint]:
        """
        Raises:
            ConfigError: the address cannot be used.
        """
        address = await self.listen()
        address = self.url or address
        live = _Live(secrets.token_urlsafe(SECRET), calls, task)
        self._live[live.name] = live

        async def outcome() -> Step:
            return await _first_of(calls.posted, self._lost(live))

        async def offer() -> None:
            if not self._told:
                self.log(f"agents call in at {address}/claim")
                self._told = True
            self._offers.append(live)
            with calls.idle():
                await live.claimed.wait()

        try:
            yield Endpoint(f"{address}/{live.name}", MODEL, outcome, offer)
        finally:
            del self._live[live.name]
            with contextlib.suppress(ValueError):
                self._offers.remove(live)
            live.closed.set()

    async def _lost(self, live: _Live) -> Step:
        """
        Raises:
            PartLost: the agent gives no sign of life.
        """
        while not live.leased or live.asking or CLOCK.monotonic() - live.heard < self.lease:
            await asyncio.sleep(min(LOOK, self.lease / 4))
        raise PartLost(f"the agent gave no sign of life for {self.lease:g} s")

    async def listen(self) -> str:
        """The address; it listens from now on, as long as this event loop runs."""
        loop = asyncio.get_running_loop()
        if self._serving is None or self._serving.done() or self._serving.get_loop() is not loop:
            self._address = address = loop.create_future()
            names = [urlsplit(self.url).hostname or ""] if self.url else ()
            app = Guard(
                self._app(), self.bind, key="", log=self.log, max_body=MAX_BODY, admits=self._admit,
                names=names,
            )  # fmt: skip
            self._serving = asyncio.ensure_future(serve(app, self.bind, ready=address.set_result))
        assert self._address is not None
        await asyncio.wait((self._serving, self._address), return_when=asyncio.FIRST_COMPLETED)
        if self._serving.done():
            self._serving.result()
            raise ConfigError("the gateway ended before it listened")
        return self._address.result()

    def _admit(self, scope: Scope) -> None:
        """Raises HttpError for a path that is no session's, without the key."""
        if not SESSION.fullmatch(scope["path"]):
            check_key(scope, self.key)

    def _app(self) -> Application:
        session = "/{session}"
        posts = {
            "/v1/chat/completions": self._answering(CHAT),
            "/v1/responses": self._answering(RESPONSES),
            "/v1/messages": self._answering(MESSAGES),
            "/v1/messages/count_tokens": self._count,
            "/reward": self._reward,
            "/alive": self._alive,
        }
        return Application(
            [
                Route("/claim", self._claim, methods=["POST"]),
                Route(f"{session}/v1/models", self._models, methods=["GET"]),
                *(Route(session + path, handler, methods=["POST"]) for path, handler in posts.items()),
            ]
        )

    def _session(self, request: Request) -> _Live:
        """The session in the path; whoever asks gives a sign of life."""
        live = self._live.get(request.path_params["session"])
        if live is None:
            raise PartLost("this session has ended, or never was")
        live.heard = CLOCK.monotonic()
        return live

    # --- calls of the model

    def _answering(self, form: ApiForm) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        async def handler(request: Request) -> Response:
            live, data = self._session(request), await request.body()
            given, body = await apart(len(data), _read, form, data)
            again = request.headers.get(AGAIN, "0") not in ("0", "")
            asked = (_Asking(live, again), body, request.receive, len(data))

            def named(answer: dict[str, Any]) -> dict[str, Any]:
                return {**answer, "model": body.model or MODEL}

            if not body.stream:
                return _json(form.answer(given, named(await chat.complete(*asked))))
            if form.events is None:
                return Events(lambda tell: chat.stream(*asked, lambda chunk: tell(named(chunk))))
            events = form.events(given)

            def tell_all(tell: Callable[[dict[str, Any]], None], chunk: dict[str, Any]) -> None:
                for event in events.of(named(chunk)):
                    tell(event)

            return Events(lambda tell: chat.stream(*asked, lambda chunk: tell_all(tell, chunk)), named=True)

        return handler

    async def _count(self, request: Request) -> Response:
        live, data = self._session(request), await request.body()
        _, body = await apart(len(data), _read, MESSAGES, data)
        tokens = await apart(8 * len(data), chat.prompt_of, _Asking(live, False), body)
        return _json({"input_tokens": len(tokens)})

    async def _models(self, request: Request) -> Response:
        self._session(request)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "silva"}
        return _json({"object": "list", "data": [model]})

    # --- agents that call in

    async def _claim(self, request: Request) -> Response:
        """The task that has waited longest; 404 if none waits."""
        body = read(ClaimBody, parse(await request.body() or b"{}"))
        fits = (o for o in self._offers if body.environment in (None, o.task.environment))
        live = next(fits, None)
        if live is None:
            raise HttpError(404, "no task waits for an agent", code="no_task", headers={"retry-after": "1"})
        self._offers.remove(live)
        live.heard, live.leased = CLOCK.monotonic(), True
        live.claimed.set()
        task, url = live.task, f"{self.url or str(request.base_url).rstrip('/')}/{live.name}"
        return _json({
            "task": {"id": task.id, "environment": task.environment, "data": dict(task.data)},
            "base_url": f"{url}/v1", "anthropic_base_url": url, "reward_url": f"{url}/reward", "model": MODEL,
        })  # fmt: skip

    async def _alive(self, request: Request) -> Response:
        self._session(request)
        return _json({})

    async def _reward(self, request: Request) -> Response:
        live = self._session(request)
        body = read(RewardBody, parse(await request.body()))
        if body.reward is None:
            live.leased = False
        elif live.calls.posted.done():
            raise HttpError(409, "reward: this session has its reward", code="has_reward")
        else:
            live.calls.posted.set_result(Step(rewards={"reward": body.reward}, metrics=body.metrics))
        return _json({})


class _Asking:
    """Implements `chat.Answering`: one request of a session. `again`: the client has asked it before."""

    def __init__(self, live: _Live, again: bool) -> None:
        self._live, self._again = live, again
        self.renderer, self.context = live.calls.renderer, live.calls.context
        self._call: PlacedCall | None = None

    def shown(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        self._call = self._live.calls.ask(messages, tools)
        return list(self._call.tokens)

    async def sample(
        self,
        receive: Receive,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        live: Listener | None = None,
        *,
        stop: Sequence[str] = (),
        tools: Sequence[ToolSpec] = (),
    ) -> list[Completion]:
        """
        Raises:
            PartLost: the session ended meanwhile.
        """
        assert self._call is not None
        call = self._call

        async def one(number: int, own: SamplingParams) -> Completion:
            def on_tokens(tokens: Sequence[int], logprobs: Sequence[float]) -> None:
                if live is not None:
                    live.tokens(number, tokens, logprobs)

            found = await call.answer(own.max_tokens, stop, on_tokens if live else None, again=self._again)
            if live is not None:
                live.end(number, found)
            return found

        work = unless_gone(receive, gather(one(*each) for each in enumerate(params)))
        self._live.asking += 1
        try:
            done = await first(work, self._live.closed.wait())
        finally:
            self._live.asking -= 1
            self._live.heard = CLOCK.monotonic()
        if done is None:
            raise PartLost("this session has ended")
        return done.result()


def _read(form: ApiForm, data: bytes) -> tuple[Mapping[str, Any], ChatBody]:
    given = parse(data)
    return given, read(ChatBody, form.asked(given))


async def _first_of(posted: asyncio.Future[Step], lost: Coroutine[Any, Any, Step]) -> Step:
    """What is posted, unless the other ends before, with its error."""
    watching = asyncio.ensure_future(lost)
    try:
        await asyncio.wait((posted, watching), return_when=asyncio.FIRST_COMPLETED)
        return posted.result() if posted.done() else watching.result()
    finally:
        await cancelled((watching,))


def _json(content: Mapping[str, Any]) -> Response:
    return Response(dumped(content), media_type="application/json")
