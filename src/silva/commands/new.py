"""`silva new environment NAME`: a small environment that works, and its test, to be changed from there."""

from __future__ import annotations

import keyword
from pathlib import Path

from silva.commands.command import Given
from silva.environments import ENVIRONMENTS
from silva.errors import ConfigError
from silva.monitoring.printable import put

ENVIRONMENT = '''\
"""{title}: multiply a number by adding it up with a tool.

Play it:    silva envs play {name}.py:{title}
Check it:   silva envs check {name}.py
Train:      silva rl --environments.0.type={name}.py:{title}
"""

from silva.environments.bases.tool_qa import Question, ToolQA
from silva.tools.function import ToolError
from silva.types import ToolCall


# A tool is a function: its name, docstring and type hints tell the model how to call it.
def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    if max(abs(a), abs(b)) > 1_000_000:
        raise ToolError("numbers must be below a million")  # the model reads this and can try again
    return a + b


class {title}(ToolQA):
    """Multiply a number by adding it up."""  # what `silva envs` and reports say

    # Fields are keys of the configuration, with their defaults.
    eval_size: int = 20  # problems that are held out
    largest: int = 200
    """Largest number in a question."""

    def questions(self):
        # One entry is one problem: the question, its answer, and the calls that an expert makes (or None).
        return [
            Question(
                f"How much is 3 times {{n}}?",
                str(3 * n),
                [ToolCall("add", {{"a": n, "b": n}}), ToolCall("add", {{"a": 2 * n, "b": n}})],
            )
            for n in range(1, self.largest + 1)
        ]

    def tools(self):
        return [add]

    # The last number of a reply must be the answer. For other rules, define grade(self, reply, answer).
    # Games of several turns, and more: docs/environments.md.
'''

TEST = '''\
"""Plays {title} without a model. Run it with `pytest test_{name}.py`."""

import asyncio

from silva.environments.check.checks import examine
from silva.rendering.tool_calls import parse_hermes
from silva.types import Message

from {name} import {title}


def played(task, replies):
    """The last step of an episode; `replies` is a function of the environment."""

    async def run():
        environment = {title}().taskset().environment(task)
        await environment.reset()
        while True:
            parsed = parse_hermes(replies(environment))
            message = Message("assistant", parsed.content, tool_calls=parsed.calls, errors=parsed.errors)
            step = await environment.step(message)
            if step.terminated or step.truncated:
                await environment.close()
                return step

    return asyncio.run(run())


def test_nothing_is_wrong_with_it():
    """The same as `silva envs check {name}.py`."""
    faults = [finding for check in examine({title}()) if not check.ok for finding in check.findings]
    assert faults == []


def test_the_expert_solves_every_held_out_problem():
    for task in {title}().taskset().tasks("eval"):
        step = played(task, lambda environment: environment.expert_reply())
        assert step.rewards == {{"correct": 1.0}}
        assert step.metrics["success"] == 1.0


def test_a_wrong_answer_earns_nothing():
    task = {title}().taskset().tasks("eval")[0]
    step = played(task, lambda environment: f"It is {{int(task.answer[0]) + 1}}.")
    assert step.rewards == {{"correct": 0.0}}
    assert step.metrics["success"] == 0.0
'''


def run(given: Given) -> int:
    if len(given.rest) != 2 or given.rest[0] != "environment":
        raise ConfigError(f"silva new: got {' '.join(given.rest)!r}, expected environment NAME")
    put("\n".join(write_environment(given.rest[1], Path.cwd())))
    return 0


def write_environment(name: str, folder: Path) -> list[str]:
    """Writes NAME.py and test_NAME.py; what to do next, in lines.

    Raises:
        ConfigError: the name is no name of a module or is taken, or one of the files exists.
    """
    if not name.isidentifier() or keyword.iskeyword(name) or name != name.lower() or name.startswith("_"):
        raise ConfigError(
            f"silva new environment: got {name!r}, expected a name for a Python file: lower-case letters, "
            "digits and _, such as my_world"
        )
    title = "".join(part.capitalize() for part in name.split("_"))
    if name in ENVIRONMENTS:
        raise ConfigError(f"silva new environment: {name} is an environment of Silva; choose another name")
    files = {folder / f"{name}.py": ENVIRONMENT, folder / f"test_{name}.py": TEST}
    for path in files:
        if path.exists() or path.is_symlink():
            raise ConfigError(f"silva new environment: {path.name} exists; nothing was written")
    written: list[Path] = []
    try:
        for path, text in files.items():
            with path.open("x", encoding="utf-8") as file:  # also refuses what has appeared since
                written.append(path)
                file.write(text.format(name=name, title=title))
    except OSError as error:
        for path in written:
            path.unlink(missing_ok=True)
        raise ConfigError(
            f"silva new environment: {error.filename or folder}: {error.strerror or error}"
        ) from error
    return [
        f"{name}.py and test_{name}.py are written",
        f"  silva envs play {name}.py:{title}",
        f"  silva envs check {name}.py",
        f"  pytest test_{name}.py",
    ]
