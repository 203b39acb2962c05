"""The tool `python`: runs code that the model writes, in a sandbox (see silva/sandbox)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from silva.errors import CapabilityError
from silva.sandbox.process import Result, Sandbox
from silva.sandbox.settings import SandboxSettings
from silva.sandbox.walls import Walls, chosen
from silva.tools.calls import SessionTool
from silva.tools.function import ToolError
from silva.tools.settings import ToolSettings
from silva.types import ToolSpec

SPEC = ToolSpec(
    "python",
    "Run Python code. What it prints is shown, and the value of a last expression.",
    {
        "type": "object",
        "properties": {"code": {"type": "string"}},
        "required": ["code"],
        "additionalProperties": False,
    },
)
KEPT = " Variables stay from call to call."


class PythonSettings(ToolSettings, SandboxSettings):
    """Runs code of the model in a sandbox."""

    type: Literal["python"] = "python"

    def build(self) -> Python:
        return Python(self)


class Python:
    """A `silva.protocols.Toolset`: a sandbox of its own for each episode, started by its first call."""

    def __init__(self, settings: PythonSettings) -> None:
        self.settings, self.walls = settings, chosen(settings)

    async def open(self, seed: int) -> Session:
        return Session(self.settings, self.walls, seed)


class Session:
    """The tool of one episode."""

    def __init__(self, settings: PythonSettings, walls: Walls, seed: int) -> None:
        self.settings, self.walls = settings, walls
        self.sandbox = Sandbox(settings, walls, seed)
        spec = replace(SPEC, description=SPEC.description + KEPT) if settings.keep_state else SPEC
        # Time for a start and the sandbox's own limit; room for what is said of the end.
        self.tools = [SessionTool(spec, settings.seconds + 30.0, self.call, settings.output_chars + 200)]
        self.attempts = 0  # to open a socket, since they were last asked for

    def metrics(self) -> Mapping[str, float]:
        attempts, self.attempts = self.attempts, 0
        return {"network_attempts": float(attempts)} if attempts else {}

    async def fork(self, seed: int) -> Session:
        """Another sandbox; with the same seed the same random numbers go on.

        Raises:
            CapabilityError: calls keep state, which a sandbox cannot share with another one.
        """
        if self.settings.keep_state:
            raise CapabilityError(
                "python with keep_state = true cannot be forked: its variables are in a process"
            )
        twin = Session(self.settings, self.walls, seed)
        twin.sandbox.calls = self.sandbox.calls
        return twin

    async def close(self) -> None:
        await self.sandbox.close()

    async def call(self, arguments: Mapping[str, object]) -> str:
        code = arguments.get("code")
        if not isinstance(code, str) or set(arguments) != {"code"}:
            raise ToolError("python: expected one argument, code, with text")
        if len(code) > 100_000 or "\0" in code:
            raise ToolError("python: expected code of at most 100,000 characters, without null characters")
        try:
            code.encode()
        except UnicodeEncodeError:
            raise ToolError("python: the code is not valid Unicode") from None
        result = await self.sandbox.run(code)
        self.attempts += result.network_attempts
        return shown(result, self.settings)


def shown(result: Result, settings: SandboxSettings) -> str:
    """What the model reads: the output, and in brackets what it would not know otherwise."""
    ends = {
        "timeout": f"stopped after {settings.seconds:g} s",
        "output": f"stopped: more than {settings.output_chars} characters of output",
        "signal": f"ended by {_signal(result.detail)}",
        "exit": f"exit status {result.detail}",
        "lost": "the interpreter was ended, by the code or by its limits, and starts again",
    }
    notes = [ends[result.how]] if result.how in ends else []
    if result.network_attempts:
        notes.append("there is no network")
    if result.how == "signal" and result.detail in (9, 24):
        notes.append(f"limits: {settings.memory_mb} MiB of memory, {settings.cpu_seconds} s of computing")
    text = result.output.rstrip("\n")
    said = "\n".join(f"[{note}]" for note in notes)
    return f"{text}\n{said}".strip("\n") if text or said else "[no output]"


def _signal(number: int) -> str:
    import signal

    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
