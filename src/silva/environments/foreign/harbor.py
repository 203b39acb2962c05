"""Task folders of Harbor and Terminal-Bench, run in Docker.

    type = "harbor"
    path = "tasks/"

    reset      docker build, docker run     a container for each episode, without what grades it (docker.py)
    bash(...)  docker exec                  the only tool
    the end    docker cp tests, docker exec test.sh, then the reward is read and the container removed

Tests and solution enter the container only after the last reply. A container that the task lets into the
internet gets there only with `internet = true`.
"""

from __future__ import annotations

import base64
import json
import random
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from silva.config.sections import Above0, Positive
from silva.environments.foreign.dialogue import (
    ForeignDialogue,
    ForeignDialogueSettings,
    ForeignSession,
    Graded,
)
from silva.environments.foreign.docker import LATE, Docker, DockerFault, remove_orphans
from silva.environments.foreign.harbor_tasks import HarborTask, read_tasks, reward_of
from silva.environments.tasks import Draft, listed
from silva.errors import CapabilityError, ConfigError, SilvaError
from silva.rendering.tool_calls import write_calls
from silva.tools.calls import SessionTool
from silva.tools.function import ToolError
from silva.types import Message, Task, ToolCall, ToolSpec

if TYPE_CHECKING:
    from silva.protocols import TaskSet

BASH = ToolSpec(
    "bash",
    "Runs a command in the task's container. Files stay; variables and the folder do not.",
    {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
)


class HarborFault(SilvaError, OSError):
    """The tests of a task did not run: the episode has no result."""


class Harbor(ForeignDialogueSettings):
    """Task folders of Harbor or Terminal-Bench."""

    licence: ClassVar[str] = "that of the tasks"
    needs: ClassVar[str] = "`path`, Docker"
    programs: ClassVar[tuple[str, ...]] = ("docker",)

    type: Literal["harbor"] = "harbor"
    path: str
    """Folder of a task, or of many."""
    reward_key: str = "reward"
    """Which of the values in reward.json is the reward."""
    internet: bool = False
    """Let the containers of tasks that ask for it into the internet."""
    max_tool_calls: Positive = 30
    """Commands of one episode; one more ends it."""
    tool_timeout: Above0 = 60.0
    """Seconds one command may take."""
    max_result_chars: Positive = 6000
    """Characters of a command's output that are shown."""

    def taskset(self) -> TaskSet:
        tasks = read_tasks(self.path)
        if shutil.which("docker") is None:
            raise ConfigError(f"environment {self.label}: needs the program docker, which is not installed")
        try:
            remove_orphans()
        except DockerFault as error:
            raise ConfigError(f"environment {self.label}: {error}") from None
        by_folder = {task.folder: task for task in tasks}

        def build(task: Task) -> HarborEpisode:
            return HarborEpisode(self, task, by_folder[task.data["folder"]])

        # The instruction is the problem; the folder says where it is.
        drafts = [
            Draft({"folder": task.folder, "instruction": task.instruction}, None, [task.instruction])
            for task in tasks
        ]
        return listed(self, drafts, build)


class HarborEpisode(ForeignDialogue):
    settings: Harbor

    def __init__(self, settings: Harbor, task: Task, chosen: HarborTask) -> None:
        super().__init__(settings, task, lambda: HarborSession(settings, chosen))
        self.chosen = chosen

    def expert_reply(self) -> str:
        """The task's own solution, as one command.

        Raises:
            CapabilityError: it has none.
        """
        if not self.chosen.solution:
            raise CapabilityError(f"environment {self.settings.label}: {self.chosen.name} has no solution")
        if self.called:
            return "Done."
        script = (Path(self.chosen.folder) / self.chosen.solution).read_text("utf-8")
        return write_calls([ToolCall("bash", {"command": script})])

    def random_reply(self, seed: int) -> str:
        """A harmless command, then the end."""
        if self.called:
            return "Done."
        command = random.Random(seed).choice(("ls", "id -u", "echo hello", "true"))
        return write_calls([ToolCall("bash", {"command": command})])

    def _shared(self) -> tuple[Any, ...]:
        return (*super()._shared(), self.chosen)


class HarborSession(ForeignSession):
    def __init__(self, settings: Harbor, task: HarborTask) -> None:
        self.settings, self.task = settings, task
        self.machine = Docker(task, internet=settings.internet)
        self.opening = [("user", task.instruction)]
        # The command's own limit is kept inside; what takes longer is Docker.
        self.tools = [SessionTool(BASH, settings.tool_timeout + 60.0, self.bash)]

    async def start(self) -> None:
        await self.machine.start()

    async def bash(self, arguments: Mapping[str, object]) -> str:
        command = arguments.get("command")
        if not isinstance(command, str) or set(arguments) != {"command"} or "\0" in command:
            raise ToolError(f"bash: expected one text called command, got {json.dumps(arguments)[:100]}")
        ran = await self.machine.run(command, self.settings.tool_timeout, {})
        if ran.status == LATE:
            return f"{ran.output}\n[stopped: it took too long]".strip()
        return ran.output if ran.status == 0 else f"{ran.output}\n[exit status {ran.status}]".strip()

    async def grade(self, messages: Sequence[Message]) -> Graded:
        """
        Raises:
            HarborFault, ValueError: the tests did not run to their end, or wrote no reward.
        """
        folder = Path(self.task.folder)
        test = "/tests/test.sh" if self.task.kind == "harbor" else "/tests/run-tests.sh"
        # What the policy may have put there must not grade it.
        await self._must("rm -rf /tests /logs/verifier && mkdir -p /logs/verifier")
        tests = folder / "tests"
        if tests.is_dir():
            await self.machine.put(tests, "/tests")
        if self.task.kind == "terminal":
            await self._must("mkdir -p /tests")
            await self.machine.put(folder / self.task.test, test)
        variables = {**self.task.verifier_variables, "TEST_DIR": "/tests"}
        ran = await self.machine.run(f"bash {test}", self.task.verifier_seconds, variables)
        if ran.status == LATE:
            raise HarborFault(f"harbor: {self.task.name}: the tests took longer than their limit")
        read = await self._must(
            "for f in reward.json reward.txt; do [ -f /logs/verifier/$f ] && [ ! -L /logs/verifier/$f ] && "
            'printf "%s %s\\n" $f "$(head -c 65536 /logs/verifier/$f | base64 -w0)"; done; true'
        )
        lines = [line.split(" ", 1) for line in read.splitlines() if " " in line]
        files = {name: base64.b64decode(data).decode("utf-8", "replace") for name, data in lines}
        return Graded(reward_of(self.task, files, ran.output, self.settings.reward_key))

    async def close(self) -> None:
        await self.machine.close()

    async def _must(self, command: str) -> str:
        ran = await self.machine.run(command, 60.0, {})
        if ran.status:
            raise HarborFault(f"harbor: {self.task.name}: {command[:60]}: {ran.output[-200:]!r}")
        return ran.output
