"""How many tokens to compute ahead for each request, so that a step gives more tokens than requests.

    history ──guesses──> chance of each to be drawn ──> those that make the step's tokens a second more
                             │                              │
                   hits of its kind so far          seconds of a step by its rows

The engine computes a request's last token and its draft in one step, draws the token after each place as
it always does, and keeps what it has drawn as long as the draft says the same. So a draft changes how many
tokens a step gives, and never a token: these depend on logits, seed and position (engine.py). DAS
(arXiv:2511.13841) and SRT take drafts from earlier rollouts as well, and keep the distribution.

Where the looking ahead does not pay, it pauses.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from silva.engines.local.history import ORDERS, Guess, History, Trail
from silva.engines.local.request import EngineStats, Request, row_of

AHEAD = 8  # tokens of one request in one step, at most
_Offer = tuple[float, int, int, int]
"""-chance that all of the draft is drawn, -tokens of the request so far, its number, length of the draft."""
_WINDOW = 64  # steps after which the account is looked at
_LOSS = 0.01  # share of the time that may be lost in a window
_LONGEST_PAUSE = 2048  # steps
_PRIOR, _REMEMBERED = 4.0, 512  # guesses of a kind: how much the votes weigh, and how many count
_FORGET, _EVERY = 0.98, 8  # what a step's time weighs after another step, and steps from one fit to the next


class Chances:
    """Of guesses to be drawn: the share of hits of their kind."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, int, int], list[float]] = {}

    def of(self, guess: Guess) -> float:
        hits, tries = self._seen.get(_kind(guess), (0.0, 0.0))
        return (hits + _PRIOR * guess.votes / (guess.voters + 1)) / (tries + _PRIOR)

    def learn(self, guess: Guess, hit: bool) -> None:
        seen = self._seen.setdefault(_kind(guess), [0.0, 0.0])
        seen[0] += hit
        seen[1] += 1
        if seen[1] >= _REMEMBERED:  # the policy changes, so old hits count less and less
            seen[0] /= 2
            seen[1] /= 2


def _kind(guess: Guess) -> tuple[int, int, int]:
    """The order, the quarter that the share of votes lies in, and the size of the vote: 1, 2, 4, 8 or 16."""
    return guess.order, 4 * guess.votes // guess.voters, guess.voters.bit_length()


class StepTimes:
    """Seconds of a decoding step: base + requests * a + drafted tokens * b, by least squares.

    Steps that are long past count less; before a draft has been measured its token is taken to cost a
    fortieth of a step.
    """

    def __init__(self) -> None:
        self._moments, self._sums = np.zeros((3, 3)), np.zeros(3)
        self._fit = np.zeros(3)
        self._learned = 0

    def of(self, requests: int, drafted: int = 0) -> float:
        base, request, token = self._fit
        return float(base + request * requests + token * drafted)

    @property
    def known(self) -> bool:
        return bool(self._fit[0])

    @property
    def token(self) -> float:
        """Of a drafted token."""
        return float(self._fit[2])

    def learn(self, requests: int, drafted: int, seconds: float) -> None:
        if self.known:  # a step during which the machine did something else
            seconds = min(seconds, 3 * self.of(requests, drafted))
        x = np.array([1.0, requests, drafted])
        self._moments = _FORGET * self._moments + np.outer(x, x)
        self._sums = _FORGET * self._sums + seconds * x
        if self._learned < _EVERY or not self._learned % _EVERY:
            self._solve()
        self._learned += 1

    def _solve(self) -> None:
        """With a prior that weighs as much as a few steps, and no negative numbers."""
        mean = self._sums[0] / self._moments[0, 0]
        prior = np.array([0.7 * mean, 0.0, mean / 40])
        weight = np.diag([0.1, 0.1, 10.0])
        base, request, token = np.linalg.solve(self._moments + weight, self._sums + weight @ prior)
        self._fit = np.array([max(base, mean / 10), max(request, 0.0), max(token, mean / 400)])


@dataclass
class Ahead:
    """What is known ahead of one request.

    Attributes:
        written: how many of its tokens are in the trail.
        guesses: of this step.
    """

    trail: Trail
    written: int = 0
    guesses: Sequence[Guess] = ()


class Drafts:
    """Plans the draft of each request for a step, and learns from what became of it."""

    def __init__(self, context: int, stats: EngineStats) -> None:
        self._context, self._stats = context, stats
        self._history, self._chances, self._times = History(), Chances(), StepTimes()
        self._spent = 0.0  # seconds that have gone into drafts themselves since the last step ended
        self._pause = 0  # steps to come without drafts
        self._longer_pause = _WINDOW
        self._steps, self._saved, self._passed = 0, 0.0, 0.0  # in this window: seconds

    def begin(self, request: Request) -> None:
        """The request has got its row; what the cache did not know of its prompt is new."""
        if self._pause:
            return
        with self._at_work():
            known = request.prompt[: request.cached]
            request.ahead = Ahead(Trail(self._history, known[-ORDERS[0] :].tolist()))
            request.ahead.trail.extend(request.prompt[request.cached :].tolist())

    def plan(self, requests: Sequence[Request]) -> None:
        """Set the `draft` of those that decode in this step."""
        if self._pause or not requests or not self._times.known:
            return
        with self._at_work():
            self._choose(requests, self._offers(requests))

    def learn(
        self, sampled: Sequence[Request], decoded: int, drafted: int, accepted: int, seconds: float
    ) -> None:
        """What a step has given.

        Args:
            sampled: the requests with new tokens.
            decoded: how many of them decoded; 0: the step computed prompts too, and tells nothing of time.
            drafted, accepted: tokens.
            seconds: of the whole step.
        """
        self._pause = max(0, self._pause - 1)
        if self._pause:
            return
        with self._at_work():
            for request in sampled:
                self._learn_from(request)
        spent, self._spent = self._spent, 0.0
        if not decoded:
            return
        self._times.learn(decoded, drafted, seconds - spent)
        saved = self._times.of(decoded) * (1 + accepted / decoded) - seconds
        self._stats.seconds_saved += saved
        self._keep_account(saved, seconds)

    def _offers(self, requests: Sequence[Request]) -> list[_Offer]:
        """All drafts that may pay, the likeliest first; of those as likely the one of the longest reply."""
        least = self._times.token * len(requests) / self._times.of(len(requests))
        offers: list[_Offer] = []
        for number, request in enumerate(requests):
            room = self._context - row_of(request).length
            left = min(request.params.max_tokens - len(request.tokens), room)
            ahead = self._ahead(request)
            ahead.guesses = ahead.trail.guesses(min(AHEAD, left - 1))
            chance = 1.0
            for length, guess in enumerate(ahead.guesses, 1):
                chance *= self._chances.of(guess)
                if chance < least:
                    break
                offers.append((-chance, -len(request.tokens), number, length))
        offers.sort()
        return offers

    def _choose(self, requests: Sequence[Request], offers: Sequence[_Offer]) -> None:
        """Take tokens as long as each raises how many tokens the step is expected to give in a second."""
        tokens, seconds, cost = float(len(requests)), self._times.of(len(requests)), self._times.token
        lengths = [0] * len(requests)
        for opposite, _, number, length in offers:
            if -opposite * seconds < cost * tokens:
                break
            tokens -= opposite
            seconds += cost
            lengths[number] = length
        for request, length in zip(requests, lengths, strict=True):
            request.draft = [guess.token for guess in self._ahead(request).guesses[:length]]

    def _learn_from(self, request: Request) -> None:
        """The first guess is checked in any case, a later one where the request has come so far."""
        ahead = self._ahead(request, catch_up=False)
        new = request.tokens[ahead.written :]
        for guess, token in zip(ahead.guesses, new, strict=False):
            self._chances.learn(guess, hit := guess.token == token)
            if not hit:
                break
        ahead.trail.extend(new)
        ahead.written, ahead.guesses = len(request.tokens), ()

    def _ahead(self, request: Request, *, catch_up: bool = True) -> Ahead:
        if request.ahead is None:  # it came in a pause
            request.ahead = Ahead(Trail(self._history, request.prompt[-ORDERS[0] :].tolist()))
        ahead = request.ahead
        if catch_up and ahead.written < len(request.tokens):
            ahead.trail.extend(request.tokens[ahead.written :])
            ahead.written = len(request.tokens)
        return ahead

    def _keep_account(self, saved: float, seconds: float) -> None:
        """Pause if a window has cost time, each time for longer."""
        self._saved += saved
        self._passed += seconds
        self._steps += 1
        if self._steps < _WINDOW:
            return
        if self._saved < -_LOSS * self._passed:
            self._pause = self._longer_pause
            self._longer_pause = min(2 * self._longer_pause, _LONGEST_PAUSE)
        else:
            self._longer_pause = _WINDOW
        self._steps, self._saved, self._passed = 0, 0.0, 0.0

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._spent += time.perf_counter() - began
