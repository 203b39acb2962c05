"""Python functions as tools: schema from the type hints, checked arguments, time and output limits.

A function runs in this process, in a thread of its own: a limit on time frees the episode, but cannot
end the thread, and nothing is sandboxed. What a model got wrong is a `ToolError`, whose text goes back
to the model; every other exception is a fault of the tool and fails the episode.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import json
import threading
import typing
from collections.abc import Callable, Mapping
from typing import Any, NotRequired

from pydantic import ConfigDict, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from silva.errors import SilvaError
from silva.types import ToolSpec


class ToolError(SilvaError, ValueError):
    """The model called a tool wrongly; the message is what it reads."""


def tool(
    function: Callable[..., Any], *, name: str = "", timeout: float = 10.0, max_chars: int = 2000
) -> FunctionTool:
    """A tool from a function, sync or async.

    Args:
        function: its name, docstring and type hints become the schema (`Annotated[int, Field(...)]`
            describes an argument). The result is text, or anything JSON can hold.
        name: what the model calls it; the function's own name where empty.
        timeout: seconds one call may take.
        max_chars: characters of the result that are shown; a cut is announced in the text.
    """
    return FunctionTool(function, name=name, timeout=timeout, max_chars=max_chars)


class FunctionTool:
    """A `silva.protocols.Tool` around a function."""

    def __init__(
        self, function: Callable[..., Any], *, name: str = "", timeout: float = 10.0, max_chars: int = 2000
    ) -> None:
        self.function = function
        self.timeout = timeout
        self.max_chars = max_chars
        self._arguments = _arguments_type(function)
        schema = _without_titles(self._arguments.json_schema())
        description = inspect.cleandoc(function.__doc__ or "")
        self.spec = ToolSpec(name or function.__name__, description, schema)

    async def __call__(self, arguments: Mapping[str, object]) -> str:
        """The result as text. Raises ToolError for bad arguments and for a call that took too long."""
        try:
            checked = self._arguments.validate_python(dict(arguments))
        except ValidationError as error:
            raise ToolError(_explain(self.spec.name, error)) from None
        limit = asyncio.timeout(self.timeout)
        try:
            async with limit:
                result = await self._call(checked)
        except TimeoutError:
            if not limit.expired():  # the function's own
                raise
            raise ToolError(f"{self.spec.name} took longer than {self.timeout:g} s") from None
        return cut(_as_text(result), self.max_chars)

    async def _call(self, arguments: Mapping[str, Any]) -> Any:
        if inspect.iscoroutinefunction(self.function):
            return await self.function(**arguments)
        return await _in_thread(self.function, arguments)


def cut(text: str, max_chars: int) -> str:
    """The first `max_chars` characters; where something is missing, a last line says how much."""
    if len(text) <= max_chars:
        return text
    return f"{text[:max_chars]}\n[cut: {max_chars} of {len(text)} characters shown]"


async def _in_thread(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Runs in a daemon thread: unlike an executor's, one that never returns does not hold up the exit."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():  # the limit came first
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def work() -> None:
        result: Any = None
        error: Exception | None = None
        try:
            result = context.run(function, **arguments)
        except Exception as caught:
            error = caught
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, daemon=True, name=f"tool {function.__name__}").start()
    return await future


def _arguments_type(function: Callable[..., Any]) -> TypeAdapter[Any]:
    hints = typing.get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(
                f"tool {function.__name__}: parameter {parameter} has no fixed name; "
                "a tool's arguments are given by name"
            )
        hint = hints.get(parameter.name, str)
        fields[parameter.name] = hint if parameter.default is parameter.empty else NotRequired[hint]
    arguments = TypedDict("Arguments", fields)  # type: ignore
    arguments.__pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore
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


def _as_text(result: Any) -> str:
    if isinstance(result, str):
        return result
    return "" if result is None else json.dumps(result, ensure_ascii=False)
