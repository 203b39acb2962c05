"""What an environment gives is checked before an episode goes on with it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import TypeVar

from silva.types import Failure, Observation, Step, StopReason, plain_number

T = TypeVar("T")


class EpisodeFault(Exception):
    """Ends an episode without a usable result. Raised and caught by episode.py."""

    def __init__(self, message: str, failure: Failure, stop_reason: StopReason = "error", trace: str = ""):
        super().__init__(message)
        self.failure, self.stop_reason, self.trace = failure, stop_reason, trace


def expect(kind: type[T], got: T) -> T:
    if not isinstance(got, kind):
        raise TypeError(f"got {type(got).__name__}, expected {kind.__name__}")
    return got


def check_step(step: Step) -> None:
    expect(Observation, expect(Step, step).observation)
    for field_, what in (("rewards", "reward"), ("shaped", "reward"), ("metrics", "metric")):
        values = getattr(step, field_)
        if not isinstance(values, Mapping):
            example = '{"success": 1.0}' if what == "metric" else '{"score": 1.0}'
            raise TypeError(
                f"{field_} of the Step is {values!r}, expected named numbers, such as {field_}={example}"
            )
        for name, value in values.items():
            number = plain_number(value)
            if not isinstance(number, (float, Real)) or not math.isfinite(number):
                raise EpisodeFault(f"step: {what} {name!r} is {value!r}, expected a finite number", "mask")
