"""How many tokens to compute ahead for each request, so that a step gives more tokens than requests.

    history ──guesses──> chance of each to be drawn ──> those that make the step's tokens a second more
                             │                              │
                   hits of its kind so far          seconds of a step by its rows

The engine computes a request's last token and its draft in one step, draws the token after each place as
it always does, and keeps what it has drawn as long as the draft says the same. So a draft changes how many
tokens a step gives, and never a token: these depend on logits, seed and position (batch.py). DAS
(arXiv:2511.13841) and SRT take drafts from earlier rollouts as well, and keep the distribution.

Where the looking ahead hardly pays, it pauses.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from silva.engines.local.history import ORDERS, Guess, History, Trail
from silva.engines.local.request import EngineRequest, EngineStats, row_of, source_of
from silva.models.row_rules import RowRule

LOOKAHEAD = 8  # tokens of one request in one step, at most
MARGIN = 1.08  # tokens a second with drafts over those without: less is within the error of the times
_LEAST = 0.02  # chance of a draft that is worth a thought
_Offer = tuple[float, int, int, int]
"""-tokens that it gives on average, -tokens of the request so far, its number, length of the draft."""
_WINDOW = 32  # steps after which the account is looked at
_LOSS = 0.01  # share of the time that may be lost in a window
_GAIN = 0.03  # share of the time of steps with drafts that they must save: less is within the account's error
_OVER = 0.5  # of the seconds that looking ahead takes itself: that much more must come back
_LONGEST_PAUSE = 4096  # steps
_PRIOR, _REMEMBERED = 4.0, 512  # guesses of a kind: how much the votes weigh, and how many count
_FORGET, _DOUBT = 0.99, 0.5  # what a step weighs after another one; how many steps a fitted time weighs
_ROWS = 28  # that cost as much as the rest of a step, until more is known
_EVERY = 8  # steps from one fit to the next


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
    """Seconds of a step: those of steps of about so many rows; where few are known, or prompts were computed
    too, base + rows * a + prompt tokens * b + others * d + c if it has drafts.

    `rows` are the tokens that are computed and drawn after: of requests and of drafts. `others` are all
    further draws from what these rows or earlier ones have given (following.py). Kernels compute several rows
    at once, so times rise in stairs: 9 rows may take as long as 16, and longer than 8. `drafting` steps
    attend to several tokens of a request, which takes operations of its own. The longer ago a step was, the
    less it counts. Before much is measured a step without rows is taken to cost as much as 28 rows.
    """

    def __init__(self) -> None:
        self._moments, self._sums = np.zeros((5, 5)), np.zeros(5)
        self._base = self.row = self._prompt = self._drafting = self._other = 0.0
        self._measured: dict[tuple[int, bool], tuple[float, float, int]] = {}  # as of a step
        self._steps = 0

    @property
    def known(self) -> bool:
        return self._steps > 0

    def of(self, rows: int, prompt: float = 0, *, others: int = 0, drafting: bool = False) -> float:
        if prompt:
            return self._fitted(rows, prompt, drafting) + self._other * others
        size = _size_class(rows)
        seconds, weight = self._measured_at(size, drafting)
        mean = (seconds + _DOUBT * self._fitted(size, 0, drafting)) / (weight + _DOUBT)
        return mean + self._other * others

    def learn(
        self, rows: int, prompt: int, seconds: float, *, others: int = 0, drafting: bool = False
    ) -> float:
        """Returns how many of the seconds count: in a much longer step the machine did something else too
        (weights are packed, memory grows)."""
        if self.known:
            seconds = min(seconds, 1.5 * self.of(rows, prompt, others=others, drafting=drafting))
        x = np.array([1.0, rows, prompt, drafting, others])
        self._moments = _FORGET * self._moments + np.outer(x, x)
        self._sums = _FORGET * self._sums + seconds * x
        if self._steps < _EVERY or not self._steps % _EVERY:
            self._fit()
        self._steps += 1
        if not prompt:
            size = _size_class(rows)
            total, weight = self._measured_at(size, drafting)
            own = seconds - self._other * others
            self._measured[size, drafting] = total + own, weight + 1, self._steps
        return seconds

    def _fitted(self, rows: float, prompt: float, drafting: bool) -> float:
        return self._base + self.row * rows + self._prompt * prompt + self._drafting * drafting

    def _measured_at(self, size: int, drafting: bool) -> tuple[float, float]:
        """The seconds of its steps, and how much these weigh together by now."""
        seconds, weight, step = self._measured.get((size, drafting), (0.0, 0.0, 0))
        faded = _FORGET ** (self._steps - step)
        return seconds * faded, weight * faded

    def _fit(self) -> None:
        """By least squares, with a prior that weighs as much as a few steps. No row is for nothing."""
        mean = self._sums[0] / self._moments[0, 0]
        row = mean / (_ROWS + self._moments[0, 1:3].sum() / self._moments[0, 0])
        prior = row * np.array([_ROWS, 1.0, 1.0, 0.0, 0.1])
        weight = np.diag([0.1, 10.0, 10.0, 1.0, 10.0])
        found = np.linalg.solve(self._moments + weight, self._sums + weight @ prior)
        found = np.maximum(found, prior * [0.15, 0.4, 0.0, 0.0, 0.0])
        self._base, self.row, self._prompt, self._drafting, self._other = found.tolist()


def _size_class(rows: int) -> int:
    """The most rows that count as equal to these: from 9 on four of them, from 65 on sixteen."""
    width = 1 if rows <= 8 else 4 if rows <= 64 else 16
    return -(-rows // width) * width


@dataclass
class StepWork:
    """Of one step.

    Attributes:
        requests: whose last tokens it computes, to draw from.
        drafted: tokens that it computes ahead for them.
        prompt: tokens of prompts that it computes.
        draws: tokens drawn, of drafts too.
        accepted: computed ahead and drawn, by those who follow a running request too.
        known: drawn as a reply that has ended said (following.py).
    """

    requests: int
    drafted: int
    prompt: int
    draws: int = 0
    accepted: int = 0
    known: int = 0


@dataclass
class Lookahead:
    """What is known ahead of one request.

    Attributes:
        written: how many of its tokens are in the trail.
        guesses: of this step.
    """

    trail: Trail
    written: int = 0
    guesses: Sequence[Guess] = ()

    def write(self, tokens: Sequence[int]) -> None:
        """Put the request's tokens into the trail, as far as they are not there yet."""
        self.trail.extend(tokens[self.written :])
        self.written = len(tokens)


class Drafts:
    """Plans the draft of each request for a step, and learns from what became of it.

    Args:
        context: of the engine.
        rule: how many rows a step has.
    """

    def __init__(self, context: int, rule: RowRule, stats: EngineStats) -> None:
        self._context, self._rule, self._stats = context, rule, stats
        self._history, self._chances, self._times = History(), Chances(), StepTimes()
        self._spent = 0.0  # seconds that have gone into drafts themselves since the last step ended
        self._pause = 0  # steps to come without drafts
        self._longer_pause = _WINDOW
        self._steps, self._saved, self._expected = 0, 0.0, 0.0  # in this window: seconds

    def begin(self, request: EngineRequest) -> None:
        """The request has got its row; what the cache did not know of its prompt is new."""
        if self._pause:
            return
        with self._at_work():
            known = request.prompt[: request.cached]
            request.lookahead = Lookahead(Trail(self._history, known[-ORDERS[0] :].tolist()))
            request.lookahead.trail.extend(request.prompt[request.cached :].tolist())

    def plan(
        self, requests: Sequence[EngineRequest], followers: Sequence[EngineRequest], prompt: int
    ) -> None:
        """Set the `draft` of those that get a token in a step.

        Args:
            requests: whose last tokens it computes.
            followers: that draw from what others compute or have computed (following.py).
            prompt: tokens of prompts that it computes.
        """
        if self._pause or not requests or not self._times.known:
            return
        with self._at_work():
            # Those a token behind take what it keeps of its draft in the next step.
            following = Counter(source_of(r).index for r in followers)
            drawing = [1 + following[row_of(r).index] for r in requests]
            others = sum(1 + len(r.draft) for r in followers)
            self._choose(requests, self._offers(requests, drawing), drawing, prompt, others)

    def learn(self, sampled: Sequence[EngineRequest], work: StepWork, seconds: float) -> None:
        """What a step of so many seconds has given these requests."""
        self._pause = max(0, self._pause - 1)
        if self._pause:
            return
        with self._at_work():
            for request in sampled:
                self._learn_from(request)
        spent, self._spent = self._spent, 0.0
        saved, known = -spent, 0.0
        if work.requests:
            rows = self._rule.padded(work.requests + work.drafted)
            others = work.draws - work.requests - work.drafted
            counted = self._times.learn(
                rows, work.prompt, seconds - spent, others=others, drafting=work.drafted > 0
            )
            steps = 1 + work.accepted / len(sampled)  # that would have been needed
            plain = self._times.of(self._rule.padded(work.requests), work.prompt / steps, others=others)
            saved += steps * plain - counted
            known = work.known / len(sampled) * plain
        self._stats.seconds_saved += saved + known
        self._keep_account(saved, _OVER * spent + seconds * (_GAIN if work.drafted else -_LOSS))

    def _offers(self, requests: Sequence[EngineRequest], drawing: Sequence[int]) -> list[_Offer]:
        """All drafts that may be drawn, best first; of those as good that of the longest reply.

        Args:
            drawing: how many requests draw from what each computes, now or a step later.
        """
        offers: list[_Offer] = []
        for number, (request, count) in enumerate(zip(requests, drawing, strict=True)):
            room = self._context - row_of(request).length
            left = min(request.params.max_tokens - len(request.tokens), room)
            ahead = self._ahead(request)
            ahead.write(request.tokens)
            ahead.guesses = ahead.trail.guesses(min(LOOKAHEAD, left - 1)) if left > 1 else ()
            chance = 1.0
            for length, guess in enumerate(ahead.guesses, 1):
                chance *= self._chances.of(guess)
                # After a token that ends the reply nothing is drawn.
                if chance < _LEAST or guess.token in request.params.stop_token_ids:
                    break
                offers.append((-chance * count, -len(request.tokens), number, length))
        offers.sort()
        return offers

    def _choose(
        self,
        requests: Sequence[EngineRequest],
        offers: Sequence[_Offer],
        drawing: Sequence[int],
        prompt: int,
        others: int,
    ) -> None:
        """Take as many of the best as give the most tokens a second, none where that is hardly more."""
        tokens, best, taken = float(len(requests) + others), 0.0, 0
        for count, (opposite, _, number, _) in enumerate([(0.0, 0, -1, 0), *offers]):
            if count:
                if -opposite < best * self._times.row / 2:
                    break
                others += drawing[number] - 1
            tokens -= opposite
            rows = self._rule.padded(len(requests) + count)
            rate = tokens / self._times.of(rows, prompt, others=others, drafting=count > 0)
            if rate > best:
                best, taken = rate, count
            if not count:
                best *= MARGIN
        lengths = [0] * len(requests)
        for _, _, number, length in offers[:taken]:
            lengths[number] = max(lengths[number], length)
        for request, length in zip(requests, lengths, strict=True):
            request.draft = [guess.token for guess in self._ahead(request).guesses[:length]]

    def _learn_from(self, request: EngineRequest) -> None:
        """The first guess is checked in any case, a later one where the request has come so far."""
        ahead = self._ahead(request)
        for guess, token in zip(ahead.guesses, request.tokens[ahead.written :], strict=False):
            self._chances.learn(guess, hit := guess.token == token)
            if not hit:
                break
        ahead.write(request.tokens)
        ahead.guesses = ()

    def _ahead(self, request: EngineRequest) -> Lookahead:
        if request.lookahead is None:  # it came in a pause
            request.lookahead = Lookahead(Trail(self._history, request.prompt[-ORDERS[0] :].tolist()))
        return request.lookahead

    def _keep_account(self, saved: float, expected: float) -> None:
        """Pause if a window has saved less than it must, each time for longer; one that pays halves that."""
        self._saved += saved
        self._expected += expected
        self._steps += 1
        if self._steps < _WINDOW:
            return
        if self._saved < self._expected:
            self._pause = self._longer_pause
            self._longer_pause = min(2 * self._longer_pause, _LONGEST_PAUSE)
        else:
            self._longer_pause = max(_WINDOW, self._longer_pause // 2)
        self._steps, self._saved, self._expected = 0, 0.0, 0.0

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._spent += time.perf_counter() - began
