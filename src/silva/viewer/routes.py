"""The viewer as an ASGI app: its pages as JSON under /api/, its front end from the package; GET and nothing
else.

Answers have an ETag, so that a page that asks again while a run goes on gets 304 if nothing is new. The
content security policy lets a page load from this server only, and no inline script. It goes behind the
Guard, which knows hosts, origins and keys.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from importlib import resources
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from silva.storage.summary import finite
from silva.viewer.pages import Pages
from silva.wire.guard import Application, HttpError

POLICY = "; ".join(
    ["default-src 'self'", "img-src 'self' data:", "object-src 'none'", "base-uri 'none'",
     "frame-ancestors 'none'", "form-action 'none'"]
)  # fmt: skip
SAFE = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".txt": "text/plain"}
SHARED = ("look.css", "figures.js")
AT_ONCE = 8  # answers that are made at once; others wait


def static_files() -> dict[str, bytes]:
    """The front end, by path; what the report has too (report.py) is read where that is."""
    folder, shared = (
        resources.files("silva.viewer") / "static",
        resources.files("silva.monitoring") / "template",
    )
    found = {name: (shared / name).read_bytes() for name in SHARED}
    for entry in [*folder.iterdir(), *(folder / "vendor").iterdir()]:
        if entry.is_file():
            parent = "vendor/" if (folder / "vendor" / entry.name).is_file() else ""
            found[parent + entry.name] = entry.read_bytes()
    return found


def app_of(pages: Pages) -> Application:
    """Routes of the viewer, to be put behind a Guard."""
    files, places = static_files(), asyncio.Semaphore(AT_ONCE)

    async def page(request: Request) -> Response:
        given = {name: request.query_params.getlist(name) for name in request.query_params}
        async with places:
            found = await asyncio.to_thread(pages.answer, request.path_params["name"], given)
            body = await asyncio.to_thread(encoded, found)
        return _answer(request, body, "application/json")

    async def front(request: Request) -> Response:
        name = request.path_params.get("name") or "index.html"
        if name not in files:
            raise HttpError(404, f"no file {name!r} in the viewer")
        kind = TYPES.get("." + name.rpartition(".")[2], "application/octet-stream")
        return _answer(request, files[name], f"{kind}; charset=utf-8")

    return Application(
        [
            Route("/api/{name}", page, methods=["GET"]),
            Route("/", front, methods=["GET"]),
            Route("/{name:path}", front, methods=["GET"]),
        ]
    )


def encoded(found: Any) -> bytes:
    """JSON without NaN, and with half surrogate pairs as question marks."""
    text = json.dumps(finite(found), allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    return text.encode("utf-8", "replace")


def _answer(request: Request, body: bytes, kind: str) -> Response:
    tag = f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
    headers = {**SAFE, "etag": tag, "content-type": kind}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(body, headers=headers)
