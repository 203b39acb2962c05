"""Random records of every kind for property tests, from the type hints of their fields."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from silva import types
from silva.types import Completion, Sample, SamplingParams, Segment, TokenScores, Trajectory
from silva.wire.codec import hints

RECORDS = [
    kind
    for kind in vars(types).values()
    if dataclasses.is_dataclass(kind) and kind.__module__ == types.__name__
]
TEXT = st.text(st.characters(), max_size=6)  # half surrogate pairs too
INTEGERS = st.integers(-(2**63), 2**63 - 1)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(TEXT | st.sampled_from(["$float", "$tuple", "$dict"]), inner, max_size=2)
    ),
    max_leaves=6,
)


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Of one type."""
    simple = {Any: PLAIN, str: TEXT, int: INTEGERS, float: st.floats(), bool: st.booleans()}
    if hint in simple:
        return simple[hint]
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return st.sampled_from(args)
    if origin in (Union, UnionType):
        return st.none() | values(next(each for each in args if each is not NoneType))
    if origin is tuple and args[-1] is Ellipsis:
        return st.lists(values(args[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values, args))
    if origin is Mapping:
        return st.dictionaries(TEXT, values(args[1]), max_size=3)
    if hint is np.ndarray:
        return arrays(np.float64, st.integers(0, 4), elements=st.floats())
    return st.deferred(lambda: records(hint))


@st.composite
def records(draw: st.DrawFn, kind: Any) -> Any:
    """Of one kind, as its `__post_init__` wants it."""
    fields = {name: draw(values(hint)) for name, hint in hints(kind).items()}
    return kind(**fields | draw(_FITTING.get(kind, st.just({}))))


def _aligned(names: str, hint: Any, n: int) -> st.SearchStrategy[dict[str, Any]]:
    """`n` values in each field."""
    each = st.lists(values(hint), min_size=n, max_size=n).map(tuple)
    return st.fixed_dictionaries(dict.fromkeys(names.split(), each))


@st.composite
def _sampled(draw: st.DrawFn) -> dict[str, Any]:
    n = draw(st.integers(0, 4))
    return draw(_aligned("tokens versions", int, n)) | draw(
        _aligned("logprobs raw_logprobs entropies", float, n)
    )


@st.composite
def _completion(draw: st.DrawFn) -> dict[str, Any]:
    sampled = draw(_sampled())
    routes = arrays(np.uint8, (len(sampled["tokens"]), 1, 2))
    return sampled | {"routes": draw(st.none() | routes)}


@st.composite
def _scores(draw: st.DrawFn) -> dict[str, Any]:
    n = draw(st.integers(0, 4))
    given = draw(_aligned("likeliest", int, n)) | draw(_aligned("logprobs likeliest_logprobs", float, n))
    return given | draw(st.just({"top": ()}) | _aligned("top", tuple[tuple[int, float], ...], n))


@st.composite
def _segment(draw: st.DrawFn) -> dict[str, Any]:
    sampled, reported = draw(_sampled()), draw(st.none() | st.integers(0, 2**40))
    if reported is not None:
        return dict.fromkeys(sampled, ()) | {"reported": reported}
    if draw(st.booleans()):
        return {"source": draw(st.sampled_from(["environment", "expert"])), "logprobs": (), "reported": None}
    return {"source": "policy", "reported": None} | sampled


@st.composite
def _trajectory(draw: st.DrawFn) -> dict[str, Any]:
    turns = draw(values(tuple[types.Turn, ...]))
    fresh = tuple(dataclasses.replace(turn, fresh=turn.fresh or i == 0) for i, turn in enumerate(turns))
    return {"turns": fresh, "error": draw(TEXT) + "!"}


@st.composite
def _sample(draw: st.DrawFn) -> dict[str, Any]:
    n = draw(st.integers(1, 4))

    def array(dtype: Any) -> np.ndarray:
        return draw(arrays(dtype, n))

    fields: dict[str, Any] = {"tokens": array(np.int64), "versions": array(np.int64)}
    fields |= {name: array(np.float64) for name in ("logprobs", "temperatures")}
    for name in ("advantages", "entropies", "old_logprobs", "values", "returns", "routes"):
        fields[name] = draw(st.none() | arrays(np.float32, n))
    weights = [array(np.float32) for _ in range(draw(st.integers(1, 3)))]
    for each in weights:
        each[0] = 0.0
    streams = {draw(TEXT | st.sampled_from(["what", "loss_weights"])): each for each in weights[1:]}
    return fields | {"loss_weights": weights[0], "streams": streams}


_FITTING: dict[Any, st.SearchStrategy[dict[str, Any]]] = {
    SamplingParams: st.fixed_dictionaries(
        {"max_tokens": st.integers(1, 9), "temperature": st.floats(0, math.inf), "top_k": st.integers(0, 9),
         "top_p": st.floats(0, 1, exclude_min=True), "min_p": st.floats(0, 1, exclude_max=True)}
    ),
    Completion: _completion(),
    TokenScores: _scores(),
    Segment: _segment(),
    Trajectory: _trajectory(),
    Sample: _sample(),
}  # fmt: skip


def same(a: Any, b: Any) -> bool:
    """Equal in type and value; NaN equals NaN, and -0.0 differs from 0.0."""
    if type(a) is not type(b):
        return False
    if dataclasses.is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b, equal_nan=True)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    return a == b
