"""Tools of MCP servers, over stdin and stdout of a program or over HTTP, by the official SDK.

    open ──> connect ──> list the tools ──> compare with the pin ──> offer them

**Pins.** A server can change the definition of a tool after somebody has read it, and every prompt holds the
definition. So the definitions are hashed. The first use writes the hash to a lock file, unless the setting
`pin` gives one; a definition that differs later is an error that names the tool. The hash covers what a
model reads, and not what the server does.

**Connections.** A server may remember its client (files, a browser, a counter), and episodes must not meet.
So each episode has a connection of its own, and a server over stdio is started for each. `connection =
"shared"` is for servers that remember nothing.

**Secrets.** A server over stdio gets PATH and the like, an empty home folder that is removed afterwards, and
the variables that `variables` names. It is not sandboxed: it is a program that the user chose.

    server says                              what becomes of it
    isError, or invalid parameters           ToolError: the model reads it
    late                                     as for every tool: the model reads that
    another error, no connection             McpFault: the episode has no result
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from silva.config.sections import Above0, Positive
from silva.errors import ConfigError
from silva.tools.settings import ToolSettings
from silva.wire.requests import key_of
from silva.wire.transport import web_address

if TYPE_CHECKING:
    from silva.protocols import Tool
    from silva.tools.mcp_connection import Connection


class McpSettings(ToolSettings):
    """An MCP server. Set `command` or `url`."""

    type: Literal["mcp"] = "mcp"
    command: tuple[str, ...] = ()
    """Program and arguments of a server over stdin and stdout, such as ["python", "server.py"]."""
    url: str = ""
    """Address of a server over HTTP (streamable), such as "http://127.0.0.1:8000/mcp"."""
    variables: tuple[str, ...] = ()
    """Environment variables that a server over stdio gets besides PATH, SHELL, TERM, USER and LOGNAME."""
    key_variable: str = ""
    """Environment variable with the key that a server over HTTP gets as `Authorization: Bearer`."""
    tools: tuple[str, ...] = ()
    """Names of the tools on offer; empty: all."""
    prefix: str = ""
    """Stands before the names of the tools, so that those of two servers differ."""
    pin: Annotated[str, Field(pattern=r"^(sha256:[0-9a-f]{64})?$")] = ""
    """Hash that the definitions must have; "" compares with `lock`."""
    lock: str = "mcp.lock.json"
    """File with the hashes of the first use."""
    connection: Literal["episode", "shared"] = "episode"
    """`episode`: one for each, so that episodes do not meet. `shared`: one for all."""
    timeout: Above0 = 30.0
    """Seconds one call may take."""
    start_timeout: Above0 = 30.0
    """Seconds until the server must have listed its tools."""
    max_chars: Positive = 6000
    """Characters of a result that are shown."""

    @model_validator(mode="after")
    def _has_one_address(self) -> Self:
        if bool(self.command) == bool(self.url):
            raise ValueError("expected one of command and url")
        if self.url:
            web_address(self.url)
        if self.command and self.key_variable:
            raise ValueError("key_variable is for servers over HTTP; name it in `variables`")
        if self.url and self.variables:
            raise ValueError("variables are for servers over stdio; key_variable names a key")
        return self

    def build(self) -> McpTools:
        return McpTools(self)


class McpTools:
    """A `silva.protocols.Toolset`.

    Raises:
        ConfigError: the package mcp or a variable is missing.
    """

    def __init__(self, settings: McpSettings) -> None:
        from silva.tools.mcp_connection import sdk

        sdk()
        key_of(settings.key_variable, "mcp.key_variable")  # missing: an error at the start
        if missing := [name for name in settings.variables if name not in os.environ]:
            raise ConfigError(f"mcp: {', '.join(missing)} not set; set it in the environment or in .env")
        self.settings = settings
        self._loop: asyncio.AbstractEventLoop | None = None

    async def open(self, seed: int) -> McpSession:
        """
        Raises:
            McpFault: the server cannot be reached.
            ConfigError: its definitions are not the pinned ones.
        """
        if self.settings.connection == "episode":
            connection = await self._connected()
            return McpSession(connection, connection.close)
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._lock = loop, asyncio.Lock()
            self._shared: Connection | None = None
            self._users = 0
        async with self._lock:
            if self._shared is None or self._shared.broken:
                self._shared, self._users = await self._connected(), 0
            self._users += 1
            return SharedSession(self, self._shared)

    async def _connected(self) -> Connection:
        from silva.tools.mcp_connection import Connection
        from silva.tools.mcp_pins import check

        connection = Connection(self.settings)
        await connection.open()
        try:
            await asyncio.to_thread(check, self.settings, connection.definitions)
        except BaseException:
            await connection.close()
            raise
        return connection

    async def release(self, connection: Connection) -> None:
        """The last episode closes the shared connection; one that broke is closed by the first that ends."""
        async with self._lock:
            if connection is self._shared:
                self._users -= 1
                if self._users:
                    return
                self._shared = None
        await connection.close()


class McpSession:
    """A `silva.protocols.ToolSession`."""

    def __init__(self, connection: Connection, release: Callable[[], Awaitable[None]]) -> None:
        self.tools: Sequence[Tool] = connection.tools
        self._release: Callable[[], Awaitable[None]] | None = release

    def metrics(self) -> Mapping[str, float]:
        return {}

    async def close(self) -> None:
        release, self._release = self._release, None
        if release is not None:
            await release()


class SharedSession(McpSession):
    """One of many on a connection that remembers nothing, so that it can be forked."""

    def __init__(self, toolset: McpTools, connection: Connection) -> None:
        super().__init__(connection, lambda: toolset.release(connection))
        self._toolset = toolset

    async def fork(self, seed: int) -> McpSession:
        return await self._toolset.open(seed)
