"""The simulator of ScienceWorld: a Java program, one for each open episode, as episodes in one influence each
other. It ends with the process that started it, even if that is killed: it waits for the end of its input.
"""

from __future__ import annotations

import contextlib
import functools
import json
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from silva.errors import ConfigError
from silva.scratch import private_folder

HEAP = "1g"
# Which hash an object has decides in which order the simulator lists, heats and connects things. By default
# it depends on all that the program did before; with this every hash is 1, and order is that of creation.
OPTIONS = (f"-Xmx{HEAP}", "-XX:+UseSerialGC", "-XX:+UnlockExperimentalVMOptions", "-XX:hashCode=2")
SPLITS = ("train", "dev", "test")


class Experiment(NamedTuple):
    """What is simulated: a task's family, the number of a variation, the simplifications with commas."""

    task: str
    variation: int
    simplify: str


class Answer(NamedTuple):
    """What the simulator says to a command. `score`: so far, of 100; below 0 it failed."""

    text: str
    score: int
    completed: bool


class Simulator(Protocol):
    """What an episode needs of it."""

    def load(self, experiment: Experiment) -> Answer:
        """Start this experiment; the answer is what the agent sees first."""

    def step(self, command: str) -> Answer: ...

    def task(self) -> str:
        """What has to be done."""

    def templates(self) -> list[str]:
        """Forms of commands, with OBJ for an object."""

    def commands(self) -> list[str]:
        """Those that can be said now, sorted: hundreds, or some thousands."""

    def close(self) -> None: ...


class JavaSimulator:
    """A Java program that simulates one episode at a time.

    Raises:
        ConfigError: there is no Java.
    """

    def __init__(self) -> None:
        from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway
        from scienceworld.constants import JAR_PATH

        stack = contextlib.ExitStack()
        folder = stack.enter_context(private_folder("scienceworld"))  # it writes a file
        weakref.finalize(self, stack.close)
        try:
            port, token, self._process = launch_gateway(
                classpath=JAR_PATH,
                javaopts=[*OPTIONS],
                cwd=str(folder),
                die_on_exit=True,
                return_proc=True,
                enable_auth=True,  # other users of the machine reach the port too
            )
        except (OSError, ValueError) as error:  # ValueError: it wrote no port
            raise ConfigError(
                f"environment scienceworld: java does not start ({error}): install Java 8 or later, such as "
                "default-jre-headless of Debian"
            ) from error
        parameters = GatewayParameters(auto_field=True, port=port, auth_token=token)
        self._gateway = JavaGateway(gateway_parameters=parameters, java_process=self._process)
        self._server: Any = None

    def load(self, experiment: Experiment) -> Answer:
        self._open(experiment, gold=False)
        return self.step("look around")

    def step(self, command: str) -> Answer:
        text = self._server.step(command)
        return Answer(text, round(100 * self._server.getScore()), self._server.getCompleted())

    def task(self) -> str:
        return str(self._server.getTaskDescription())

    def templates(self) -> list[str]:
        return list(self._server.getPossibleActions())

    def commands(self) -> list[str]:
        # As JSON: a list of Java is read one by one, with a request for each.
        found = json.loads(self._server.getValidActionObjectCombinationsJSON())["validActions"]
        return sorted({each["action"] for each in found})

    def gold(self, experiment: Experiment) -> list[str]:
        """Commands that solve an experiment from its beginning."""
        self._open(experiment, gold=True)
        return list(self._server.getGoldActionSequence())

    def variations(self, task: str) -> dict[str, list[int]]:
        """The numbers of the variations of each part that the package publishes."""
        self._open(Experiment(task, 0, ""), gold=False)
        return {part: list(getattr(self._server, f"getVariations{part.title()}")()) for part in SPLITS}

    def close(self) -> None:
        """Leaves it to the next episode."""
        if self._process.poll() is None:
            _FREE.append(self)

    def _open(self, experiment: Experiment, *, gold: bool) -> None:
        self._server = self._gateway.jvm.scienceworld.runtime.pythonapi.PythonInterface()
        self._server.load(experiment.task, experiment.variation, experiment.simplify, gold)
        self._server.reset()


_FREE: list[JavaSimulator] = []  # without an episode: to start one takes a second


def simulator() -> JavaSimulator:
    """A simulator for one episode; `close` gives it back."""
    return _FREE.pop() if _FREE else JavaSimulator()


@functools.cache
def gold_path(experiment: Experiment) -> Sequence[str]:
    """Commands that solve an experiment. A simulator of their own finds them, in a second to a minute."""
    found = simulator()
    try:
        return tuple(found.gold(experiment))
    finally:
        found.close()


@functools.cache
def variations(tasks: tuple[str, ...]) -> Mapping[str, Mapping[str, Sequence[int]]]:
    """Task -> part (train, dev, test) -> numbers of variations."""
    found = simulator()
    try:
        return {task: found.variations(task) for task in tasks}
    finally:
        found.close()
