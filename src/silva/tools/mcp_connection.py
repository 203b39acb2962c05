"""One connection to an MCP server: opened, used and closed.

What the SDK opens must be closed by the task that opened it (its cancel scopes belong to that task), but an
episode is opened, stepped and closed by whoever comes. So a task of its own lives as long as the connection:

    open()  ──> task: connect, list, ──> ready ── waits ──> disconnect
    close() ─────────────────────────────────────> ends the wait
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Mapping
from typing import IO, Any

from silva.errors import ConfigError, SilvaError
from silva.scratch import private_folder
from silva.tools.function import ToolError
from silva.tools.mcp import McpSettings
from silva.tools.quote import defuse, one_line
from silva.types import ToolSpec
from silva.wire.requests import key_of

NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
MAX_PAGES = 100  # of a list of tools
BACKSTOP = 5.0  # seconds after `timeout`, for callers that keep no time
CLOSING = 15.0  # seconds; the SDK asks a program to end, then kills it, within 7
SHOWN = 400  # characters of what a server said


class McpFault(SilvaError, ConnectionError):
    """The server failed, not the call."""


class Connection:
    """Attributes: `definitions` and `tools` of the server, once open; `broken`: it is of no more use."""

    def __init__(self, settings: McpSettings) -> None:
        self.settings = settings
        self.definitions: Mapping[str, Any] = {}
        self.tools: list[McpTool] = []
        self.broken = False
        self._task: asyncio.Task[None] | None = None
        self._errors: IO[str] | None = None  # what a server over stdio writes to its standard error

    async def open(self) -> None:
        """
        Raises:
            McpFault: the server does not list its tools in time.
            ConfigError: there is no such program or no such tool.
        """
        self._stop = asyncio.Event()
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._live(ready))
        try:
            done, _ = await asyncio.wait({ready, self._task}, timeout=self.settings.start_timeout,
                                         return_when=asyncio.FIRST_COMPLETED)  # fmt: skip
        except asyncio.CancelledError:
            await self._give_up()
            raise
        if not done:
            said = self._said()
            await self._give_up()
            late = f"no list of tools within start_timeout = {self.settings.start_timeout:g} s"
            raise McpFault(f"{self._name}: {late}{said}")
        if ready not in done:
            self._task.result()  # raises
        ready.result()

    async def close(self) -> None:
        """Ends a server over stdio. It does no harm to close twice."""
        if self._task is not None:
            self._stop.set()
            _, late = await asyncio.wait({self._task}, timeout=CLOSING)
            if late:
                await self._give_up()

    async def call(self, name: str, arguments: Mapping[str, object]) -> Any:
        """The SDK's CallToolResult.

        Raises:
            ToolError: the call was wrong.
            McpFault: the server is.
        """
        import anyio
        import mcp_types

        try:
            late = self.settings.timeout + BACKSTOP
            return await self._client.session.call_tool(name, dict(arguments), read_timeout_seconds=late)
        except sdk().MCPError as error:
            what = one_line(error.message, SHOWN)
            if error.code == mcp_types.INVALID_PARAMS:
                raise ToolError(what) from None
            if error.code == mcp_types.REQUEST_TIMEOUT:
                raise ToolError(f"{name} took longer than {late:g} s") from None
            if error.code == mcp_types.HEADER_MISMATCH:
                raise ConfigError(
                    f"{self._name}: the definition of {name} has changed since it was listed"
                ) from None
            self.broken = error.code == mcp_types.CONNECTION_CLOSED
            raise McpFault(f"{self._name}: {name}: {what} (code {error.code}){self._said()}") from error
        except (anyio.ClosedResourceError, anyio.BrokenResourceError, RuntimeError, ValueError) as error:
            self.broken = not isinstance(error, RuntimeError | ValueError)  # those: a result of a wrong form
            raise McpFault(f"{self._name}: {name}: {type(error).__name__}: {error}") from error

    async def _live(self, ready: asyncio.Future[None]) -> None:
        try:
            async with contextlib.AsyncExitStack() as stack:
                transport = await self._transport(stack)
                client = sdk().Client(transport, cache=None, raise_exceptions=False)
                self._client = await stack.enter_async_context(client)
                await self._list(client)
                ready.set_result(None)
                await self._stop.wait()
        except (Exception, BaseExceptionGroup) as error:  # anyio raises groups
            causes = _leaves(error)
            if ready.done():
                logging.getLogger(__name__).warning("%s: it closed with %r", self._name, causes[0])
                return
            for cause in causes:
                if isinstance(cause, ConfigError):
                    raise cause from None
            what = one_line(f"{type(causes[0]).__name__}: {causes[0]}", SHOWN)
            wrong = isinstance(causes[0], FileNotFoundError | PermissionError)
            raise (ConfigError if wrong else McpFault)(
                f"{self._name}: no connection: {what}{self._said()}"
            ) from error
        finally:
            if self._errors is not None:
                self._errors.close()

    async def _transport(self, stack: contextlib.AsyncExitStack) -> Any:
        settings = self.settings
        if settings.url:
            import httpx2
            from mcp.client.streamable_http import streamable_http_client

            key = key_of(settings.key_variable, "mcp.key_variable")
            client = httpx2.AsyncClient(
                headers={"Authorization": f"Bearer {key}"} if key else {},
                timeout=httpx2.Timeout(30.0, read=settings.timeout + 2 * BACKSTOP),
            )
            await stack.enter_async_context(client)
            return streamable_http_client(settings.url, http_client=client)
        folder = str(stack.enter_context(private_folder("mcp")))
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (read once more when the server is gone)
        environment = {"HOME": folder, "TMPDIR": folder}
        environment |= {name: os.environ[name] for name in settings.variables}
        program, *arguments = settings.command
        parameters = sdk().StdioServerParameters(command=program, args=arguments, env=environment)
        return sdk().stdio_client(parameters, errlog=self._errors)

    async def _list(self, client: Any) -> None:
        listed, cursor = [], None
        for _ in range(MAX_PAGES):
            page = await client.list_tools(cursor=cursor)
            listed += page.tools
            cursor = page.next_cursor
            if not cursor:
                break
        else:
            raise ConfigError(f"{self._name}: its list of tools has more than {MAX_PAGES} pages")
        found = {tool.name: tool for tool in listed}
        wanted = self.settings.tools or tuple(found)
        if missing := [name for name in wanted if name not in found]:
            there = ", ".join(map(repr, found)) or "none"
            raise ConfigError(f"{self._name}: no tool {', '.join(map(repr, missing))}; there are {there}")
        if len(found) < len(listed) or not wanted:
            raise ConfigError(
                f"{self._name}: " + ("two tools have one name" if wanted else "it has no tools")
            )
        if odd := [name for name in wanted if not NAME.fullmatch(name)]:
            raise ConfigError(
                f"{self._name}: tool {odd[0]!r:.80}: expected letters, digits, _, - and . in a name"
            )
        self.definitions = {name: _definition(found[name]) for name in sorted(wanted)}
        self.tools = [McpTool(self, definition) for definition in self.definitions.values()]

    async def _give_up(self) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait({self._task}, timeout=CLOSING)
        if self._task.done():
            self._task.cancelled() or self._task.exception()  # seen

    @property
    def _name(self) -> str:
        return f"mcp server {self.settings.url or ' '.join(self.settings.command)}"

    def _said(self) -> str:
        """The end of what a server over stdio has written to its standard error."""
        if self._errors is None or self._errors.closed:
            return ""
        file = self._errors.fileno()  # `pread`, because the server writes at the place that `read` would move
        data = os.pread(file, SHOWN, max(0, os.fstat(file).st_size - SHOWN))
        text = one_line(data.decode("utf-8", "replace"), SHOWN)
        return f"; it wrote: {text}" if text else ""


class McpTool:
    """A `silva.protocols.Tool`."""

    def __init__(self, connection: Connection, definition: Mapping[str, Any]) -> None:
        settings = connection.settings
        self._connection, self._name = connection, definition["name"]
        self.timeout, self.max_chars = settings.timeout, settings.max_chars
        description = defuse(definition.get("description") or definition.get("title") or self._name)
        self.spec = ToolSpec(
            settings.prefix + self._name, description, _parameters(definition["inputSchema"])
        )

    async def __call__(self, arguments: Mapping[str, object]) -> str:
        result = await self._connection.call(self._name, arguments)
        text = defuse("\n".join(map(_shown, result.content)))
        if not result.content and result.structured_content is not None:
            text = defuse(json.dumps(result.structured_content, ensure_ascii=False))
        if result.is_error:
            raise ToolError(text or f"{self._name} failed")
        return text


def sdk() -> Any:
    try:
        import mcp
    except ImportError as error:
        raise ConfigError("MCP servers need the package mcp: pip install 'silva[mcp]'") from error
    return mcp


def _definition(tool: Any) -> dict[str, Any]:
    """Without icons and metadata, which no model reads."""
    definition: dict[str, Any] = tool.model_dump(
        mode="json", by_alias=True, exclude_none=True, exclude={"icons", "meta", "execution"}
    )
    return definition


def _parameters(schema: Any) -> Any:
    """The schema with descriptions defused. Names and values stay: a call must be able to give them."""
    if isinstance(schema, list):
        return [_parameters(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: defuse(value)
        if key in ("description", "title") and isinstance(value, str)
        else _parameters(value)
        for key, value in schema.items()
    }


def _shown(block: Any) -> str:
    """A block of a result as text; what is no text is named."""
    if block.type == "text":
        return str(block.text)
    if block.type == "resource" and hasattr(block.resource, "text"):
        return str(block.resource.text)
    kind = getattr(block, "mime_type", None) or getattr(getattr(block, "resource", None), "mime_type", None)
    where = f" {block.uri}" if block.type == "resource_link" else ""
    return f"[{block.type}{where}{f', {kind}' if kind else ''}: not shown]"


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]
