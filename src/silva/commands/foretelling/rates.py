"""What a recording says of the engine, of how engine and trainer disturb each other, and of the work."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from statistics import median

import numpy as np

from silva.commands.foretelling.recorded import TimedRequest, TimedStep, TimedWork
from silva.commands.foretelling.schedule import Ask, Rates, Schedule, StepScript, WorkScript

LEAST = 0.1  # of its speed that a part keeps whatever others do
PLAYED, LEFT_OUT = 20, 4  # steps in virtual time that are counted, and before them at least


@dataclass(frozen=True)
class Recording:
    """Of a probe; `requests` are of these works. `share`: what engine and trainer keep of their speeds while
    both are at work, if no step of level 1 says it."""

    steps: Sequence[TimedStep]
    works: Sequence[TimedWork]
    requests: Sequence[TimedRequest]
    batch: int
    ended: float
    share: float = 1.0

    def at_level(self, level: int) -> list[TimedStep]:
        """The steps of a level; without the very first, which loads and compiles, if there are others."""
        found = [step for step in self.steps if step.level == level]
        return found[1:] if level == 0 and len(found) > 1 else found

    def foretold(self, level: int) -> list[dict[str, float]]:
        """The metrics of steps at a level."""
        rates, alone = self._fitted()
        own = defaultdict[str, list[TimedRequest]](list)
        for request in alone:
            own[request.session.partition("/")[0]].append(request)
        scripts = [_script(work, own[work.id], alone) for work in self.works if not math.isnan(work.ended)]
        first = self.at_level(0)
        refills, a_token = cycle([max(0, step.issued - self.batch) for step in first]), self._a_token()
        stages = [
            StepScript([self.batch, more], a_token * step.row_tokens if step.row_tokens else step.train)
            for step, more in zip(self.steps, refills, strict=False)
        ]
        later = self.at_level(1 if level else 0) or first
        schedule = Schedule(
            scripts, stages, rates, batch=self.batch, level=level,
            publish=median(step.publish for step in later), rest=median(step.rest for step in later),
        )  # fmt: skip
        begins = max(LEFT_OUT, 2 * level)  # all that began together at first is taken by then
        return schedule.play(begins + PLAYED)[begins:]

    def _fitted(self) -> tuple[Rates, dict[TimedRequest, float]]:
        """Rates, and the seconds that each request takes alone. How long one that failed would have taken is
        not known: it is in the crowd, and teaches no rate."""
        apart = [step for step in self.steps if step.level == 0]
        switched = apart[-1].training[1] + apart[-1].rest
        ended = [request for request in self.requests if not math.isnan(request.ended)]
        crowds = _Crowds(self.requests, self.steps, self.ended)
        whole = np.array([not request.failed for request in ended])
        first = [request for request in ended if request.ended <= switched and not request.failed]
        crowd = _crowd(first, crowds)
        alone, beside = (crowds.passed(1 / (1 + crowd * crowds.count) * on, ended)
                         for on in (~crowds.training, crowds.training))  # fmt: skip
        later = np.array([request.began >= switched for request in ended])
        tokens = np.array([request.tokens for request in ended], float)
        columns = np.stack([tokens, np.ones_like(tokens)], 1)
        early, late = whole & ~later, whole & later
        line = np.linalg.lstsq(columns[early], (alone + beside)[early], rcond=None)[0]
        missing, during = (columns @ line - alone)[late].sum(), beside[late].sum()
        engine = _bounded(missing / during) if during else self.share
        rates = Rates(crowd, engine, self._trainer(crowds))
        return rates, dict(zip(ended, (alone + engine * beside).tolist(), strict=True))

    def _a_token(self) -> float:
        """Seconds in which the trainer alone trains one."""
        steps = self.at_level(0)
        return sum(step.train for step in steps) / max(1, sum(step.row_tokens for step in steps))

    def _trainer(self, crowds: _Crowds) -> float:
        """What the trainer keeps of its speed while requests are in flight."""
        after = self.at_level(1)
        trained = [(step.began + step.rollout, step.began + step.rollout + step.train) for step in after]
        whole = sum(end - begin for begin, end in trained)
        begins, ends = np.array(trained).reshape(-1, 2).T
        disturbed = crowds.between((crowds.count > 0).astype(float), begins, ends).sum()
        if not disturbed:
            return self.share
        alone = self._a_token() * sum(step.row_tokens for step in after)
        return _bounded((alone - (whole - disturbed)) / disturbed)


class _Crowds:
    """How many requests are in flight, and whether the trainer is at work, from one event to the next."""

    def __init__(self, asked: Sequence[TimedRequest], steps: Sequence[TimedStep], end: float) -> None:
        began = np.sort([request.began for request in asked])
        ended = np.sort([end if math.isnan(request.ended) else request.ended for request in asked])
        trained = np.array([step.training for step in steps])
        self._times = np.unique(np.concatenate([began, ended, trained.ravel()]))
        middle = (self._times[1:] + self._times[:-1]) / 2

        def open_at(begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
            return np.searchsorted(begins, middle) - np.searchsorted(ends, middle)

        self.count = open_at(began, ended)
        self.training = open_at(trained[:, 0], trained[:, 1]) > 0

    def between(self, values: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """The integral of `values`, which stand between events."""
        sums = np.concatenate([[0.0], np.cumsum(values * np.diff(self._times))])
        return np.interp(ends, self._times, sums) - np.interp(begins, self._times, sums)

    def passed(self, values: np.ndarray, requests: Sequence[TimedRequest]) -> np.ndarray:
        """The integral over the time of each request."""
        begins, ends = np.array([(request.began, request.ended) for request in requests]).T
        return self.between(values, begins, ends)


def _crowd(requests: Sequence[TimedRequest], crowds: _Crowds) -> float:
    """Least squares of seconds = tokens * (a + b * requests in flight): b / a."""
    seconds = np.array([request.ended - request.began for request in requests])
    tokens = np.array([request.tokens for request in requests], float)
    beside = crowds.passed(crowds.count.astype(float), requests) / np.maximum(seconds, 1e-9)
    a, b = np.linalg.lstsq(np.stack([tokens, tokens * beside], 1), seconds, rcond=None)[0]
    return 0.0 if b <= 0 else 1e3 if a <= 0 else float(b / a)


def _bounded(share: float) -> float:
    return float(min(1.0, max(LEAST, share)))


def _script(
    work: TimedWork, requests: Sequence[TimedRequest], alone: Mapping[TimedRequest, float]
) -> WorkScript:
    """A request waits for the one of its session that ended last before it began."""
    asks, sessions = list[Ask](), defaultdict[str, list[tuple[float, int]]](list)
    for number, request in enumerate(requests):
        sessions[request.session].append((request.ended, number))
    for request in requests:
        before = [each for each in sessions[request.session] if each[0] <= request.began]
        ended, number = max(before, default=(work.began, -1))
        asks.append(Ask(number, request.began - ended, alone[request], request.tokens))
    last = max((request.ended for request in requests), default=work.began)
    return WorkScript(asks, max(0.0, work.ended - last))
