"""Serves an ASGI app at an address: on loopback, on a host that has a key, or on a Unix socket.

    listen ──> ready(address) ──> requests ... ──cancelled──> GRACE seconds for open ones, which are cut then

A connection that does not finish the head of a request in time is closed, and so is one that stays idle, or
that takes nothing of its answer. What is above the number of connections is closed as soon as it comes, so
those before it are served whatever others do. Signals belong to the caller. Not here: keys, bodies and errors
of requests (guard.py), and what is served.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import socket
import ssl
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from silva.errors import ConfigError
from silva.wire.transport import open_files

HEAD_SECONDS = 10.0  # for the head of a request, from its first byte or from the connection on
IDLE_SECONDS = 60  # a connection may wait for its next request
HEAD_BYTES = 16384
UNREAD_SECONDS = 60.0  # a client may take nothing of its answer
CONNECTIONS = 4096  # fewer if the process may open fewer files
BACKLOG = 2048  # connections that the system keeps until they are accepted
ACCEPTED = 16  # connections at once; those above the limit are open until they are accepted
GRACE = 1  # seconds that open requests get at the end


@dataclass(frozen=True, slots=True)
class Bind:
    """Where to listen: at host and port (0: any free one) or, if `unix` is set, at that path.

    Attributes:
        certificate: a file in PEM with the server's certificate and those above it; "" for no TLS.
        private_key: a file in PEM with the key of the certificate, without a password.
    """

    host: str = "127.0.0.1"
    port: int = 0
    unix: str = ""
    certificate: str = ""
    private_key: str = ""

    @property
    def address(self) -> str:
        """As clients write it."""
        if self.unix:
            return f"unix:{self.unix}"
        scheme = "https" if self.certificate else "http"
        return f"{scheme}://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @property
    def local(self) -> bool:
        """Whether only this machine can connect."""
        if self.unix or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def check_bind(bind: Bind, key: str, variable: str = "SILVA_API_KEY") -> None:
    """Refuse an address that others can reach without a key, and a certificate that cannot be used.

    Args:
        variable: of the environment, in which the key is expected.

    Raises:
        ConfigError: there is no key for it, the key cannot be sent in a header, or as `tls_context`.
    """
    if not 0 <= bind.port <= 65535:
        raise ConfigError(f"port: got {bind.port}, expected 0 (any free one) to 65535")
    if not bind.unix and not bind.host:
        raise ConfigError("host: got an empty one, expected a name or an address such as 127.0.0.1")
    if key and not all("!" <= character <= "~" for character in key):
        raise ConfigError("the API key: got spaces, control or non-ASCII characters, expected plain ones")
    if not key and not bind.local:
        raise ConfigError(
            f"{bind.address}: other machines could use this server without a key. Set the environment "
            f"variable {variable}, or listen on 127.0.0.1 or a Unix socket"
        )
    tls_context(bind)


def tls_context(bind: Bind) -> ssl.SSLContext | None:
    """What encrypts connections; None without a certificate.

    Raises:
        ConfigError: one of the two files is missing, cannot be read, is no PEM, or is not the other's.
    """
    files = {"certificate": bind.certificate, "private key": bind.private_key}
    if not any(files.values()):
        return None
    if bind.unix:
        raise ConfigError(f"{bind.address}: got a certificate, expected none: a Unix socket has no TLS")
    for what, path in files.items():
        if not path:
            raise ConfigError(f"TLS: got no {what}, expected the files of a certificate and of its key")
        try:
            with open(path, "rb"):
                pass
        except OSError as error:
            raise ConfigError(f"the {what} {path}: {error.strerror}; expected a file in PEM") from error
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:  # a key with a password would ask for it at the terminal
        context.load_cert_chain(bind.certificate, bind.private_key, password=lambda: "")
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise ConfigError(
            f"the certificate {bind.certificate} and the private key {bind.private_key}: {reason}; expected "
            "two files in PEM that belong together, the key without a password"
        ) from error
    return context


def check_free(bind: Bind) -> None:
    """Refuse an address that is in use, before a model is loaded.

    Raises:
        ConfigError: the address cannot be used.
    """
    with _listening(bind):
        pass


async def serve(app: Any, bind: Bind, *, ready: Callable[[str], None]) -> None:
    """Serve `app` until cancelled.

    Args:
        app: of ASGI.
        ready: called with the address (the real port) once it listens.

    Raises:
        ConfigError: the address or the certificate cannot be used.
    """
    encrypted = tls_context(bind)
    with _listening(bind) as (listener, address):
        config = uvicorn.Config(
            app,
            http=_Connection,
            loop="none",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level=logging.CRITICAL + 1,
            access_log=False,
            proxy_headers=False,  # nobody may claim to be another client
            server_header=False,
            backlog=ACCEPTED,
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=GRACE,
            h11_max_incomplete_event_size=HEAD_BYTES,
        )
        config.load()
        config.ssl = encrypted
        server = _Server(config, lambda: ready(address))
        running = asyncio.ensure_future(server.serve(sockets=[listener]))
        try:
            await asyncio.shield(running)
        finally:
            server.should_exit = True
            await asyncio.gather(running, return_exceptions=True)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """A cut connection tells a client that nobody knows how far its request came. Those that uvicorn
        cancels would be answered with 500, as if the request were at fault."""
        asyncio.get_running_loop().call_later(GRACE, self._cut)  # uvicorn waits a little longer
        await super().shutdown(sockets)

    def _cut(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)
        self._ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # they are the caller's


class _Connection(H11Protocol):
    """Closes itself if there are too many, if a request begins and its head does not end, and if its client
    takes nothing of an answer: uvicorn would wait for ever."""

    _timer: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    _refused = False

    def connection_made(self, transport: Any) -> None:
        if len(self.connections) >= _most_connections():
            self._refused = True
            transport.abort()
            return
        super().connection_made(transport)
        self._timer = self.loop.call_later(HEAD_SECONDS, transport.close)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._refused:
            return
        self._stop_timer()
        self._stop_unread()
        super().connection_lost(exc)

    def eof_received(self) -> None:
        if not self._refused:
            super().eof_received()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stop_unread()
        self._unread = self.loop.call_later(UNREAD_SECONDS, self._check_unread, self._waiting)

    def resume_writing(self) -> None:
        self._stop_unread()
        super().resume_writing()

    @property
    def _waiting(self) -> int:
        return self.transport.get_write_buffer_size()

    def _check_unread(self, before: int) -> None:
        if (left := self._waiting) >= before:
            self.transport.abort()
        else:
            self._unread = self.loop.call_later(UNREAD_SECONDS, self._check_unread, left)

    def _stop_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _most_connections() -> int:
    return max(16, min(CONNECTIONS, open_files() * 3 // 4))


@contextlib.contextmanager
def _listening(bind: Bind) -> Iterator[tuple[socket.socket, str]]:
    """A socket that is bound, and its address."""
    with contextlib.ExitStack() as stack:
        try:
            listener = stack.enter_context(_unix_socket(Path(bind.unix)) if bind.unix else _tcp_socket(bind))
        except OSError as error:
            raise ConfigError(f"cannot listen at {bind.address}: {error.strerror or error}") from error
        port = 0 if bind.unix else listener.getsockname()[1]
        yield listener, replace(bind, port=port).address


@contextlib.contextmanager
def _tcp_socket(bind: Bind) -> Iterator[socket.socket]:
    family, kind, protocol, _, address = socket.getaddrinfo(
        bind.host, bind.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        yield listener


@contextlib.contextmanager
def _unix_socket(path: Path) -> Iterator[socket.socket]:
    """Only its owner can connect. The file is removed at the end."""
    _remove_stale(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        mine = os.stat(path).st_ino
        try:
            os.chmod(path, 0o600)  # nobody can connect before it listens
            yield listener
        finally:
            with contextlib.suppress(OSError):
                if os.stat(path).st_ino == mine:
                    path.unlink()


def _remove_stale(path: Path) -> None:
    """Remove the socket of a server that is gone."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"cannot listen at unix:{path}: the path holds something else, expected a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
    raise ConfigError(f"cannot listen at unix:{path}: another server listens there")
