"""A command line that plays a task: what its process is told, and that nothing of it is left behind.

    Silva ──pipe──> keeper.py ──> command ──> whatever it starts

The pipe ends with the episode, at a time limit, and with Silva, however it ends; the keeper ends the rest.
The command runs in a folder of its own, with the rights of the user: it is not in a sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import sys
import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from silva.environments.process.variables import variables
from silva.errors import SilvaError
from silva.protocols import Endpoint
from silva.types import Step, Task

KEEPER = Path(__file__).with_name("keeper.py")
KEY = "silva"  # clients want one; the session is in the address
PART, PARTS = 1 << 12, 4  # of the end of its output, in a message
LAST = 10.0  # seconds that a keeper has for its work
_COLUMN = re.compile(r"\{([A-Za-z_]\w*)\}")


class ProgramFault(SilvaError, RuntimeError):
    """The command failed: the episode has no result."""


class CommandProgram:
    """Implements `Harness`.

    Args:
        words: the command line. Files that it names are those of this process's folder.
        names: of environment variables that it gets besides those of the machine.
    """

    def __init__(self, words: Sequence[str], names: Sequence[str] = ()) -> None:
        self.words = [os.path.abspath(word) if os.path.isfile(word) else word for word in words]
        self.names = names

    async def run(self, task: Task, endpoint: Endpoint) -> Step | None:
        """
        Raises:
            ProgramFault: it ended with another status than 0.
        """
        folder = tempfile.mkdtemp(prefix="silva-program-")
        words = [_COLUMN.sub(lambda found: _text(task.data, found), word) for word in self.words]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", str(KEEPER), folder, *words,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            env=self._variables(task, endpoint), start_new_session=True,
        )  # fmt: skip
        end = deque[bytes](maxlen=PARTS)
        assert process.stdout is not None and process.stdin is not None
        try:
            while part := await process.stdout.read(PART):
                end.append(part)
            status = await process.wait()
        finally:
            process.stdin.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(asyncio.ensure_future(process.wait())), LAST)
        if status:
            text = b"".join(end).decode(errors="replace").strip()
            raise ProgramFault(f"{words[0]} ended with status {status}: {text[-PART:] or 'it said nothing'}")
        return None

    def _variables(self, task: Task, endpoint: Endpoint) -> dict[str, str]:
        told = {
            "OPENAI_BASE_URL": endpoint.openai, "OPENAI_API_BASE": endpoint.openai, "OPENAI_API_KEY": KEY,
            "ANTHROPIC_BASE_URL": endpoint.url, "ANTHROPIC_API_KEY": KEY, "SILVA_MODEL": endpoint.model,
            "SILVA_REWARD_URL": f"{endpoint.url}/reward",
            "SILVA_TASK": json.dumps({"id": task.id, "seed": task.seed, "data": dict(task.data)}),
        }  # fmt: skip
        own = {name: os.environ[name] for name in self.names if name in os.environ}
        found = variables(own | told)
        del found["PYTHONPATH"]  # it may be a program of another Python
        return found


def _text(data: Mapping[str, Any], found: re.Match[str]) -> str:
    """What a row has in a column; braces around anything else stay."""
    value = data.get(found[1], found[0])
    return value if isinstance(value, str) else json.dumps(value)
