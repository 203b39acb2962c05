"""One call between processes: a method of a protocol, its arguments and its result, as bytes.

    here                                             there
    encode(Trainer, "save", [path])   ──bytes──>     dispatch(trainer, Trainer, bytes): trainer.save(path)
    decode(Trainer, "save", bytes)    <──bytes──

The type hints of the protocol decide everything: its coroutine methods can be called, and its attributes
come back with every result. So a new method needs no change here. A call is the name of its method, a line
feed and its arguments as a record of codec.py; the answer is another record. `proxy` makes the methods of
the near end.

Not here: how the bytes travel, who may call, and exceptions, which each border writes in a form of its own.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import make_dataclass
from functools import cache
from typing import Any, get_type_hints

import numpy as np

from silva.errors import RecordError
from silva.wire import codec

LONG = 1 << 20  # bytes of a call from which it is read, and answered, on a thread: the event loop stays free


def encode(protocol: type, method: str, arguments: Sequence[Any]) -> bytes:
    """A call; `arguments` in the order of the signature.

    Raises:
        RecordError: names the argument that is not of its type.
    """
    return method.encode() + b"\n" + codec.encode(_records(protocol, method)[0](*arguments))


async def dispatch(part: Any, protocol: type, call: bytes) -> bytes:
    """Make a call on `part`, which implements `protocol`.

    Returns:
        The answer.

    Raises:
        RecordError: the bytes are no call of a method of `protocol`.
        Exception: what the method raises.
    """
    name, _, rest = call.partition(b"\n")
    method, known = name.decode(errors="replace"), methods(protocol)
    if method not in known:
        raise RecordError(f"no method {method[:80]!r}; expected one of {', '.join(known)}")
    taken, given = _records(protocol, method)
    run = asyncio.to_thread if len(call) >= LONG else _at_once
    arguments = vars(await run(codec.decode, taken, rest)).values()
    result = await getattr(part, method)(*arguments)
    _, *attributes = codec.hints(given)
    return await run(codec.encode, given(result, *(getattr(part, each) for each in attributes)))


def decode(protocol: type, method: str, answer: bytes) -> Any:
    """What `dispatch` gave: a record of `result` and of the attributes of `protocol`, as the call left them.

    Raises:
        RecordError: the bytes are no answer to a call of `method`.
    """
    return codec.decode(_records(protocol, method)[1], answer)


def proxy(protocol: type) -> Any:
    """A base class with the methods of `protocol`, each of which is `self._call(method, arguments)`."""
    made = {name: _handing_on(name, signature) for name, signature in methods(protocol).items()}
    return type(protocol.__name__, (), made)


@cache
def methods(protocol: type) -> Mapping[str, inspect.Signature]:
    """What can be called, by name."""
    found = inspect.getmembers(protocol, inspect.iscoroutinefunction)
    return {name: inspect.signature(method) for name, method in found if not name.startswith("_")}


def _handing_on(name: str, signature: inspect.Signature) -> Callable[..., Any]:
    async def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        return await self._call(name, bound.args[1:])

    return method


@cache
def _records(protocol: type, method: str) -> tuple[type, type]:
    """The types of a method's arguments and of its answers."""
    known, name = {"np": np}, f"{protocol.__name__}.{method}"
    hints = get_type_hints(getattr(protocol, method), localns=known)
    answer = {"result": hints.pop("return"), **get_type_hints(protocol, localns=known)}
    return make_dataclass(name, hints.items()), make_dataclass(name, answer.items())


async def _at_once(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)
