"""Environments of verifiers v0 (`load_environment`), played from outside.

A v0 environment drives the model: it calls a client like OpenAI's until it is done, then its rubric grades.
Here the client is ours. It shows what the environment sends, and answers with what the policy says:

    environment ── chat.completions.create(messages, tools) ──> Line ──> Observation
                <── ChatCompletion ─────────────────────────── Line <── the policy's reply

A reward function that raises is worth 0 in v0. Here the episode has no result.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from silva.aio import cancelled, first
from silva.environments.bases.environment import BaseEnvironment
from silva.environments.foreign.library import finite, imported, plain, solved
from silva.environments.tasks import Draft, listed
from silva.errors import CapabilityError, ConfigError, contained
from silva.rendering.openai import ROLES, reply_entry, spec_of, text_of
from silva.types import Message, Observation, Step, Task

if TYPE_CHECKING:
    from silva.environments.foreign.verifiers import Verifiers
    from silva.protocols import TaskSet

_raised: contextvars.ContextVar[list[BaseException] | None] = contextvars.ContextVar("raised", default=None)


def taskset(settings: Verifiers, library: Any) -> TaskSet:
    """The tasks of `load_environment(settings.taskset_id, **settings.config)`."""
    try:
        environment = library.load_environment(settings.taskset_id, **settings.config)
        rows = environment.get_dataset()
    except Exception as error:  # not installed, other arguments, no data: as the package says it
        raise ConfigError(
            f"environment {settings.label}: no environment {settings.taskset_id!r}: "
            f"{type(error).__name__}: {error}"
        ) from error
    _check(settings, environment)
    for rubric in _rubrics(environment):
        rubric.funcs[:] = [_remembering(function) for function in rubric.funcs]
    drafts = [_draft(settings, index, row) for index, row in enumerate(rows)]
    return listed(
        settings, drafts, lambda task: V0Episode(settings, task, environment, rows[task.data["index"]])
    )


class V0Episode(BaseEnvironment):
    """`play`: the environment's own loop, which waits for replies."""

    settings: Verifiers

    def __init__(self, settings: Verifiers, task: Task, environment: Any, row: Mapping[str, Any]) -> None:
        super().__init__(settings, task)
        self.environment, self.row = environment, row
        self.line = Line()
        self.play: asyncio.Task[Any] | None = None
        self.errors: list[BaseException] = []
        self.seen = 0  # messages of the context that were shown or said

    async def reset(self) -> Observation:
        self._begin()
        self.play = asyncio.create_task(self._played())
        request = await self._next()
        if request is None:
            raise TypeError(f"environment {self.settings.label}: it ended before it asked anything")
        return self._shown(request)

    async def step(self, message: Message) -> Step:
        self._check_running()
        self.line.answer(_completion(message))
        self.seen += 1
        request = await self._next()
        if request is not None:
            return Step(self._shown(request))
        assert self.play is not None
        self._end()
        state = self.play.result()
        if self.errors:
            raise RuntimeError(
                f"environment {self.settings.label}: a reward function raised"
            ) from self.errors[0]
        if state.get("error"):
            raise RuntimeError(f"environment {self.settings.label}: {state['error']}")
        reward = finite(state["reward"], f"environment {self.settings.label}")
        metrics = {
            str(name): float(value)
            for name, value in (state.get("metrics") or {}).items()
            if isinstance(value, (bool, int, float))
        }
        metrics["success"] = float(solved(reward, self.settings.solved_at))
        return Step(rewards={"reward": reward}, terminated=True, metrics=metrics)

    async def fork(self, seed: int) -> Any:
        raise CapabilityError(f"environment {self.settings.label}: verifiers v0 cannot be forked")

    async def close(self) -> None:
        await super().close()
        play, self.play = self.play, None
        if play is not None:
            await cancelled([play])

    async def _played(self) -> Any:
        """The environment's rollout and grade: its final state."""
        _raised.set(self.errors)
        given = _arguments(self.line, self.row)
        names = inspect.signature(self.environment.run_group).parameters
        with contained():  # in the task: exit() there would end the event loop
            states = await self.environment.run_group(**{k: v for k, v in given.items() if k in names})
        return states[0]

    async def _next(self) -> dict[str, Any] | None:
        """The next request of the environment; None: it is done.

        Raises:
            Exception: what it raised.
        """
        assert self.play is not None
        request = await first(self.line.requests.get(), asyncio.shield(self.play))
        if request is not None:
            return request.result()
        self.play.result()
        return None

    def _shown(self, request: Mapping[str, Any]) -> Observation:
        """What is new in the context."""
        messages = request["messages"]
        if len(messages) < self.seen:
            raise CapabilityError(f"environment {self.settings.label}: it rewrites its context")
        new = [
            self.say(text_of(each.get("content")), ROLES[each["role"]], each.get("name"))
            for each in messages[self.seen :]
        ]
        self.seen = len(messages)
        return Observation(
            tuple(new), tools=tuple(spec_of(tool["function"]) for tool in request.get("tools") or ())
        )


class Line:
    """The client that a v0 environment calls: `chat.completions.create`."""

    def __init__(self) -> None:
        self.requests: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._waiting: asyncio.Future[Any] | None = None
        self.chat = self.completions = self

    async def create(self, **request: Any) -> Any:
        self._waiting = asyncio.get_running_loop().create_future()
        self.requests.put_nowait(request)
        return await self._waiting

    def answer(self, completion: Any) -> None:
        assert self._waiting is not None
        self._waiting.set_result(completion)


def _arguments(client: Line | None, row: Mapping[str, Any]) -> dict[str, Any]:
    """Those that versions of `run_group` take."""
    return {
        "client": client, "model": "silva", "gen_sem": contextlib.nullcontext(),
        "score_sem": contextlib.nullcontext(), "gen_sampling_args": {}, "sampling_args": {},
        "group_inputs": [dict(row)],
    }  # fmt: skip


def _check(settings: Verifiers, environment: Any) -> None:
    kind = getattr(environment, "message_type", "chat")
    if kind != "chat":
        raise CapabilityError(f"environment {settings.label}: message_type {kind!r}: Silva plays chats")
    run = getattr(environment, "run_group", None)
    parameters = inspect.signature(run).parameters if callable(run) else {}
    needed = {n for n, p in parameters.items() if p.default is p.empty and p.kind is not p.VAR_KEYWORD}
    if "group_inputs" not in parameters or not needed <= set(_arguments(None, {})):
        raise ConfigError(
            f"environment {settings.label}: this version of verifiers is not known: expected run_group() of "
            f"0.1.8, got the parameters {', '.join(parameters) or 'none'}: pip install 'verifiers==0.1.8'"
        )


def _rubrics(environment: Any) -> Iterator[Any]:
    """All of an environment, also those in groups."""
    waiting = [each.rubric for each in (environment, *getattr(environment, "envs", ()))]
    while waiting:
        rubric = waiting.pop()
        waiting += getattr(rubric, "rubrics", ())
        yield rubric


def _remembering(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same reward function; what it raises is kept for the episode."""

    @functools.wraps(function)
    async def call(*arguments: Any, **keys: Any) -> Any:
        try:
            result = function(*arguments, **keys)
            return await result if inspect.isawaitable(result) else result
        except Exception as error:
            if (errors := _raised.get()) is not None:
                errors.append(error)
            raise

    return call


def _completion(message: Message) -> Any:
    openai = imported("openai.types.chat", "verifiers", "openai")
    said = reply_entry(
        replace(message, content=message.content.encode("utf-8", "replace").decode()),
        [call.id or f"call_{number}" for number, call in enumerate(message.tool_calls)],
    )
    finish = "tool_calls" if message.tool_calls else "stop"
    return openai.ChatCompletion.model_validate({
        "id": "silva", "object": "chat.completion", "created": 0, "model": "silva",
        "choices": [{"index": 0, "finish_reason": finish, "message": said, "logprobs": None}],
    })  # fmt: skip


def _draft(settings: Verifiers, index: int, row: Mapping[str, Any]) -> Draft:
    prompt = row.get("prompt")
    if not isinstance(prompt, Sequence) or isinstance(prompt, str) or not prompt:
        raise CapabilityError(f"environment {settings.label}: row {index}: expected a prompt of messages")
    shown = [plain(dict(message)) for message in prompt]
    answer = row.get("answer")
    # One prompt with two answers belongs to one split.
    return Draft({"index": index, "messages": shown}, plain(answer), [shown])
