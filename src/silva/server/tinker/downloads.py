"""Files of checkpoints, for programs that have an address and no key: the SDK downloads so.

    GET .../checkpoints/external_weights/NAME/external_weights_urls   with a key ──> {file: address}
    GET /api/v1/files/TOKEN                                           without one

A token says which file and until when, and is signed with a secret of this process, so nobody else can make
one. What is read is a file that was in the folder of a checkpoint, while it has that folder: no name leads
elsewhere.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse
from starlette.types import Scope

from silva.ports import CLOCK
from silva.server.tinker.checkpoints import EXTERNAL, LIVE, found, uri, when
from silva.server.tinker.routes import PREFIX, Handler
from silva.server.tinker.tables import Tables
from silva.trainer.tenants.folder import RUN
from silva.wire.guard import HttpError

FILES = f"{PREFIX}/files/"
SECONDS = 3600  # that an address holds


class SignedAddresses:
    """Tokens that say something and cannot be made by anybody else."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def signed(self, said: Mapping[str, Any]) -> str:
        text = base64.urlsafe_b64encode(json.dumps(said).encode()).decode().rstrip("=")
        return f"{text}.{self._signature(text)}"

    def read(self, token: str) -> dict[str, Any]:
        """What a token says.

        Raises:
            HttpError: it is none, or too old.
        """
        text, _, signature = token.partition(".")
        if not hmac.compare_digest(signature.encode(), self._signature(text).encode()):
            raise HttpError(403, "the address of this file is none that the server gave")
        said: dict[str, Any] = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
        if said["expires"] <= CLOCK.time():
            raise HttpError(403, f"the address of this file was good for {SECONDS} s; ask for another one")
        return said

    def _signature(self, text: str) -> str:
        return hmac.new(self._secret, text.encode(), hashlib.sha256).hexdigest()


class TinkerDownloads:
    """The two routes.

    Args:
        folder: of folders of weights.
    """

    def __init__(self, tables: Tables, folder: Path) -> None:
        self._tables, self._folder, self._addresses = tables, folder, SignedAddresses()

    def routes(self) -> Mapping[tuple[str, str], Handler]:
        urls = f"/training_runs/{{id}}/checkpoints/{EXTERNAL}/{{name}}/external_weights_urls"
        return {("GET", urls): self.urls, ("GET", "/files/{token}"): self.file}

    def admitting(self, keys: Callable[[Scope], None]) -> Callable[[Scope], None]:
        """A check that lets through what `keys` does, and requests for files with a signed address."""

        def check(scope: Scope) -> None:
            if scope["method"] == "GET" and scope["path"].startswith(FILES):
                self._addresses.read(scope["path"].removeprefix(FILES))
            else:
                keys(scope)

        return check

    async def urls(self, request: Request, owner: str) -> Any:
        model, name = request.path_params["id"], request.path_params["name"]
        row = await found(self._tables, uri(model, f"{EXTERNAL}/{name}"), owner)
        expires = CLOCK.time() + SECONDS
        said = {"folder": row["folder"], "own": row["owner"] == owner, "expires": expires}
        address = f"{str(request.base_url).rstrip('/')}{FILES}"
        return {
            "urls": {
                file.name: address + self._addresses.signed({**said, "file": file.name})
                for file in sorted((self._folder / row["folder"]).iterdir())
                if file.name != RUN
            },
            "expires": when(expires),
        }

    async def file(self, request: Request, owner: str) -> Any:
        """`owner` is nobody: the address says whether its owner or another key has asked for it."""
        said = self._addresses.read(request.path_params["token"])
        query = f"SELECT 1 FROM checkpoints WHERE folder = ? AND (public = 1 OR ? = 1) AND {LIVE}"
        row = await self._tables.row(query, said["folder"], int(said["own"]), CLOCK.time())
        path = self._folder / said["folder"] / said["file"]
        if row is None or not path.is_file():
            raise HttpError(
                404, f"{said['file']}: its checkpoint is not there any more, or is another one now"
            )
        return FileResponse(path, media_type="application/octet-stream")
