"""Task sets of verifiers: `verifiers.v1` (0.4), and environments of v0 where that is installed.

    type = "verifiers"
    taskset_id = "my_tasks.py:Sums"       # a Taskset; or the id of an installed package
    config = {limit = 500}                # of the task set; for v0, the arguments of load_environment

A task's prompt is shown, methods marked `@vf.tool` of its toolsets are called in this process, and its
`@vf.reward` functions grade. What drives a model by itself (an `Env` with several agents, a harness, stops
and intercepts) or needs a runtime (a container, a sandbox) is refused: Silva plays the episode.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from silva.config.plugins import load_object
from silva.environments.foreign.dialogue import (
    ForeignDialogue,
    ForeignDialogueSettings,
    ForeignSession,
    Graded,
)
from silva.environments.foreign.library import imported
from silva.environments.foreign.settings import ForeignSettings
from silva.environments.tasks import Draft, listed
from silva.errors import CapabilityError, ConfigError, errors_about
from silva.rendering.openai import arguments_text, call_ids, thoughts_apart
from silva.tools.function import tool
from silva.types import Message, Role, Task

if TYPE_CHECKING:
    from silva.protocols import TaskSet

PACKAGE = "verifiers>=0.4,<0.5"
MOST_TASKS = 100_000  # of a task set that never ends, or of one that is larger


class Verifiers(ForeignSettings, ForeignDialogueSettings):
    """A task set of verifiers."""

    licence: ClassVar[str] = "that of the task set (verifiers: MIT)"
    needs: ClassVar[str] = "`taskset_id`"
    packages: ClassVar[tuple[str, ...]] = ("verifiers",)

    type: Literal["verifiers"] = "verifiers"
    taskset_id: str
    """Id of an installed task set or v0 environment, or "file.py:Class", "package.module:Class"."""
    config: Mapping[str, Any] = {}
    """Configuration of the task set; of a v0 environment the arguments of `load_environment`."""

    @property
    def label(self) -> str:
        return self.name or self.taskset_id.rpartition(":")[2].rpartition("/")[2] or self.type

    def taskset(self) -> TaskSet:
        library = imported("verifiers", self.type, PACKAGE)
        if hasattr(library, "load_environment"):
            from silva.environments.foreign.verifiers_v0 import taskset as taskset_v0

            return taskset_v0(self, library)
        v1 = imported("verifiers.v1", self.type, PACKAGE)
        found = _loaded(self, v1)
        tasks = list(itertools.islice(found, MOST_TASKS))
        for task in tasks[:1]:
            _refuse_what_drives(self, v1, task, found)
        drafts = [_draft(self, index, task) for index, task in enumerate(tasks)]

        def build(task: Task) -> ForeignDialogue:
            return ForeignDialogue(self, task, lambda: V1Session(self, v1, found, tasks[task.data["index"]]))

        return listed(self, drafts, build)


class V1Session(ForeignSession):
    def __init__(self, settings: Verifiers, v1: Any, taskset: Any, task: Any) -> None:
        self.settings, self.v1, self.taskset, self.task = settings, v1, taskset, task
        state = v1.state.state_cls(type(task))()
        self.trace = v1.Trace(
            task=v1.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
            agent=v1.AgentInfo(config=v1.AgentConfig()),
            state=state,
        )
        self.opening = _opening(task.data)

    async def start(self) -> None:
        found: list[Any] = []
        for each in _toolsets(self.taskset, self.task):
            each._inert_state = self.trace.state  # what its tools see as `self.state`
            await each.setup()
            await each.setup_task(self.task.data)
            found += [_tool(self.settings, each, method) for method in _methods(each)]
        self.tools = found

    async def grade(self, messages: Sequence[Message]) -> Graded:
        """
        Raises:
            Exception: a reward raised: there is no result. (verifiers v0 gave it a reward of 0.)
        """
        self._tell(messages)
        self.trace.stop("agent_completed")
        given = {"task": self.task.data, "trace": self.trace, "runtime": None}
        names = inspect.signature(self.task.finalize).parameters
        done = self.task.finalize(**{name: value for name, value in given.items() if name in names})
        if inspect.isawaitable(done):
            await done
        await self.task.score(self.trace, None)
        if self.trace.errors:
            raise RuntimeError(f"environment {self.settings.label}: {self.trace.errors[-1]}")
        missing = [name for name, reward in self.trace.rewards.items() if reward is None]
        if missing or not self.trace.rewards:
            raise TypeError(
                f"environment {self.settings.label}: no reward from {', '.join(missing) or 'the task'}"
            )
        metrics = {name: float(value) for name, value in self.trace.metrics.items() if value is not None}
        return Graded(self.trace.reward, metrics)

    def _tell(self, messages: Sequence[Message]) -> None:
        """The dialogue as the trace that rewards read."""
        for number, (message, ids) in enumerate(zip(messages, call_ids(messages), strict=True)):
            if message.role == "tool":
                if not ids:  # to a malformed call, which verifiers never sees
                    continue
                said = self.v1.ToolMessage(tool_call_id=ids[0], content=message.content, name=message.name)
            elif message.role == "assistant":
                thoughts, answer = thoughts_apart(message)
                calls = [
                    self.v1.ToolCall(id=id, name=call.name, arguments=arguments_text(call))
                    for id, call in zip(ids, message.tool_calls, strict=True)
                ]
                said = self.v1.AssistantMessage(
                    content=answer, reasoning_content=thoughts or None, tool_calls=calls or None
                )
            else:
                kind = self.v1.SystemMessage if message.role == "system" else self.v1.UserMessage
                said = kind(content=message.content)
            nodes = self.trace.nodes
            parent = len(nodes) - 1 if nodes else None
            sampled = message.role == "assistant" and number >= len(self.opening)
            nodes.append(self.v1.MessageNode(parent=parent, message=said, sampled=sampled))


def _loaded(settings: Verifiers, v1: Any) -> Any:
    """The task set, from a class or from an installed package."""
    name = settings.taskset_id
    try:
        kind = load_object(name, lambda value: isinstance(value, type), "class") if ":" in name else (
            v1.utils.loaders.taskset_class(name)
        )  # fmt: skip
    except ConfigError as error:
        raise ConfigError(f"environment {settings.label}: taskset_id: {error}") from None
    except Exception as error:  # not installed, exports nothing: as the package says it
        raise ConfigError(
            f"environment {settings.label}: no task set {name!r}: {type(error).__name__}: {error}"
        ) from error
    if not issubclass(kind, v1.Taskset):
        raise ConfigError(
            f"environment {settings.label}: {name} is no verifiers.v1.Taskset: it is a {kind.__name__}"
        )
    try:
        config = v1.utils.generic.concrete_type(kind, v1.TasksetConfig) or v1.TasksetConfig
        return kind(config(**settings.config))
    except Exception as error:
        raise ConfigError(
            f"environment {settings.label}: the task set does not load with this `config`: {error}"
        ) from error


def _refuse_what_drives(settings: Verifiers, v1: Any, task: Any, taskset: Any) -> None:
    """What Silva cannot play, said at the start.

    Raises:
        CapabilityError: the task needs a runtime, or does more than offer tools and grade.
    """
    wrong: list[str] = []
    if task.NEEDS_CONTAINER or task.data.image:
        wrong.append("a container")
    hooks = [*task.hooks("reward"), *task.hooks("metric"), task.finalize]
    if not task.hooks("reward") and not task.config.judges:
        wrong.append("a reward: it has none")
    # `finalize(self, trace, runtime)` of the base does nothing.
    for hook in hooks:
        parameter = inspect.signature(hook).parameters.get("runtime")
        own = getattr(hook, "__func__", hook) is not v1.Task.finalize
        if own and parameter is not None and parameter.default is inspect.Parameter.empty:
            wrong.append(f"a runtime, for {hook.__name__}()")
    if type(task).setup is not v1.Task.setup:
        wrong.append("its setup(), which prepares a runtime")
    discovered = v1.utils.decorators.discover_decorated
    wrong += [f"{kind}s" for kind in ("stop", "intercept") if discovered(task, kind)]
    for each in _toolsets(taskset, task):
        if type(each).register is not v1.Toolset.register:
            wrong.append(f"the tools of {type(each).__name__}, which has a register() of its own")
    if wrong:
        raise CapabilityError(
            f"environment {settings.label}: {type(task).__name__} needs {', '.join(wrong)}; Silva plays "
            "tasks with a prompt, tools and rewards"
        )


def _toolsets(taskset: Any, task: Any) -> list[Any]:
    return [*type(task).toolsets(task.config), *type(taskset).toolsets(taskset.config)]


def _methods(toolset: Any) -> Iterable[Any]:
    kind = type(toolset)
    names = {n for base in kind.__mro__ for n, f in vars(base).items() if callable(f) and hasattr(f, "tool")}
    return [getattr(toolset, name) for name in sorted(names) if hasattr(getattr(toolset, name), "tool")]


def _tool(settings: Verifiers, toolset: Any, method: Any) -> Any:
    name = getattr(method, "tool_name", None) or method.__name__
    prefix = f"{toolset.server_name}_" if toolset.server_name else ""
    return tool(
        method, name=prefix + name, timeout=settings.tool_timeout, max_chars=settings.max_result_chars
    )


def _opening(data: Any) -> list[tuple[Role, str]]:
    said: list[tuple[Role, str]] = [("system", data.system_prompt)] if data.system_prompt else []
    if isinstance(data.prompt, str):
        return [*said, ("user", data.prompt)]
    return said + [(message.role, _text(message.content)) for message in data.prompt or ()]


def _text(content: Any) -> str:
    if isinstance(content, str) or content is None:
        return content or ""
    if any(part.type != "text" for part in content):
        raise CapabilityError("a prompt with an image: Silva plays text")
    return "\n".join(part.text for part in content)


def _draft(settings: Verifiers, index: int, task: Any) -> Draft:
    with errors_about(f"environment {settings.label}: task {index}"):
        opening = _opening(task.data)
    if not any(role == "user" for role, _ in opening):
        raise CapabilityError(
            f"environment {settings.label}: task {index} has no prompt; its user would speak first"
        )
    shown = [{"role": role, "content": text} for role, text in opening]
    # Two tasks with the same prompt belong to one split.
    return Draft({"index": index, "messages": shown}, None, [shown])
