"""Routes of the Tinker service that show and change what is there: runs, checkpoints, sessions, samplers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request

from silva.ports import CLOCK
from silva.server.parsing import parse
from silva.server.tinker import bodies, checkpoints
from silva.server.tinker.checkpoints import LIVE, SAMPLER, TRAINING, found, listed, when
from silva.server.tinker.routes import Handler, ServedModel, posted
from silva.server.tinker.tables import Row, Tables
from silva.wire.guard import HttpError

PAGE = 1000


class TinkerListings:
    """Of one key, whatever it asks for. `access_scope` makes no difference: nothing is shared."""

    def __init__(self, tables: Tables, model: ServedModel) -> None:
        self._tables, self._model = tables, model

    def routes(self) -> Mapping[tuple[str, str], Handler]:
        checkpoint = "/training_runs/{id}/checkpoints/{name:path}"
        return {
            ("POST", "/client/config"): self.config,
            ("POST", "/client/dynamic_config"): self.dynamic_config,
            ("POST", "/telemetry"): self.telemetry,
            ("GET", "/healthz"): self.health,
            ("GET", "/get_server_capabilities"): self.capabilities,
            ("POST", "/get_info"): self.info,
            ("POST", "/weights_info"): self.weights,
            ("GET", "/training_runs"): self.runs,
            ("GET", "/training_runs/{id}/checkpoints"): self.checkpoints_of,
            ("POST", f"{checkpoint}/publish"): self.publish,
            ("DELETE", f"{checkpoint}/publish"): self.unpublish,
            ("PUT", f"{checkpoint}/ttl"): self.ttl,
            ("DELETE", checkpoint): self.delete,
            ("GET", "/training_runs/{id}"): self.run,
            ("GET", "/checkpoints"): self.checkpoints,
            ("GET", "/sessions"): self.sessions,
            ("GET", "/sessions/{id}"): self.session,
            ("POST", "/sessions/search"): self.search,
            ("GET", "/samplers/{id}"): self.sampler,
        }

    # --- the server

    async def config(self, request: Request, owner: str) -> Any:
        parse(await request.body())
        return {"parallel_fwdbwd_chunks": True, "proto_compress_fwdbwd": True, "pjwt_auth_enabled": False,
                "custom_loss_server_side": False, "sample_use_retrieve_futures": False}  # fmt: skip

    async def dynamic_config(self, request: Request, owner: str) -> Any:
        parse(await request.body())
        return {"sample_cancel_enabled": True}

    async def telemetry(self, request: Request, owner: str) -> Any:
        """It is read by nobody."""
        parse(await request.body())
        return {"status": "accepted"}

    async def health(self, request: Request, owner: str) -> Any:
        await self._tables.row("SELECT 1")
        return {"status": "ok"}

    async def capabilities(self, request: Request, owner: str) -> Any:
        model = {"model_name": self._model.name, "max_context_length": self._model.context,
                 "trainable": True, "sampleable": True}  # fmt: skip
        return {"supported_models": [model]}

    # --- models

    async def info(self, request: Request, owner: str) -> Any:
        body = await posted(request, bodies.InfoBody)
        model, base = await self._owned("models", body.model_id, owner), self._model
        data = {"arch": base.architecture, "model_name": base.name, "tokenizer_id": base.tokenizer}
        return {"type": "get_info", "model_id": model["id"], "model_data": data, **_lora(model),
                "model_name": base.name}  # fmt: skip

    async def weights(self, request: Request, owner: str) -> Any:
        body = await posted(request, bodies.WeightsBody)
        row = await found(self._tables, body.tinker_path, owner)
        model = await self._tables.row("SELECT * FROM models WHERE id = ?", row["model"])
        assert model is not None
        return {"base_model": self._model.name, **_lora(model),
                "train_attn": bool(model["attn"]), "train_mlp": bool(model["mlp"]),
                "train_unembed": bool(model["unembed"])}  # fmt: skip

    async def runs(self, request: Request, owner: str) -> Any:
        rows, cursor = await self._page(request, "models", "used DESC, id", owner)
        return {"training_runs": [await self._run(row) for row in rows], "cursor": cursor}

    async def run(self, request: Request, owner: str) -> Any:
        return await self._run(await self._owned("models", request.path_params["id"], owner))

    async def _run(self, model: Row) -> dict[str, Any]:
        rows = await self._tables.rows(
            f"SELECT * FROM checkpoints WHERE model = ? AND {LIVE} ORDER BY created",
            model["id"],
            CLOCK.time(),
        )
        last = {row["name"].partition("/")[0]: each for row, each in zip(rows, listed(rows), strict=True)}
        return {
            "training_run_id": model["id"],
            "base_model": self._model.name,
            "model_owner": model["owner"],
            **_lora(model),
            "last_request_time": when(model["used"]),
            "last_checkpoint": last.get(TRAINING),
            "last_sampler_checkpoint": last.get(SAMPLER),
            "user_metadata": _texts(model["metadata"]),
        }

    # --- checkpoints

    async def checkpoints_of(self, request: Request, owner: str) -> Any:
        model = await self._owned("models", request.path_params["id"], owner)
        rows = await self._tables.rows(
            f"SELECT * FROM checkpoints WHERE model = ? AND {LIVE} ORDER BY created",
            model["id"],
            CLOCK.time(),
        )
        return {"checkpoints": listed(rows)}

    async def checkpoints(self, request: Request, owner: str) -> Any:
        rows, cursor = await self._page(request, "checkpoints", "created DESC, model, name", owner)
        return {"checkpoints": listed(rows), "cursor": cursor}

    async def publish(self, request: Request, owner: str) -> Any:
        return await self._change(request, owner, "UPDATE checkpoints SET public = 1")

    async def unpublish(self, request: Request, owner: str) -> Any:
        return await self._change(request, owner, "UPDATE checkpoints SET public = 0")

    async def ttl(self, request: Request, owner: str) -> Any:
        seconds = (await posted(request, bodies.TtlBody)).ttl_seconds
        expires = None if seconds is None else CLOCK.time() + seconds
        return await self._change(request, owner, "UPDATE checkpoints SET expires = ?", expires)

    async def delete(self, request: Request, owner: str) -> Any:
        """The folder goes with the next tidying."""
        return await self._change(request, owner, "DELETE FROM checkpoints")

    async def _change(self, request: Request, owner: str, query: str, *values: Any) -> Any:
        model, name = request.path_params["id"], request.path_params["name"]
        place = (*values, model, name, owner, CLOCK.time())
        where = f"WHERE model = ? AND name = ? AND owner = ? AND {LIVE}"
        if not await self._tables.do(lambda db: db.execute(f"{query} {where}", place).rowcount):
            raise HttpError(404, f"checkpoint {checkpoints.uri(model, name)[:300]}: not found")
        return {}

    # --- sessions

    async def sessions(self, request: Request, owner: str) -> Any:
        rows, _ = await self._page(request, "sessions", "created DESC, id", owner)
        return {"sessions": [row["id"] for row in rows]}

    async def session(self, request: Request, owner: str) -> Any:
        row = await self._owned("sessions", request.path_params["id"], owner)
        names = [
            [each["id"] for each in await self._tables.rows(
                f"SELECT id FROM {table} WHERE session = ? ORDER BY created", row["id"])]
            for table in ("models", "samplers")
        ]  # fmt: skip
        return {"training_run_ids": names[0], "sampler_ids": names[1], "display_name": row["name"],
                "user_metadata": _texts(row["metadata"])}  # fmt: skip

    async def search(self, request: Request, owner: str) -> Any:
        """Newest first, a page at a time."""
        asked = await posted(request, bodies.SearchBody)
        found, last = list[Row](), None
        if asked.cursor is not None:
            last = await self._owned("sessions", asked.cursor.last_session_id, owner)
        mine = not asked.owner.owner_urns or owner in asked.owner.owner_urns
        while mine and len(found) <= asked.limit:
            before = (1e12, "") if last is None else (last["created"], last["id"])
            rows = await self._tables.rows(
                "SELECT * FROM sessions WHERE owner = ? AND (created < ? OR (created = ? AND id < ?)) "
                "ORDER BY created DESC, id DESC LIMIT ?", owner, before[0], *before, PAGE,
            )  # fmt: skip
            found += [row for row in rows if _fits(asked, row)]
            if len(rows) < PAGE:
                break
            last = rows[-1]
        shown, more = found[: asked.limit], len(found) > asked.limit
        end = shown[-1] if more else None
        cursor = end and {"last_created_at": when(end["created"]), "last_session_id": end["id"]}
        return {"sessions": [await self._summary(row) for row in shown], "next_cursor": cursor}

    async def _summary(self, session: Row) -> dict[str, Any]:
        query = (
            "SELECT COUNT(*) AS n, COALESCE(SUM(c.size), 0) AS bytes FROM checkpoints c "
            f"JOIN models m ON m.id = c.model WHERE m.session = ? AND {LIVE}"
        )
        (kept,) = await self._tables.rows(query, session["id"], CLOCK.time())
        return {
            "session_id": session["id"],
            "created_at": when(session["created"]),
            "owner": session["owner"],
            "project_id": "",
            "status": _status(session["finished"]),
            "checkpoints_count": kept["n"],
            "checkpoint_storage_bytes": int(kept["bytes"]),
            "display_name": session["name"],
            "user_metadata": _texts(session["metadata"]),
        }

    async def sampler(self, request: Request, owner: str) -> Any:
        row = await self._owned("samplers", request.path_params["id"], owner)
        return {"sampler_id": row["id"], "base_model": self._model.name, "model_path": row["path"]}

    async def _owned(self, table: str, name: str, owner: str) -> Row:
        row = await self._tables.row(f"SELECT * FROM {table} WHERE id = ? AND owner = ?", name, owner)
        if row is None:
            raise HttpError(404, f"{table.removesuffix('s')} {name[:200]}: not found")
        return row

    async def _page(self, request: Request, table: str, order: str, owner: str) -> tuple[list[Row], Any]:
        if request.query_params.get("project_id"):
            raise HttpError(400, "project_id: this server has no projects; leave it out")
        limit, offset = (
            _whole(request, name, usual, most)
            for name, usual, most in (("limit", 20, PAGE), ("offset", 0, 1 << 40))
        )
        where, values = f"FROM {table} WHERE owner = ?", list[Any]([owner])
        if table == "checkpoints":
            where, values = f"{where} AND {LIVE}", [owner, CLOCK.time()]
        (count,) = await self._tables.rows(f"SELECT COUNT(*) AS n {where}", *values)
        rows = await self._tables.rows(
            f"SELECT * {where} ORDER BY {order} LIMIT ? OFFSET ?", *values, limit, offset
        )
        return rows, {"offset": offset, "limit": limit, "total_count": count["n"]}


def _whole(request: Request, name: str, usual: int, most: int) -> int:
    text = request.query_params.get(name, str(usual))
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and int(text) <= most):
        raise HttpError(400, f"{name}: got {text[:50]!r}, expected 0 to {most}")
    return int(text)


def _fits(asked: bodies.SearchBody, session: Row) -> bool:
    metadata = _texts(session["metadata"]) or {}
    statuses = asked.statuses is None or any(each.fits(session["finished"]) for each in asked.statuses)
    return (
        statuses
        and asked.names(session["id"], session["name"] or "")
        and asked.user_metadata.items() <= metadata.items()
    )


def _status(finished: int) -> dict[str, Any] | None:
    """None: it was heard of no more."""
    if finished > 1:
        return {"type": "client_finished", "reason": {"type": bodies.REASONS[finished - 2]}}
    return None if finished else {"type": "active"}


def _lora(model: Row) -> dict[str, Any]:
    return {"is_lora": model["rank"] > 0, "lora_rank": model["rank"] or None}


def _texts(metadata: str | None) -> dict[str, str] | None:
    """As the SDK reads it, whose values are texts."""
    return None if metadata is None else {key: str(value) for key, value in json.loads(metadata).items()}
