"""How fast engine and trainer are, and how they slow each other down, by what a probe has seen of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from silva.commands.foretelling.recorded import TimedRequest, TimedStep

LEAST = 0.1  # of its speed that a part keeps whatever the other does


@dataclass(frozen=True)
class Rates:
    """How parts slow each other down.

    Attributes:
        requests: seconds that each takes if no other is in flight and the trainer is not at work.
        updates: seconds of training that each step takes if no request is in flight.
        crowd: each of n requests in flight has 1 / (1 + crowd * n) of its own speed.
        engine: share of its speed that the engine keeps while the trainer is at work.
        trainer: share that the trainer keeps while requests are in flight.
    """

    requests: Mapping[TimedRequest, float]
    updates: Sequence[float]
    crowd: float = 0.0
    engine: float = 1.0
    trainer: float = 1.0


def fitted(steps: Sequence[TimedStep], requests: Sequence[TimedRequest]) -> Rates:
    """Of steps at level 0, in which engine and trainer take turns, and after them of steps at level 1.

    How long a request that failed would have taken is not known: it is in the crowd, and teaches no rate.
    """
    asked = np.array([(each.began, each.ended, each.tokens) for each in requests]).reshape(-1, 3)
    began, ended, tokens = asked.T
    trains, trained, published, rows = np.array(
        [(each.began + each.rollout, each.train, each.publish, each.rows) for each in steps]
    ).T
    busy = trains + trained + published
    times = np.unique(np.concatenate([began, ended, trains, busy]))
    middle = (times[1:] + times[:-1]) / 2

    def open_at(begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """How many are open from one event to the next."""
        return np.searchsorted(np.sort(begins), middle) - np.searchsorted(np.sort(ends), middle)

    def over(values: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Integrals of `values`, which stand between events."""
        sums = np.concatenate([[0.0], np.cumsum(values * np.diff(times))])
        return np.interp(ends, times, sums) - np.interp(begins, times, sums)

    count, training = open_at(began, ended), open_at(trains, busy) > 0
    apart = np.array([each.level == 0 for each in steps])
    answered, early = tokens > 0, began < busy[apart][-1]
    crowd = _crowd(*(each[answered & early] for each in (tokens, ended - began, over(count, began, ended))))
    speed = 1 / (1 + crowd * count)
    free, beside = (over(speed * on, began, ended) for on in (~training, training))
    engine = _kept(*(each[answered] for each in (tokens, free, beside, early)))
    disturbed = over(count > 0, trains, trains + trained)
    alone = trained - disturbed
    trainer = _kept(*(each[1:] for each in (rows, alone, disturbed, apart)))  # the first one compiles
    taken = dict(zip(requests, (free + engine * beside).tolist(), strict=True))
    return Rates(taken, (alone + trainer * disturbed).tolist()[1:], crowd, engine, trainer)


def _crowd(tokens: np.ndarray, seconds: np.ndarray, others: np.ndarray) -> float:
    """Least squares of seconds = tokens * (a + b * requests in flight): b / a."""
    columns = np.stack([tokens, tokens * others / np.maximum(seconds, 1e-9)], 1)
    a, b = np.linalg.lstsq(columns, seconds, rcond=None)[0]
    return 0.0 if b <= 0 else 1e3 if a <= 0 else float(b / a)


def _kept(tokens: np.ndarray, free: np.ndarray, beside: np.ndarray, early: np.ndarray) -> float:
    """The share of its speed that a part keeps in the seconds beside the other, if tokens need what they
    needed early."""
    late = ~early
    needed = tokens[late].sum() * free[early].sum() / max(1, tokens[early].sum())
    missing, disturbed = needed - free[late].sum(), beside[late].sum()
    return float(np.clip(missing / disturbed, LEAST, 1.0)) if disturbed else 1.0
