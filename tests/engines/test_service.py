"""Pauses, pace, places and costs of requests, by a clock of the test's own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from silva.engines.openai_settings import OpenAIEngineSettings
from silva.engines.service import Service, Transient, Usage
from silva.errors import CostLimit, EngineError, NoReply
from silva.ports import Clock, uniform, use_clock


class FakeClock(Clock):
    def __init__(self) -> None:
        self.now, self.slept = 1000.0, list[float]()

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)


def service(**settings: Any) -> Service:
    return Service(OpenAIEngineSettings(model="m", **settings))


def call(service: Service, answers: list[Any], *, tokens: tuple[int, int] = (100, 50), seed: int = 3) -> Any:
    """Of one request: "yes" or what is raised; each answer is raised, or is its usage."""
    rest = iter(answers)

    async def send() -> tuple[str, Usage | None]:
        answer = next(rest)
        if isinstance(answer, BaseException):
            raise answer
        return "yes", answer

    return asyncio.run(service.call(send, tokens=tokens, seed=seed))


@pytest.fixture
def clock():
    with use_clock(FakeClock()) as fake:
        yield fake


def test_pauses_double_with_a_random_share_up_to_the_longest(clock) -> None:
    busy, one = Transient("busy"), service(retries=4, max_wait=3.0)
    assert call(one, [busy] * 4 + [Usage(10, 5)]) == "yes"
    shares = [0.5 + 0.5 * float(uniform(3, attempt)) for attempt in range(4)]
    assert clock.slept == [1 * shares[0], 2 * shares[1], 3 * shares[2], 3 * shares[3]]
    assert len(set(shares)) == 4
    assert (one.counts.requests, one.counts.retries, one.counts.failed) == (5, 4, 0)


def test_the_service_says_how_long_to_wait(clock) -> None:
    assert call(service(), [Transient("busy", after=17.0), Usage(1, 1)]) == "yes"
    assert clock.slept == [17.0]
    assert call(service(), [Transient("busy", after=0.0), Usage(1, 1)]) == "yes"
    assert 0.5 <= clock.slept[1] <= 1.0  # never at once
    with pytest.raises(NoReply, match=r"busy \(after 1 try\)"):
        call(service(max_wait=60.0), [Transient("busy", after=61.0)])
    assert len(clock.slept) == 2


def test_the_last_try_gives_up(clock) -> None:
    one = service(retries=2)
    with pytest.raises(NoReply, match=r"second \(after 3 tries\)"):
        call(one, [Transient("first"), Transient("first"), Transient("second")])
    assert (one.counts.requests, one.counts.retries, one.counts.failed) == (3, 2, 1)


def test_another_fault_is_not_tried_again(clock) -> None:
    one = service()
    with pytest.raises(EngineError, match="no such model"):
        call(one, [EngineError("no such model")])
    assert (clock.slept, one.counts.requests, one.counts.unknown_cost) == ([], 1, 0.0)


def many(
    service: Service, count: int, send: Callable[[int], Any], tokens: tuple[int, int] = (0, 0)
) -> list[Any]:
    async def go() -> list[Any]:
        calls = (service.call(lambda i=i: send(i), tokens=tokens, seed=i) for i in range(count))
        return await asyncio.gather(*calls, return_exceptions=True)

    return asyncio.run(go())


def test_requests_start_evenly_spaced(clock) -> None:
    starts = []

    async def send(index: int) -> tuple[int, Usage]:
        starts.append(clock.now)
        return index, Usage(1, 1)

    assert many(service(requests_per_minute=30, max_concurrent=1), 4, send) == [0, 1, 2, 3]
    assert starts == [1000.0, 1002.0, 1004.0, 1006.0]


class Overlap:
    """Answers after some turns of the event loop; `most` requests were on their way at once."""

    def __init__(self, usage: Usage) -> None:
        self.usage, self.live, self.most = usage, 0, 0

    async def send(self, index: int) -> tuple[int, Usage]:
        self.live += 1
        self.most = max(self.live, self.most)
        for _ in range(3):
            await asyncio.sleep(0)
        self.live -= 1
        return index, self.usage


def test_no_more_requests_at_once_than_allowed(clock) -> None:
    sent = Overlap(Usage(1, 1))
    assert many(service(max_concurrent=3), 10, sent.send) == list(range(10))
    assert sent.most == 3


def test_costs_are_those_of_the_usage(clock) -> None:
    one = service(input_price=2.0, cached_price=0.5, output_price=8.0)
    call(one, [Usage(1000, 100, 400)])
    # (600 x 2 + 400 x 0.5 + 100 x 8) / 1e6
    assert one.counts.cost == pytest.approx(0.0022)
    assert one.note() == (
        "m: 1 requests (0 retries, 0 without a reply); 1000 tokens of input (400 cached), 100 of output; "
        "cost 0.0022"
    )
    assert "cost" not in service().note()


def test_a_request_that_might_cost_too_much_is_never_sent(clock) -> None:
    """Each may cost 0.3 (100 tokens at 1000, 200 at 1000) and costs 0.2."""
    one = service(input_price=1000.0, output_price=1000.0, max_cost=0.65)
    for spent in (0.2, 0.4):
        assert call(one, [Usage(100, 100)], tokens=(100, 200)) == "yes"
        assert one.counts.cost == pytest.approx(spent)
    with pytest.raises(CostLimit, match=r"max_cost = 0.65 would be exceeded: 0.4 spent .* up to 0.3\."):
        call(one, [], tokens=(100, 200))
    assert one.counts.requests == 2


def test_requests_on_their_way_count_with_the_most_they_can_cost(clock) -> None:
    """Two may cost 0.3 each: the third waits until their 0.1 each are known, and the seventh is refused."""
    one = service(input_price=1000.0, output_price=1000.0, max_cost=0.8)
    sent = Overlap(Usage(50, 50))
    answers = many(one, 7, sent.send, tokens=(100, 200))
    assert answers[:6] == list(range(6)) and isinstance(answers[6], CostLimit)
    assert sent.most == 2 and one.counts.cost == pytest.approx(0.6)


def test_costs_that_no_float_holds_exactly_end_at_the_limit_all_the_same(clock) -> None:
    """0.1 + 0.2 + 0.3 - 0.1 - 0.2 - 0.3 is not 0 in floats."""
    one = service(output_price=1000.0, max_cost=0.65)
    prices = (100, 200, 300, 400)  # tokens

    async def go() -> list[Any]:
        async def send(index: int) -> tuple[int, Usage]:
            for _ in range(3 + index):  # settled in another order than reserved
                await asyncio.sleep(0)
            return index, Usage(0, prices[index])

        calls = (one.call(lambda i=i: send(i), tokens=(0, most), seed=i) for i, most in enumerate(prices))
        return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 30)

    answers = asyncio.run(go())
    assert answers[:3] == [0, 1, 2] and isinstance(answers[3], CostLimit)
    assert one.counts.cost == pytest.approx(0.6)


def test_what_may_have_been_charged_counts_in_full(clock) -> None:
    one = service(input_price=1000.0, output_price=1000.0, max_cost=1.0, retries=1)
    lost = Transient("cut", charged=True)
    assert call(one, [lost, Usage(100, 0)], tokens=(100, 200)) == "yes"
    assert (one.counts.cost, one.counts.unknown_cost) == (pytest.approx(0.1), pytest.approx(0.3))
    assert call(one, [Transient("busy"), None], tokens=(100, 200)) == "yes"  # an answer without usage
    assert (one.counts.unknown_cost, one.counts.uncounted) == (pytest.approx(0.6), 1)
    assert one.note().endswith(
        "cost 0.1, and up to 0.6 for requests whose usage is unknown; "
        "1 answers without usage: their tokens count for no limit"
    )
    with pytest.raises(CostLimit, match=r"0.7 spent so far"):
        call(one, [], tokens=(100, 301))
