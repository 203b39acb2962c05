"""Python functions as tools: schema from the type hints, checked arguments, a thread for each call.

Nothing is sandboxed, and nothing ends a thread: a function whose calls are given up (`Calls`) again and again
and do not return is refused at last. A call raises two kinds of exceptions:

    ToolError                       the text goes back to the model. So do bad arguments and most exceptions
                                    of the function (`ToolException`, logged once)
    one of FAULTS, or caused by it  the service or the tool is broken: the episode has no result
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import json
import logging
import math
import threading
import typing
from collections.abc import Callable, Mapping
from typing import Any, NotRequired

from pydantic import ConfigDict, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from silva.errors import ConfigError, SilvaError, contained
from silva.types import ToolSpec

FAULTS = (OSError, MemoryError, ImportError, NameError, NotImplementedError, SilvaError)
"""Exceptions that are not shown to the model as an answer. OSError covers connections and time-outs."""
MAX_GIVEN_UP = 64  # threads of one function


class ToolError(SilvaError, ValueError):
    """The model called a tool wrongly; the message is what it reads."""


class ToolException(ToolError):
    """The function raised on arguments that fit its schema, for example `KeyError: 'x'`."""


class ToolDefinitionError(ConfigError, TypeError):
    """A function lacks something that a tool needs."""


class ToolStuck(SilvaError, RuntimeError):
    """Too many calls of a function do not return."""


class FunctionTool:
    """A `silva.protocols.Tool` from a function, sync or async.

    Args:
        function: its name, docstring and type hints become the schema (`Annotated[int, Field(...)]`
            describes an argument). All three are required. The result is text, or anything JSON can hold.
        name: what the model calls it; the function's own name where empty.
        timeout: seconds one call may take; None: what the environment allows.
        max_chars: characters of the result that are shown; None: what the environment allows.

    Raises:
        ToolDefinitionError: something is missing; the message names it and the function.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str = "",
        timeout: float | None = None,
        max_chars: int | None = None,
    ) -> None:
        self.function = function
        self.timeout = timeout
        self.max_chars = max_chars
        name = name or getattr(function, "__name__", "")
        if not name:
            raise ToolDefinitionError(f"tool {function!r}: it has no __name__; give tool(..., name=...)")
        description = inspect.cleandoc(function.__doc__ or "")
        if not description:
            raise ToolDefinitionError(
                f"tool {name}: it has no docstring; expected one that tells the model what the tool does"
            )
        self._arguments = _arguments_type(function, name)
        schema = _without_titles(self._arguments.json_schema())
        self.spec = ToolSpec(name, description, schema)
        self._logged: set[type[Exception]] = set()
        self._given_up: list[threading.Thread] = []

    async def __call__(self, arguments: Mapping[str, object]) -> str:
        """The result as text.

        Raises:
            ToolError: for bad arguments, and as the function raises it.
            ToolException: the function raised something that is none of FAULTS.
            ToolStuck: MAX_GIVEN_UP calls were given up and still run.
        """
        for argument, value in arguments.items():
            if not _is_finite(value):
                raise ToolError(f"{self.spec.name}: argument {argument}: expected finite numbers")
        try:
            checked = self._arguments.validate_python(dict(arguments))
        except ValidationError as error:
            raise ToolError(_explain(self.spec.name, error)) from None
        try:
            with contained():
                result = await called(self.function, checked, f"tool {self.spec.name}", self._given_up)
        except Exception as error:
            if _is_fault(error):
                raise
            self._log(error, arguments)
            raise ToolException(f"{type(error).__name__}: {error}") from error
        return self._as_text(result)

    def _log(self, error: Exception, arguments: Mapping[str, object]) -> None:
        """Logs the first exception of each type only, because a wrong tool would fill the terminal."""
        if type(error) in self._logged:
            return
        self._logged.add(type(error))
        logging.getLogger(__name__).warning(
            "tool %s raised on %s. The model reads the error as an answer. Raise ToolError with a text for "
            "the model, or OSError if the tool itself failed. The next %s is only counted (tool_exceptions).",
            self.spec.name, cut(repr(dict(arguments)), 200), type(error).__name__, exc_info=error,
        )  # fmt: skip

    def _as_text(self, result: Any) -> str:
        if isinstance(result, str):
            return result
        try:
            return "" if result is None else json.dumps(result, ensure_ascii=False)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"tool {self.spec.name} returned {type(result).__name__}: expected text or what JSON can "
                f"hold ({error})"
            ) from error


tool = FunctionTool


def cut(text: str, max_chars: int) -> str:
    """The first `max_chars` characters; where something is missing, a last line says how much."""
    if len(text) <= max_chars:
        return text
    return f"{text[:max_chars]}\n[cut: {max_chars} of {len(text)} characters shown]"


async def called(
    function: Callable[..., Any], arguments: Mapping[str, Any], name: str, given_up: list[threading.Thread]
) -> Any:
    """What a function returns. One that is not async runs in a daemon thread: unlike an executor's, one that
    never returns does not hold up the exit. If the caller is cancelled, the thread goes on, in `given_up`.

    Raises:
        ToolStuck: MAX_GIVEN_UP threads of it go on.
    """
    if inspect.iscoroutinefunction(function):
        return await function(**arguments)
    given_up[:] = [thread for thread in given_up if thread.is_alive()]
    if len(given_up) >= MAX_GIVEN_UP:
        raise ToolStuck(
            f"{name}: {MAX_GIVEN_UP} calls were given up and still run: it must return, or run where it can "
            "be ended (`workers` of the environment)"
        )
    loop = asyncio.get_running_loop()
    future: asyncio.Future[tuple[Any, Exception | None]] = loop.create_future()
    context = contextvars.copy_context()

    def settle(result: Any, error: Exception | None) -> None:
        if not future.done():  # otherwise the time limit came first
            future.set_result((result, error))  # as a result: a future takes no StopIteration

    def work() -> None:
        result: Any = None
        error: Exception | None = None
        try:
            with contained():  # exit() in a tool must not silently end this thread
                result = context.run(function, **arguments)
        except Exception as caught:
            error = caught
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    thread = threading.Thread(target=work, daemon=True, name=name)
    thread.start()
    try:
        result, error = await future
    except asyncio.CancelledError:
        given_up.append(thread)
        raise
    if error is not None:
        raise error
    return result


def _is_fault(error: BaseException | None) -> bool:
    """Whether it is one of FAULTS or was raised from one: HTTP clients wrap an OSError in their own."""
    while error is not None and not isinstance(error, FAULTS):
        error = error.__cause__
    return error is not None


def _is_finite(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _arguments_type(function: Callable[..., Any], name: str) -> TypeAdapter[Any]:
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ToolDefinitionError(f"tool {name}: its type hints cannot be read: {error}") from error
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ToolDefinitionError(
                f"tool {name}: parameter {parameter} has no fixed name, but arguments are given by name"
            )
        if parameter.name not in hints:
            raise ToolDefinitionError(
                f"tool {name}: parameter {parameter.name} has no type hint; expected one, such as "
                f"{parameter.name}: str, for the schema that the model reads"
            )
        hint = hints[parameter.name]
        fields[parameter.name] = hint if parameter.default is parameter.empty else NotRequired[hint]
    arguments = TypedDict("Arguments", fields)  # type: ignore
    arguments.__pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)  # type: ignore
    return TypeAdapter(arguments)


def _without_titles(schema: Any) -> Any:
    """Titles repeat the names: they cost tokens in every prompt. A property may be called "title"."""
    if isinstance(schema, list):
        return [_without_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {k: _without_titles(v) for k, v in schema.items() if not (k == "title" and isinstance(v, str))}


def _explain(name: str, error: ValidationError) -> str:
    problems = []
    for fault in error.errors(include_url=False):
        where = ".".join(str(part) for part in fault["loc"])
        got = (
            "" if fault["type"] == "missing" else f" (got {cut(json.dumps(fault['input'], default=str), 80)})"
        )
        problems.append(f"argument {where}: {fault['msg']}{got}")
    return f"{name}: " + "; ".join(problems)
