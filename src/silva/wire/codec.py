"""Records as bytes and back: what crosses to another process, and how files hold records.

    encode(group)        {"record": {"key": "lake/7", "trajectories": [{"turns": [0, 1], ...}, ...], ...},
                          "turns": [{...}, {...}]}, a line feed
    encode(sample)       {"record": {"tokens": 0, "advantages": null, ...}, "turns": []}, a line feed,
                         safetensors
    decode(kind, data)   the same record

One walk over the fields and type hints of the dataclasses serves both directions, so a new field needs no
change here. The first line is strict JSON. Arrays follow it as safetensors, and the line holds their numbers.
Each turn is written once, because the trajectories of a group share turns by reference, and is shared again
when read.

A path is written as absolute, as the reader has a working directory of its own, and a set in order. JSON has
neither NaN nor tuples. A float field holds "NaN", "Infinity" or "-Infinity" instead; plain data
(`Task.data`, the arguments of a tool) holds {"$float": "NaN"} and {"$tuple": [...]}.

Every field is written, and reading expects all of them and no others. Not here: pickle, and versions of the
format (both ends run the same Silva).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from silva.errors import RecordError, shorten
from silva.types import Turn

T = TypeVar("T")


def encode(value: Any, kind: Any = None) -> bytes:
    """`value` as bytes.

    Args:
        kind: the type of `value` if it is no record, such as `tuple[Sample, ...]`.

    Raises:
        RecordError: names the record and the field that holds what its type does not allow.
    """
    kind = kind or type(value)
    aside = Aside()
    try:
        record = _JSON.form(kind, _name(kind)).pack(value, aside)
        line = json.dumps({"record": record, "turns": aside.turns}, allow_nan=False, separators=(",", ":"))
    except RecursionError:
        raise RecordError(f"{_name(kind)}: {_DEEP}") from None
    try:
        arrays = save({str(i): array for i, array in enumerate(aside.arrays)}) if aside.arrays else b""
    except SafetensorError as error:
        raise RecordError(f"{_name(kind)}: {error}") from error
    return line.encode() + b"\n" + arrays


def decode(kind: type[T], data: bytes) -> T:
    """The value of type `kind` that was encoded.

    Raises:
        RecordError: names the record and the field that is missing, unknown or of another type; or what the
            record itself refuses.
    """
    try:
        return _decoded(kind, data)
    except RecursionError:
        raise RecordError(f"{_name(kind)}: {_DEEP}") from None


def _decoded(kind: Any, data: bytes) -> Any:
    line, _, tail = data.partition(b"\n")
    try:
        content = json.loads(line)
        arrays = load(tail) if tail else {}
        aside = Aside(arrays=[arrays[str(i)] for i in range(len(arrays))])
        record, turns = content["record"], list(content["turns"])
    except (ValueError, TypeError, KeyError, SafetensorError) as error:
        raise RecordError(
            f"{_name(kind)}: got {_shown(line[:80])}, expected an encoded record ({error!r})"
        ) from error
    if not all(array.ndim for array in aside.arrays):
        raise RecordError(f"{_name(kind)}: got an array without a dimension, expected one or more")
    read = _JSON.fields_of(Turn).unpack
    aside.turns.extend(read(turn, aside) for turn in turns)
    return _JSON.form(kind, _name(kind)).unpack(record, aside)


@cache
def hints(kind: type) -> dict[str, Any]:
    """The fields of a record and their types, in order."""
    found = get_type_hints(kind, localns={"np": np})
    return {each.name: found[each.name] for each in dataclasses.fields(kind)}


@dataclass
class Aside:
    """What stands beside the structure, which holds its numbers; `known`: those of turns, by identity."""

    turns: list[Any] = field(default_factory=list)
    arrays: list[np.ndarray] = field(default_factory=list)
    known: dict[int, int] = field(default_factory=dict)


class Form(NamedTuple):
    """How the values of one type are written and read."""

    pack: Callable[[Any, Aside], Any]
    unpack: Callable[[Any, Aside], Any]


class Codec:
    """Forms by type. This one gives what JSON can hold; a subclass may write leaves and turns otherwise."""

    def __init__(self) -> None:
        self._records: dict[type, Form] = {}

    def form(self, hint: Any, where: str) -> Form:
        """The form of a type; `where` stands in errors: "Task.data"."""
        origin, args = get_origin(hint), get_args(hint)
        if hint is Any:
            return self.plain(where)
        if hint is np.ndarray:
            return self.array(where)
        if hint is Turn:
            return self.turn(where)
        if hint is float:
            return self.number(where)
        if hint is str:
            return self.text(where)
        if hint is Path:
            return _other(Path, self.text(where), lambda path: str(path.absolute()), where)
        if hint in _SCALARS:
            return scalar(hint, where)
        if hint is NoneType:
            return _literal((None,), where)
        if dataclasses.is_dataclass(hint):
            return self.fields_of(hint)
        if origin is Literal:
            return _literal(args, where)
        if origin in (Union, UnionType):
            (inner,) = (each for each in args if each is not NoneType)
            return _optional(self.form(inner, where))
        if origin is Sequence or (origin is tuple and args[-1] is Ellipsis):
            return _series(args[0], self.form(args[0], where), where)
        if origin is frozenset:
            series = _series(args[0], self.form(args[0], where), where)
            return _other(frozenset, series, lambda values: sorted(values, key=str), where)
        if origin is tuple:
            return _row([self.form(each, where) for each in args], where)
        if origin is Mapping:
            return self.mapping(args[1], where)
        raise TypeError(f"{where}: the codec has no form for {hint}")

    def fields_of(self, kind: Any) -> Form:
        """A record by its fields, and its errors by their names."""
        if kind not in self._records:
            name = kind.__name__
            self._records[kind] = _record(
                kind, {each: self.form(hint, f"{name}.{each}") for each, hint in hints(kind).items()}
            )
        return self._records[kind]

    def turn(self, where: str) -> Form:
        """Written once for each object, and referred to by number."""

        def pack(value: Any, aside: Aside) -> int:
            if id(value) not in aside.known:
                packed = self.fields_of(Turn).pack(value, aside)
                aside.known[id(value)] = len(aside.turns)
                aside.turns.append(packed)
            return aside.known[id(value)]

        return Form(pack, lambda number, aside: _at(aside.turns, number, where))

    def number(self, where: str) -> Form:
        inner = scalar(float, where)

        def pack(value: Any, aside: Aside) -> float | str:
            number = inner.pack(value, aside)
            return number if math.isfinite(number) else _name_of(number)

        def unpack(value: Any, aside: Aside) -> float:
            return _not_finite(value, where) if isinstance(value, str) else inner.unpack(value, aside)

        return Form(pack, unpack)

    def text(self, where: str) -> Form:
        return scalar(str, where)

    def array(self, where: str) -> Form:
        return _array(where)

    def mapping(self, inner: Any, where: str) -> Form:
        form = self.form(inner, where)

        def pack(values: Any, aside: Aside) -> dict[str, Any]:
            _check(isinstance(values, Mapping), where, values, "a mapping")
            return {_key(key, where): form.pack(value, aside) for key, value in values.items()}

        def unpack(values: Any, aside: Aside) -> dict[str, Any]:
            _check(isinstance(values, dict), where, values, "an object")
            return {key: form.unpack(value, aside) for key, value in values.items()}

        return Form(pack, unpack)

    def plain(self, where: str) -> Form:
        """What JSON can hold, and beyond that tuples, NaN and infinities."""
        return Form(lambda value, _: _plain(value, where), lambda value, _: _unplain(value, where))


_JSON = Codec()
_SCALARS: Mapping[Any, tuple[type, ...]] = {
    str: (str,), int: (Integral,), float: (Real,), bool: (bool, np.bool_),
}  # fmt: skip
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_TAGS = ("$float", "$tuple", "$dict")
_DEEP = "its data is nested too deeply"


def _record(kind: Any, forms: Mapping[str, Form]) -> Form:
    def pack(value: Any, aside: Aside) -> dict[str, Any]:
        _check(type(value) is kind, kind.__name__, value, f"a {kind.__name__}")
        return {name: form.pack(getattr(value, name), aside) for name, form in forms.items()}

    def unpack(values: Any, aside: Aside) -> Any:
        _check(isinstance(values, dict), kind.__name__, values, "an object")
        for name in values.keys() - forms.keys():
            raise RecordError(f"{kind.__name__}.{name}: unknown field, expected {', '.join(forms)}")
        for name in forms:
            if name not in values:
                raise RecordError(f"{kind.__name__}.{name}: the field is missing")
        return kind(**{name: form.unpack(values[name], aside) for name, form in forms.items()})

    return Form(pack, unpack)


def scalar(kind: Any, where: str) -> Form:
    """Numbers and truth values of NumPy become plain ones."""

    def convert(value: Any, _: Aside) -> Any:
        if type(value) is not kind:
            _check(isinstance(value, _SCALARS[kind]), where, value, kind.__name__)
            try:
                value = kind(value)
            except OverflowError:
                _check(False, where, value, f"a number that a {kind.__name__} can hold")
        return value

    return Form(convert, convert)


def _literal(allowed: tuple[Any, ...], where: str) -> Form:
    def check(value: Any, _: Aside) -> Any:
        _check(value in allowed, where, value, f"one of {', '.join(map(str, allowed))}")
        return value

    return Form(check, check)


def _optional(form: Form) -> Form:
    return Form(
        lambda value, aside: None if value is None else form.pack(value, aside),
        lambda value, aside: None if value is None else form.unpack(value, aside),
    )


def _series(kind: Any, form: Form, where: str) -> Form:
    """A tuple of any length. Tokens and log-probabilities come in thousands, so numbers have a short way."""

    def ready(values: Any) -> bool:
        return kind in (int, float) and set(map(type, values)) <= {kind}

    def pack(values: Any, aside: Aside) -> list[Any]:
        _check(isinstance(values, tuple | list), where, values, "a tuple")
        if ready(values) and (kind is int or all(map(math.isfinite, values))):
            return list(values)
        return [form.pack(value, aside) for value in values]

    def unpack(values: Any, aside: Aside) -> tuple[Any, ...]:
        _check(isinstance(values, list), where, values, "an array")
        if ready(values):
            return tuple(values)
        return tuple(form.unpack(value, aside) for value in values)

    return Form(pack, unpack)


def _other(kind: type, form: Form, write: Callable[[Any], Any], where: str) -> Form:
    """What JSON lacks, written as `form`; `kind` reads it."""

    def pack(value: Any, aside: Aside) -> Any:
        _check(isinstance(value, kind), where, value, f"a {kind.__name__}")
        return form.pack(write(value), aside)

    return Form(pack, lambda value, aside: kind(form.unpack(value, aside)))


def _row(forms: list[Form], where: str) -> Form:
    """A tuple of fixed length."""

    def check(values: Any) -> Any:
        fits = isinstance(values, tuple | list) and len(values) == len(forms)
        _check(fits, where, values, f"{len(forms)} values")
        return zip(forms, values, strict=True)

    return Form(
        lambda values, aside: [form.pack(value, aside) for form, value in check(values)],
        lambda values, aside: tuple(form.unpack(value, aside) for form, value in check(values)),
    )


def _array(where: str) -> Form:
    def pack(value: Any, aside: Aside) -> int:
        _check(
            isinstance(value, np.ndarray) and value.dtype.kind in "biuf", where, value, "an array of numbers"
        )
        aside.arrays.append(
            np.asarray(value, order="C")
        )  # safetensors writes the memory of others as it lies
        return len(aside.arrays) - 1

    return Form(pack, lambda number, aside: _at(aside.arrays, number, where))


def _plain(value: Any, where: str) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": _name_of(value)}
    if isinstance(value, list):
        return [_plain(each, where) for each in value]
    if isinstance(value, tuple):
        return {"$tuple": [_plain(each, where) for each in value]}
    _check(isinstance(value, Mapping), where, value, "plain JSON")
    packed = {_key(key, where): _plain(each, where) for key, each in value.items()}
    return {"$dict": packed} if len(packed) == 1 and packed.keys() <= {*_TAGS} else packed


def _unplain(value: Any, where: str) -> Any:
    if isinstance(value, list):
        return [_unplain(each, where) for each in value]
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items() if len(value) == 1 else (("", value),)
    if tag == "$float":
        return _not_finite(content, where)
    if tag == "$tuple":
        _check(isinstance(content, list), where, content, "an array")
        return tuple(_unplain(each, where) for each in content)
    if tag == "$dict":
        _check(isinstance(content, dict), where, content, "an object")
        value = content
    return {key: _unplain(each, where) for key, each in value.items()}


def _key(key: Any, where: str) -> str:
    _check(isinstance(key, str), where, key, "a str as key")
    return key


def _at(items: list[Any], number: Any, where: str) -> Any:
    fits = type(number) is int and 0 <= number < len(items)
    _check(fits, where, number, f"a number below {len(items)}")
    return items[number]


def _check(condition: bool, where: str, got: Any, expected: str) -> None:
    if not condition:
        raise RecordError(f"{where}: got {_shown(got)}, expected {expected}")


def _not_finite(name: Any, where: str) -> float:
    _check(name in tuple(_NOT_FINITE), where, name, f"a number or one of {', '.join(_NOT_FINITE)}")
    return _NOT_FINITE[name]


def _name_of(number: float) -> str:
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def _name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind)


def _shown(value: Any) -> str:
    return shorten(repr(value), 80)
