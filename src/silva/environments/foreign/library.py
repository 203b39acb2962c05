"""What is the same for other libraries: importing them, their random numbers, when an episode is solved."""

from __future__ import annotations

import importlib
import json
import math
import random
import sys
from typing import Any

from silva.errors import ConfigError

ROUNDING = 1e-9  # ten rewards of 0.1 do not add up to exactly 1


def imported(module: str, kind: str, package: str) -> Any:
    """A module of another library.

    Args:
        kind: the environment's `type`, for the message.
        package: what `pip install` needs, such as "gymnasium>=1.0".

    Raises:
        ConfigError: it is not installed, or something that it needs is not.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        top = module.partition(".")[0]
        missing = "" if error.name == top else f" ({error})"
        raise ConfigError(
            f"environment {kind}: cannot import {module}{missing}: pip install '{package}'"
        ) from error


def as_json(value: Any) -> bytes:
    """For a server: half a surrogate pair, which a model can sample, is no text for most of them."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")


def solved(total: float, solved_at: float) -> bool:
    """Whether rewards that add up to `total` count as a solution."""
    return total >= solved_at - ROUNDING


def finite(reward: Any, who: str) -> float:
    """A reward as a number.

    Raises:
        ValueError: it is none, or not finite: then there is no result.
    """
    try:
        number = math.nan if isinstance(reward, str | bytes) else float(reward)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{who}: got the reward {reward!r}, expected a finite number")
    return number


def plain(value: Any) -> Any:
    """What of a library's data JSON can hold, in an order that is always the same; None for other objects."""
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, (set, frozenset)):
        return sorted(json.dumps(plain(each), sort_keys=True) for each in value)
    return plain(value.tolist()) if type(value).__module__ == "numpy" else None


class OwnRandomness:
    """The global random numbers of one episode, for libraries that use those of the process.

        with own:            # `random` and `numpy.random` go on from where this episode left them
            game.step(...)   # and afterwards from where everybody else did

    What runs inside must not wait for anything else.
    """

    def __init__(self, seed: int | str) -> None:
        self.seed(seed)

    def seed(self, seed: int | str) -> None:
        generator = random.Random(seed)
        self._random = generator.getstate()
        self._numpy_seed = generator.getrandbits(32)
        self._numpy: Any = None

    def __enter__(self) -> None:
        numpy = sys.modules.get("numpy.random")
        self._outside = random.getstate(), numpy.get_state() if numpy else None
        random.setstate(self._random)
        if numpy and self._numpy is None:
            numpy.seed(self._numpy_seed)
        elif numpy:
            numpy.set_state(self._numpy)

    def __exit__(self, *error: Any) -> None:
        outside, numpy_outside = self._outside
        del self._outside  # so that nothing of it is copied
        self._random = random.getstate()
        random.setstate(outside)
        if numpy_outside is not None:
            numpy = sys.modules["numpy.random"]
            self._numpy = numpy.get_state()
            numpy.set_state(numpy_outside)
