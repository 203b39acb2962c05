"""How parquet holds records: a struct for a record, a list for a tuple, a map for named numbers.

Numbers are exact. Plain data (arguments of a tool, its JSON schema) is JSON text. What is not here: which
columns a file has.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import numpy as np
import pyarrow as pa

from silva.routes import of_npy, to_npy
from silva.types import Turn
from silva.wire.codec import Codec, Form, hints, scalar

_SCALARS = {
    str: pa.string(),
    int: pa.int64(),
    float: pa.float64(),
    bool: pa.bool_(),
    np.ndarray: pa.binary(),
}


class Columns(Codec):
    """Records as nested values of pyarrow (`Table.from_pylist`, `to_pylist`); `arrow` gives their types."""

    def turn(self, where: str) -> Form:
        return self.fields_of(Turn)

    def number(self, where: str) -> Form:
        return scalar(float, where)

    def text(self, where: str) -> Form:
        """Half a surrogate pair (a model may write one) cannot be UTF-8: it becomes a question mark."""
        inner = super().text(where)
        return Form(lambda text, aside: utf8(inner.pack(text, aside)), inner.unpack)

    def mapping(self, inner: Any, where: str) -> Form:
        form = super().mapping(inner, where)
        if inner is Any:
            return _as_json(form)
        return Form(
            lambda values, aside: [(utf8(key), each) for key, each in form.pack(values, aside).items()],
            lambda pairs, aside: form.unpack(dict(pairs), aside),
        )

    def plain(self, where: str) -> Form:
        return _as_json(super().plain(where))

    def array(self, where: str) -> Form:
        """The bytes of a .npy file, with type and shape."""
        return Form(lambda value, aside: to_npy(value), lambda data, aside: of_npy(data))


def utf8(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def _as_json(form: Form) -> Form:
    return Form(
        lambda value, aside: json.dumps(form.pack(value, aside), allow_nan=False),
        lambda text, aside: form.unpack(json.loads(text), aside),
    )


def arrow(hint: Any, without: Collection[str] = ()) -> pa.DataType:
    """The type of the column that holds values of a type; records lose the fields `without`."""
    origin, args = get_origin(hint), get_args(hint)
    if hint in _SCALARS:
        return _SCALARS[hint]
    if origin is Literal:
        return pa.string()
    if dataclasses.is_dataclass(hint):
        fields = [(n, arrow(each, without)) for n, each in hints(hint).items() if n not in without]  # type: ignore[arg-type]
        return pa.struct(fields)
    if origin in (Union, UnionType):
        return arrow(next(each for each in args if each is not NoneType), without)
    if origin is tuple:
        return pa.list_(arrow(args[0], without))
    if origin is Mapping and args[1] is not Any:
        return pa.map_(pa.string(), arrow(args[1], without))
    if origin is Mapping or hint is Any:
        return pa.string()
    raise TypeError(f"parquet: no column for {hint}")
