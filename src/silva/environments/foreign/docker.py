"""Containers of tasks, by the program `docker`.

A container ends with the process that started it, however that ends: its main program reads a pipe that only
this process holds open. It has a name and an owner before it exists, so that it can be removed whatever is
known of its start; and what is left nevertheless is removed at the next start (`remove_orphans`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import socket
import subprocess
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from silva.environments.foreign.harbor_tasks import HarborTask
from silva.errors import SilvaError

BUILD_SECONDS = 1800.0
LEAVE_SECONDS = 30.0  # that a container may take to end
ASK_SECONDS = 30.0  # that the daemon may take to list containers
MOST_OUTPUT = 1 << 20  # bytes of a command's output that are read
LATE = 124  # exit status of `timeout`
LABEL = "silva.owner"
READY = "silva: ready"
UNTIL_LET_GO = f"echo '{READY}'; exec cat >/dev/null"  # the main program of a container


class DockerFault(SilvaError, OSError):
    """Docker failed: the episode has no result."""


class Ran(NamedTuple):
    status: int
    output: str


class Docker:
    """The container of one episode."""

    def __init__(self, task: HarborTask, *, internet: bool) -> None:
        self.task, self.internet = task, internet and task.internet
        self.name = f"silva-{uuid.uuid4().hex}"
        self._begun = False  # there may be a container
        self._main: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        image = self.task.image
        if not image:
            digest = hashlib.sha256(str(Path(self.task.folder).resolve()).encode()).hexdigest()[:16]
            image = f"silva-harbor-{digest}"
            folder = str(Path(self.task.folder) / self.task.build)
            await self._docker("build", "--quiet", "--tag", image, folder, seconds=BUILD_SECONDS)
        memory = ["--memory", f"{self.task.memory_mb}m"] if self.task.memory_mb else []
        network = [] if self.internet else ["--network", "none"]
        inside = ["--workdir", self.task.workdir] if self.task.workdir else []
        self._begun = True
        self._main = await asyncio.create_subprocess_exec(
            "docker", "run", "--interactive", "--init", "--rm", "--name", self.name,
            "--label", f"{LABEL}={owner()}", *memory, *network, *inside, "--cpus", f"{self.task.cpus:g}",
            "--pids-limit", "512", "--security-opt", "no-new-privileges", *_flags(self.task.variables),
            image, "sh", "-c", UNTIL_LET_GO,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C is not for it
        )  # fmt: skip
        assert self._main.stdout is not None
        said = b""
        try:
            async with asyncio.timeout(BUILD_SECONDS):
                while READY.encode() not in said:
                    part = await self._main.stdout.read(1 << 12)
                    if not part:
                        status, text = await self._main.wait(), said[-300:].decode("utf-8", "replace")
                        raise DockerFault(f"docker run: exit status {status}: {text!r}")
                    said = said[-MOST_OUTPUT:] + part
        except TimeoutError:
            raise DockerFault(f"docker run: not ready after {BUILD_SECONDS:g} s") from None

    async def run(self, command: str, seconds: float, variables: Mapping[str, str]) -> Ran:
        return await self._docker(
            "exec", *_flags(variables), self.name, "timeout", "--kill-after=5", f"{seconds:g}",
            "bash", "-c", command, seconds=seconds + 30.0, must=False,
        )  # fmt: skip

    async def put(self, source: Path, target: str) -> None:
        await self._docker("cp", str(source), f"{self.name}:{target}")

    async def close(self) -> None:
        """
        Raises:
            DockerFault: the container may still be there.
        """
        if not self._begun:
            return
        main, self._main, self._begun = self._main, None, False
        if main is not None and main.stdin is not None:
            main.stdin.close()  # the container ends, or will as soon as it has begun
            try:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LEAVE_SECONDS):
                        await main.wait()
            finally:
                await _killed(main)
        ran = await self._docker("rm", "--force", self.name, must=False)
        if ran.status and not _is_gone(ran.output):
            raise DockerFault(f"docker rm: the container {self.name} stays: {ran.output[-300:]!r}")

    async def _docker(self, *arguments: str, seconds: float = 120.0, must: bool = True) -> Ran:
        """
        Raises:
            DockerFault: it failed (if it `must` not), or gave no answer in time.
        """
        process = await asyncio.create_subprocess_exec(
            "docker", *arguments, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        try:
            async with asyncio.timeout(seconds):
                output = await _read(process)
                status = await process.wait()
        except TimeoutError:
            raise DockerFault(f"docker {arguments[0]}: no answer after {seconds:g} s") from None
        finally:
            await _killed(process)
        if must and status:
            raise DockerFault(f"docker {arguments[0]}: exit status {status}: {output[-300:]!r}")
        return Ran(status, output)


def owner(pid: int | None = None) -> str:
    """This process, or another one of this machine, as no later process is called; "" if there is none."""
    pid = pid or os.getpid()
    try:
        told = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if told[0] in "ZX":  # it ended, and who began it has not looked yet
            return ""
        began = told[19]
    except OSError:
        try:
            os.kill(pid, 0)  # no /proc: another system, or no such process
        except ProcessLookupError:
            return ""
        except PermissionError:
            pass
        began = ""
    return f"{socket.gethostname()}:{pid}:{began}"


def remove_orphans() -> None:
    """Removes containers whose owner on this machine is dead.

    Raises:
        DockerFault: the daemon does not answer.
    """
    told = _at_once(
        "ps", "--all", "--filter", f"label={LABEL}", "--format", f'{{{{.Names}}}} {{{{.Label "{LABEL}"}}}}'
    )
    lines = [line.split(" ", 1) for line in told.splitlines() if " " in line]
    for name, who in lines:
        machine, pid, _ = f"{who}::".split(":", 2)
        if machine != socket.gethostname() or not pid.isdecimal() or owner(int(pid)) == who:
            continue
        try:
            _at_once("rm", "--force", name)
        except DockerFault as error:
            if not _is_gone(str(error)):
                raise


def _is_gone(said: str) -> bool:
    """Whether a container cannot be removed because it ends, or has ended, by itself."""
    return "No such container" in said or "already in progress" in said


def _at_once(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["docker", *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ASK_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise DockerFault(
            f"docker {arguments[0]}: no answer after {ASK_SECONDS:g} s: is its daemon well?"
        ) from None
    if done.returncode:
        raise DockerFault(f"docker {arguments[0]}: {done.stderr.strip()[-300:]}")
    return done.stdout


async def _killed(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    while process.returncode is None:  # `wait()` would wait for its children, too, if they hold its output
        await asyncio.sleep(0.01)
    process._transport.close()  # type: ignore[attr-defined]


async def _read(process: asyncio.subprocess.Process) -> str:
    """Its output; beginning and end of a long one, as what tests say of themselves stands at the end."""
    assert process.stdout is not None
    kept, half = bytearray(), MOST_OUTPUT // 2
    while part := await process.stdout.read(1 << 16):  # all of it, so that it does not wait for us
        kept += part
        del kept[half:-half]
    return kept.decode("utf-8", "replace")


def _flags(variables: Mapping[str, str]) -> list[str]:
    return [part for name, value in variables.items() for part in ("--env", f"{name}={value}")]
