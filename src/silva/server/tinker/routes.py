"""The service that the Tinker SDK speaks to: its routes, behind the guard of all servers.

    /api/v1/create_session, create_model, ...      rows in the tables, then an id
    /api/v1/forward_backward, optim_step, ...      a request in the order of a model  ──> training.py
    /api/v1/asample                                a request that samples             ──> sampling.py
    /api/v1/retrieve_future                        its result, as soon as there is one

A request that has a place in the order of a model is accepted even if its content is wrong: the error is its
result, for without it all after it would wait for ever. What belongs to another key is not found. Not here:
listings (listings.py), and keys, hosts and sizes (keys.py, wire/guard.py).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import sqlite3
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from silva.ports import CLOCK
from silva.server.engine import apart
from silva.server.parsing import Body, parse, read
from silva.server.tinker import bodies, messages
from silva.server.tinker.checkpoints import TRAINING, found
from silva.server.tinker.futures import Futures, FutureWork
from silva.server.tinker.keys import owner
from silva.server.tinker.quotas import Quotas
from silva.server.tinker.sampling import SampleQueue
from silva.server.tinker.tables import Row, Tables
from silva.server.tinker.training import TrainQueue
from silva.wire.guard import HttpError

PREFIX = "/api/v1"
B = TypeVar("B", bound=Body)
Handler = Callable[[Request, str], Coroutine[Any, Any, Any]]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What is served: `tokenizer` is what clients load it by, a hub id or a folder."""

    name: str
    tokenizer: str
    architecture: str
    context: int


REFUSED = {
    ("POST", "/create_custom_loss"): "custom losses are computed by the client (forward_backward_custom)",
    ("POST", "/copy_weights"): "this server has no projects to copy weights to",
    ("POST", "/join_sampling_session"): "clones of a sampling client draw their own numbers here",
    ("POST", "/retrieve_futures"): "results are fetched one by one (retrieve_future)",
    ("POST", "/auth/token"): "this server takes API keys alone, which belong to no user",
    ("PUT", "/sessions/{id}/project"): "this server has no projects",
    ("GET", "/sessions/{id}/trace_export"): "this server records no traces",
    ("GET", "/audit"): "this server has no audit log",
    ("GET", "/billing/usage/events"): "this server has no bills",
    ("GET", "/billing/usage/checkpoints/current"): "this server has no bills",
}  # fmt: skip
"""What the SDK can ask for and this server cannot do."""


class TinkerRoutes:
    """The routes that begin something."""

    def __init__(
        self,
        tables: Tables,
        futures: Futures,
        training: TrainQueue,
        sampling: SampleQueue,
        model: ServedModel,
        quotas: Quotas,
    ) -> None:
        self._tables, self._futures, self._model, self._quotas = tables, futures, model, quotas
        self._training, self._sampling = training, sampling
        self._opening = asyncio.Lock()

    def routes(self) -> Mapping[tuple[str, str], Handler]:
        ordered: dict[str, type[Body]] = {
            "optim_step": bodies.OptimBody,
            "save_weights": bodies.SaveBody,
            "save_weights_for_sampler": bodies.SamplerBody,
            "save_weights_external": bodies.ExternalBody,
        }
        return {
            ("POST", "/create_session"): self.create_session,
            ("POST", "/session_heartbeat"): self.heartbeat,
            ("POST", "/sessions/{id}/finish"): self.finish,
            ("POST", "/create_model"): self.create_model,
            ("POST", "/forward_backward"): self.passed,
            ("POST", "/load_weights"): self.load,
            **{("POST", f"/{kind}"): self._ordered(kind, body) for kind, body in ordered.items()},
            ("POST", "/create_sampling_session"): self.create_sampler,
            ("POST", "/asample"): self.sample,
            ("POST", "/cancel_future"): self.cancel,
            ("POST", "/retrieve_future"): self.retrieve,
        }

    # --- sessions

    async def create_session(self, request: Request, owner: str) -> Any:
        body, sent = await posted(request, bodies.SessionBody), request.headers.get("x-idempotency-key", "")
        # What is sent again, since its answer was lost, is the same session. That of another key is not.
        told = hashlib.blake2b(f"{owner} {sent}".encode(), digest_size=12).hexdigest()
        name, now = told if sent else secrets.token_hex(12), CLOCK.time()
        values = (name, owner, body.display_name, _dumped(body.user_metadata), now, now)
        query = ("INSERT INTO sessions (id, owner, name, metadata, created, heard) VALUES (?, ?, ?, ?, ?, ?) "
                 "ON CONFLICT (id) DO NOTHING")  # fmt: skip
        await self._tables.change(query, *values)
        return {"session_id": name}

    async def heartbeat(self, request: Request, owner: str) -> Any:
        body = await posted(request, bodies.HeartbeatBody)
        await self._session(body.session_id, owner)
        await self._tables.change("UPDATE sessions SET heard = ? WHERE id = ?", CLOCK.time(), body.session_id)
        return {}

    async def finish(self, request: Request, owner: str) -> Any:
        body, name = await posted(request, bodies.FinishBody), request.path_params["id"]
        if await self._tables.row("SELECT 1 FROM sessions WHERE id = ? AND owner = ?", name, owner) is None:
            raise HttpError(404, f"session {name[:99]}: not found")
        how = bodies.REASONS.index(body.reason.type) + 2 if body.reason else 1
        first = "UPDATE sessions SET finished = ? WHERE id = ? AND finished = 0"
        await self._tables.change(first, how, name)
        return {}

    async def _session(self, name: str, owner: str) -> None:
        row = await self._tables.row("SELECT finished FROM sessions WHERE id = ? AND owner = ?", name, owner)
        if row is None:
            raise HttpError(404, f"session {name}: not found")
        if row["finished"]:
            raise HttpError(410, f"session {name}: it has finished")

    # --- models

    async def create_model(self, request: Request, owner: str) -> Any:
        data = await request.body()
        body = read(bodies.CreateBody, parse(data))
        self._check_base(body.base_model)
        lora = body.lora_config
        model = {"rank": lora.rank, "attn": lora.train_attn, "mlp": lora.train_mlp,
                 "unembed": lora.train_unembed}  # fmt: skip
        return await self._new(body, owner, "create_model", data, model, lora.seed)

    async def load(self, request: Request, owner: str) -> Any:
        data = await request.body()
        given = parse(data)
        if given.get("model_id") is not None:
            return await self._ordered("load_weights", bodies.LoadWeightsBody)(request, owner)
        body = read(bodies.CreateLoadedBody, given)
        if body.base_model is not None:
            self._check_base(body.base_model)
        row = await found(self._tables, body.path, owner, kind=TRAINING)
        model = await self._tables.row("SELECT * FROM models WHERE id = ?", row["model"])
        assert model is not None
        return await self._new(body, owner, "load_weights", data, model, 0)

    async def _new(
        self, body: Any, owner: str, kind: str, data: bytes, like: Any, seed: int | None
    ) -> dict[str, Any]:
        await self._session(body.session_id, owner)
        name, now = f"{body.session_id}:train:{body.model_seq_id}", CLOCK.time()
        drawn = secrets.randbits(63) if seed is None else seed
        values = (name, owner, body.session_id, drawn, *(int(like[key]) for key in SHAPE),
                  _dumped(body.user_metadata), now, now)  # fmt: skip
        query = (f"INSERT INTO models (id, owner, session, seed, {', '.join(SHAPE)}, "
                 "metadata, created, used) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)")  # fmt: skip

        def insert(db: sqlite3.Connection) -> None:
            self._quotas.check_model(db, owner)
            db.execute(query, values)

        return await self._accepted(FutureWork(owner, name, 0, kind, data), insert)

    async def passed(self, request: Request, owner: str) -> Any:
        if request.headers.getlist("content-type") != [messages.TAKES]:
            raise HttpError(415, f"forward_backward: expected {messages.TAKES}")
        data, coding = await request.body(), ", ".join(request.headers.getlist("content-encoding"))

        def message_of() -> Any:
            return messages.parse_pass(messages.opened(data, coding or "identity"))

        if coding:
            async with self._opening:  # a small body may become a large one: one of them at a time
                message = await asyncio.to_thread(message_of)
        else:
            message = await apart(len(data), message_of)
        kind = "forward" if message.forward_only else "forward_backward"
        await self._check_model(message.model_id, owner)
        body = messages.canonical(message)
        return await self._accepted(FutureWork(owner, message.model_id, message.seq_id, kind, body))

    def _ordered(self, kind: str, of: type[Body]) -> Handler:
        """What accepts one kind of request of a model. `of`: its fields."""

        async def accept(request: Request, owner: str) -> Any:
            data = await request.body()
            given = parse(data)
            place = read(bodies.Ordered, {key: given.get(key) for key in ("model_id", "seq_id")})
            await self._check_model(place.model_id, owner)
            asked = FutureWork(owner, place.model_id, place.seq_id, kind, data)
            try:
                read(of, given)
            except HttpError as error:
                asked = FutureWork(owner, place.model_id, place.seq_id, "refused", str(error).encode())
            return await self._accepted(asked)

        return accept

    async def _accepted(self, asked: FutureWork, also: Any = lambda db: None) -> dict[str, Any]:
        def begin(db: sqlite3.Connection) -> None:
            also(db)
            query = "SELECT finished FROM sessions WHERE id = ?"
            if db.execute(query, (asked.line.partition(":")[0],)).fetchone()["finished"]:
                raise HttpError(410, f"session of {asked.line}: it has finished")

        name = await self._futures.accept(asked, begin)
        self._training.wake()
        return {"request_id": name}

    async def _check_model(self, name: str, owner: str) -> None:
        if await self._tables.row("SELECT 1 FROM models WHERE id = ? AND owner = ?", name, owner) is None:
            raise HttpError(404, f"model {name[:200]}: not found")

    def _check_base(self, name: str) -> None:
        if name not in (self._model.name, self._model.tokenizer):
            raise HttpError(400, f"base_model: got {name[:200]!r}, this server has {self._model.name!r}")

    # --- sampling

    async def create_sampler(self, request: Request, owner: str) -> Any:
        body = await posted(request, bodies.SamplingSessionBody)
        await self._session(body.session_id, owner)
        if body.base_model is not None:
            self._check_base(body.base_model)
        if body.base_model is None and body.model_path is None:
            raise HttpError(400, "create_sampling_session: expected model_path or base_model")
        folder = None
        if body.model_path is not None:
            folder = (await found(self._tables, body.model_path, owner))["folder"]
        name = f"{body.session_id}:sample:{body.sampling_session_seq_id}"
        values = (name, owner, body.session_id, folder, body.model_path, CLOCK.time())

        def insert(db: sqlite3.Connection) -> None:
            row: Row | None = db.execute("SELECT path FROM samplers WHERE id = ?", (name,)).fetchone()
            if row is None:
                db.execute("INSERT INTO samplers (id, owner, session, folder, path, created) "
                           "VALUES (?, ?, ?, ?, ?, ?)", values)  # fmt: skip
            elif row["path"] != body.model_path:
                raise HttpError(400, f"sampling session {name}: there is one, of another path")

        await self._tables.do(insert)
        return {"sampling_session_id": name}

    async def sample(self, request: Request, owner: str) -> Any:
        data = await request.body()
        body = await apart(len(data), lambda: read(bodies.SampleBody, parse(data)))
        session = body.sampling_session_id
        if (
            await self._tables.row("SELECT 1 FROM samplers WHERE id = ? AND owner = ?", session, owner)
            is None
        ):
            raise HttpError(404, f"sampling session {session}: not found")
        name = await self._futures.accept(FutureWork(owner, session, body.seq_id, "sample", data))
        self._sampling.begin(name)  # if it came before, its answer may have been lost before it was begun
        return {
            "request_id": name,
            "sample_sequence_ids": [f"{name}-{number}" for number in range(body.num_samples)],
        }

    # --- results

    async def cancel(self, request: Request, owner: str) -> Any:
        body = await posted(request, bodies.FutureBody)
        await self._futures.answer(body.request_id, owner, 0)  # it exists
        await self._sampling.cancel(body.request_id)
        return {}

    async def retrieve(self, request: Request, owner: str) -> Any:
        body = await posted(request, bodies.FutureBody)
        row = await self._futures.answer(body.request_id, owner)
        if row is None:
            reason = await self._gap(body.request_id)
            state = "active" if reason is None else "paused_capacity"
            return {"type": "try_again", "request_id": body.request_id, "queue_state": state,
                    "queue_state_reason": reason}  # fmt: skip
        kind = messages.TAKES if row["form"] == "proto" else "application/json"
        return Response(row["result"], media_type=kind)

    async def _gap(self, name: str) -> str | None:
        """What a request of a model waits for, if it is one that has not come."""
        row = await self._tables.row(
            "SELECT m.done + 1 AS next FROM requests r JOIN models m ON m.id = r.line WHERE r.id = ? "
            "AND NOT EXISTS (SELECT 1 FROM requests n WHERE n.line = r.line AND n.seq = m.done + 1)",
            name,
        )
        return None if row is None else f"request {row['next']} of this model has not come"


SHAPE = ("rank", "attn", "mlp", "unembed")


async def posted(request: Request, kind: type[B]) -> B:
    """The fields of a JSON body."""
    return read(kind, parse(await request.body() or b"{}"))


def _dumped(value: Any) -> str | None:
    return None if value is None else json.dumps(value)


def routed(handlers: Mapping[tuple[str, str], Handler]) -> list[Route]:
    """The routes of handlers, and those that are refused with words."""

    def refusing(words: str) -> Handler:
        async def refuse(request: Request, owner: str) -> Any:
            raise HttpError(400, words)

        return refuse

    def served(handler: Handler) -> Any:
        async def answer(request: Request) -> Response:
            content = await handler(request, owner(request.scope))
            if isinstance(content, Response):
                return content
            return Response(json.dumps(content), media_type="application/json")

        return answer

    every = {**{place: refusing(words) for place, words in REFUSED.items()}, **handlers}
    return [Route(f"{PREFIX}{path}", served(handler), methods=[method])
            for (method, path), handler in every.items()]  # fmt: skip
