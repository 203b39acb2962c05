"""A real PostgreSQL at a Unix socket, of the programs that are installed on this machine."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

USER = "postgres"  # for root, as whom it refuses to run
PLACES = sorted(Path("/usr/lib/postgresql").glob("*/bin"))


class PostgresServer:
    """One server, which can be killed and started again. Each call of `database` makes a new one there.

    Args:
        log: is written.

    Raises:
        FileNotFoundError: it is not installed.
    """

    def __init__(self, log: Path) -> None:
        places = os.pathsep.join([os.environ.get("PATH", ""), *map(str, PLACES)])
        found = [shutil.which(name, path=places) for name in ("initdb", "postgres")]
        if None in found:
            raise FileNotFoundError("needs PostgreSQL: initdb and postgres")
        self._initdb, self._postgres = map(str, found)
        self._as: Any = {"user": USER, "group": USER} if os.geteuid() == 0 else {}
        self._folder, self._log = Path(tempfile.mkdtemp(prefix="silva-pg-")), log
        if self._as:
            shutil.chown(self._folder, USER, USER)
        self._numbers = count()

    def __enter__(self) -> PostgresServer:
        subprocess.run(
            [self._initdb, "-D", self._folder / "data", "-U", "silva", "-A", "trust", "-N"], check=True,
            capture_output=True, **self._as,
        )  # fmt: skip
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        shutil.rmtree(self._folder)

    def start(self) -> None:
        options = {"listen_addresses": "", "unix_socket_directories": self._folder, "max_connections": 20,
                   "shared_buffers": "2MB", "fsync": "off"}  # fmt: skip
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [self._postgres, "-D", self._folder / "data",
                 *(f"--{name}={value}" for name, value in options.items())],
                stdout=log, stderr=log, cwd=self._folder, **self._as,
            )  # fmt: skip
        while True:  # also while it recovers
            try:
                self._do("SELECT 1")
                return
            except self._errors():
                if self.process.poll() is not None:  # the processes of the one before are not gone yet
                    assert "still in use" in self._log.read_text(), self._log.read_text()
                    return self.start()
                time.sleep(0.05)

    def kill(self) -> None:
        """At once, with all its processes, as if the machine had lost its power."""
        pid = self.process.pid
        own = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        self.process.kill()
        for each in own:
            with suppress(ProcessLookupError):  # it has noticed
                os.kill(int(each), signal.SIGKILL)
        self.process.wait()

    def disconnect(self) -> None:
        """End all connections to it, and go on."""
        self._do("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'silva'")

    def database(self) -> str:
        name = f"silva{next(self._numbers)}"
        self._do(f"CREATE DATABASE {name}")
        return self._url(name)

    def _url(self, name: str) -> str:
        return f"postgresql:///{name}?host={self._folder}&user=silva"

    def _do(self, statement: str) -> None:
        import psycopg

        with psycopg.connect(self._url("postgres"), autocommit=True) as db:
            db.execute(statement)

    @staticmethod
    def _errors() -> type[Exception]:
        import psycopg

        return psycopg.OperationalError
