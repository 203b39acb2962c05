"""A Tinker service over doubles: in a thread with its own event loop, for the SDK, or in the test's."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from postgres_server import PostgresServer
from tests.server.running import asking
from tests.server.tinker.doubles import ScriptedRuns, ScriptedSampler

from silva.server.tinker.keys import ApiKeys
from silva.server.tinker.messages import MAX_BODY, TAKES
from silva.server.tinker.quotas import Quotas
from silva.server.tinker.routes import ServedModel
from silva.server.tinker.server import TinkerServer
from silva.wire.guard import Guard
from silva.wire.listening import Bind, serve

KEY = "tml-mine"


class Service:
    """One folder of state, and the doubles of the server that has it now."""

    def __init__(self, state: Path, database: str = "") -> None:
        self.database = database
        self.state, self.runs, self.sampler = state, ScriptedRuns(), ScriptedSampler()
        self.lines: list[str] = []
        self.quotas = Quotas()
        self.address, self.full = "", 1

    @asynccontextmanager
    async def working(self) -> AsyncIterator[Guard]:
        """A new server over the folder, with nothing in memory, as it is served."""
        self.runs, self.sampler = ScriptedRuns(), ScriptedSampler()
        log, model = self.lines.append, ServedModel("base", "base", "scripted", self.sampler.context)
        with ThreadPoolExecutor(1) as compute:
            server = TinkerServer(
                self.state, model, self.runs, compute, self.sampler, 4, self.full, log, self.quotas,
                self.database,
            )  # fmt: skip
            async with server.working():
                self._loop, self._tables = asyncio.get_running_loop(), server._tables
                admits = server.admitting(ApiKeys([]))
                yield Guard(server.app, Bind(), key="", log=log, max_body=MAX_BODY,
                            takes=("application/json", TAKES), admits=admits)  # fmt: skip
            self.runs.hold.set()

    def change(self, query: str) -> int:
        """Rows that it changes in the database of a server in another thread."""
        return asyncio.run_coroutine_threadsafe(self._tables.change(query), self._loop).result(20)

    @asynccontextmanager
    async def asked(self, key: str = KEY) -> AsyncIterator[httpx2.AsyncClient]:
        """The same without a connection."""
        async with self.working() as app, asking(app, **{"x-api-key": key}) as client:
            client.base_url = "http://localhost/api/v1"
            yield client

    @contextmanager
    def running(self, bind: Bind = Bind()) -> Iterator[Service]:
        """The same in a thread, listening."""
        ready: Future[str] = Future()
        stop: list[Callable[[], Any]] = []

        async def main() -> None:
            async with self.working() as app:
                serving = asyncio.ensure_future(serve(app, bind, ready=ready.set_result))
                loop = asyncio.get_running_loop()
                stop.append(lambda: loop.call_soon_threadsafe(serving.cancel))
                await asyncio.wait([serving])

        thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
        thread.start()
        self.address = ready.result(20)
        try:
            yield self
        finally:
            self.runs.hold.set()
            stop[0]()
            thread.join(20)


@pytest.fixture
def service(tmp_path: Path) -> Service:
    return Service(tmp_path)


@pytest.fixture(scope="module")
def listening(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service that the SDK finds by the environment."""
    environment = {"TINKER_TELEMETRY": "0", "TINKER_API_KEY": KEY}
    with pytest.MonkeyPatch.context() as patch, Service(tmp_path_factory.mktemp("tinker")).running() as found:
        for name, value in {**environment, "TINKER_BASE_URL": found.address}.items():
            patch.setenv(name, value)
        yield found


@pytest.fixture(scope="module")
def client(listening: Service) -> Iterator[Any]:
    """Of the SDK."""
    tinker = pytest.importorskip("tinker", reason="needs tinker: pip install tinker")
    with tinker.ServiceClient(user_metadata={"who": "me"}, display_name="mine") as found:
        assert found.holder  # it begins here, and ends with the file
        yield found


class Served:
    """A server with a tiny model, in a process of its own."""

    def __init__(self, state: Path) -> None:
        self._state, self.address = state, ""
        self.begin()

    def begin(self) -> None:
        """At the address that it had, if it had one."""
        command = [sys.executable, "-m", "silva", "serve", "tinker", "--model.type", "tiny"]
        port = self.address.rpartition(":")[2] or "0"
        command += ["--model.context", "8192", "--port", port, "--state", str(self._state)]
        variables = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._server = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, cwd=self._state, env=variables
        )
        assert self._server.stderr is not None
        said = next(line for line in self._server.stderr if "listening at" in line)
        self.address = said.split()[-1]

    def kill(self) -> None:
        self._server.kill()
        self._server.wait()


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    found = Served(tmp_path_factory.mktemp("service"))
    yield found
    found.kill()


@pytest.fixture
def address(served: Served, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of a server in a process of its own, whose key the SDK finds."""
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    return served.address


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    pytest.importorskip("psycopg", reason="needs psycopg: pip install 'psycopg[binary]'")
    try:
        server = PostgresServer(tmp_path_factory.mktemp("postgres") / "log")
    except FileNotFoundError as error:
        pytest.skip(str(error))
    with server:
        yield server


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.slow)])
def of_each_database(request: pytest.FixtureRequest, tmp_path: Path) -> Service:
    if request.param == "sqlite":
        return Service(tmp_path)
    return Service(tmp_path, request.getfixturevalue("postgres").database())


@pytest.fixture(autouse=True)
def clients_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Clients of the SDK end with the test that made them. Otherwise each sends heartbeats for ever, a thread
    that waits for a result of a server that is gone waits for ever, too, and one without a session is used
    again for another server, if the environment named both."""
    made: list[Any] = []
    if "tinker" in sys.modules:
        from tinker.lib.internal_client_holder import InternalClientHolder, sessionless_holder_cache

        begin = InternalClientHolder.__init__

        def recorded(self: Any, *args: Any, **options: Any) -> None:
            begin(self, *args, **options)
            made.append(self)

        monkeypatch.setattr(InternalClientHolder, "__init__", recorded)
        monkeypatch.setattr(sessionless_holder_cache, "_holders", {})
    yield
    for each in made:
        if each._session_id is not None:  # one without it may be the module's
            each.close()
