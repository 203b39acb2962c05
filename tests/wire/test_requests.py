"""Pauses, pace, places and costs of requests, by a clock of the test's own; keys."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from email.utils import formatdate
from typing import Any

import pytest
from tests.virtual_clock import NoWait

from silva.errors import ConfigError, CostLimit, EngineError, NoReply, OutOfMemory
from silva.ports import uniform, use_clock
from silva.wire.requests import (
    Limits,
    Prices,
    Requests,
    Transient,
    Usage,
    hidden,
    key_of,
    may_pass,
    retry_after,
)  # fmt: skip


def requests(
    retries: int = 5, max_wait: float = 60.0, concurrent: int = 16, per_minute: int = 0, **prices: float
) -> Requests:
    limits = Limits(retries, max_wait, concurrent=concurrent, per_minute=per_minute)
    return Requests(limits, Prices(**prices))


def used(answer: tuple[Any, Usage | None]) -> Usage | None:
    return answer[1]


def call(sender: Requests, answers: list[Any], *, tokens: tuple[int, int] = (100, 50), seed: int = 3) -> Any:
    """Of one request: "yes" or what is raised; each answer is raised, or is its usage."""
    rest = iter(answers)

    async def send() -> tuple[str, Usage | None]:
        answer = next(rest)
        if isinstance(answer, BaseException):
            raise answer
        return "yes", answer

    return asyncio.run(sender.call(send, most=Usage(*tokens), usage=used, seed=seed))[0]


@pytest.fixture
def clock():
    with use_clock(NoWait()) as fake:
        yield fake


def test_pauses_double_with_a_random_share_up_to_the_longest(clock) -> None:
    busy, one = Transient("busy"), requests(retries=4, max_wait=3.0)
    assert call(one, [busy] * 4 + [Usage(10, 5)]) == "yes"
    shares = [0.5 + 0.5 * float(uniform(3, attempt)) for attempt in range(4)]
    assert clock.slept == [1 * shares[0], 2 * shares[1], 3 * shares[2], 3 * shares[3]]
    assert len(set(shares)) == 4
    assert (one.counts.requests, one.counts.retries, one.counts.failed) == (5, 4, 0)


def test_the_service_says_how_long_to_wait(clock) -> None:
    assert call(requests(), [Transient("busy", after=17.0), Usage(1, 1)]) == "yes"
    assert clock.slept == [17.0]
    assert call(requests(), [Transient("busy", after=0.0), Usage(1, 1)]) == "yes"
    assert 0.5 <= clock.slept[1] <= 1.0  # never at once
    with pytest.raises(NoReply, match=r"busy \(after 1 try\)"):
        call(requests(max_wait=60.0), [Transient("busy", after=61.0)])
    assert len(clock.slept) == 2


def test_the_last_try_gives_up(clock) -> None:
    one = requests(retries=2)
    with pytest.raises(NoReply, match=r"second \(after 3 tries\)"):
        call(one, [Transient("first"), Transient("first"), Transient("second")])
    assert (one.counts.requests, one.counts.retries, one.counts.failed) == (3, 2, 1)


def test_another_fault_is_not_tried_again(clock) -> None:
    one = requests(input=1000.0)
    with pytest.raises(EngineError, match="no such model"):
        call(one, [EngineError("no such model")])
    assert (clock.slept, one.counts.requests, one.counts.unknown_cost) == ([], 1, 0.0)


def many(
    sender: Requests, count: int, send: Callable[[int], Any], tokens: tuple[int, int] = (0, 0)
) -> list[Any]:
    async def one(index: int) -> Any:
        most = Usage(*tokens)
        return (await sender.call(lambda: send(index), most=most, usage=used, seed=index))[0]

    async def go() -> list[Any]:
        return await asyncio.gather(*map(one, range(count)), return_exceptions=True)

    return asyncio.run(asyncio.wait_for(go(), 30))


def test_requests_start_evenly_spaced(clock) -> None:
    starts = []

    async def send(index: int) -> tuple[int, Usage]:
        starts.append(clock.now)
        return index, Usage(1, 1)

    assert many(requests(per_minute=30, concurrent=1), 4, send) == [0, 1, 2, 3]
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
    assert many(requests(concurrent=3), 10, sent.send) == list(range(10))
    assert sent.most == 3


def test_costs_are_those_of_the_usage(clock) -> None:
    one = requests(input=2.0, cached=0.5, output=8.0)
    call(one, [Usage(1000, 100, 400)])
    # (600 x 2 + 400 x 0.5 + 100 x 8) / 1e6
    assert one.counts.cost == pytest.approx(0.0022)
    assert Prices(input=2.0).of(Usage(1000, 0, 400)) == pytest.approx(0.002)  # cached as other input
    assert one.note() == (
        "1 requests (0 retries, 0 without a reply); 1000 tokens of input (400 cached), 100 of output; "
        "cost 0.0022"
    )
    assert "cost" not in requests().note()


def test_a_request_that_might_cost_too_much_is_never_sent(clock) -> None:
    """Each may cost 0.3 (100 tokens at 1000, 200 at 1000) and costs 0.2."""
    one = requests(input=1000.0, output=1000.0, most=0.65)
    for spent in (0.2, 0.4):
        assert call(one, [Usage(100, 100)], tokens=(100, 200)) == "yes"
        assert one.counts.cost == pytest.approx(spent)
    with pytest.raises(CostLimit, match=r"max_cost = 0.65 would be exceeded: 0.4 spent .* up to 0.3\."):
        call(one, [], tokens=(100, 200))
    assert one.counts.requests == 2


def test_a_charge_that_might_cost_too_much_is_refused_and_not_counted() -> None:
    one = requests(input=1000.0, trained=4000.0, most=1.0)
    one.charge(Usage(100, 0, trained=200))
    assert (one.counts.cost, one.counts.trained) == (pytest.approx(0.9), 200)
    with pytest.raises(CostLimit, match=r"max_cost = 1 would be exceeded: 0.9 spent .* up to 0.2\."):
        one.charge(Usage(0, 0, trained=50))
    one.charge(Usage(100, 0))
    assert one.counts.cost == pytest.approx(1.0)


def test_requests_on_their_way_count_with_the_most_they_can_cost(clock) -> None:
    """Two may cost 0.3 each: the third waits until their 0.1 each are known, and the seventh is refused."""
    one = requests(input=1000.0, output=1000.0, most=0.8)
    sent = Overlap(Usage(50, 50))
    answers = many(one, 7, sent.send, tokens=(100, 200))
    assert answers[:6] == list(range(6)) and isinstance(answers[6], CostLimit)
    assert sent.most == 2 and one.counts.cost == pytest.approx(0.6)


def test_costs_that_no_float_holds_exactly_end_at_the_limit_all_the_same(clock) -> None:
    """Settled in another order than reserved: 0.1 + 0.2 + 0.3 - 0.1 - 0.2 - 0.3 is not 0 in floats."""
    one = requests(output=1000.0, most=0.65)

    async def price(tokens: int) -> Any:
        async def send() -> tuple[int, Usage]:
            for _ in range(3 + tokens // 100):
                await asyncio.sleep(0)
            return tokens, Usage(0, tokens)

        return (await one.call(send, most=Usage(0, tokens), usage=used, seed=tokens))[0]

    async def go() -> list[Any]:
        return await asyncio.gather(*map(price, (100, 200, 300, 400)), return_exceptions=True)

    answers = asyncio.run(asyncio.wait_for(go(), 30))
    assert answers[:3] == [100, 200, 300] and isinstance(answers[3], CostLimit)
    assert one.counts.cost == pytest.approx(0.6)


def test_what_may_have_been_charged_counts_in_full(clock) -> None:
    one = requests(input=1000.0, output=1000.0, most=1.0, retries=1)
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


async def test_a_request_that_is_cancelled_on_its_way_may_have_been_charged(clock) -> None:
    one = requests(input=1000.0, output=1000.0, most=1.0)
    sent = asyncio.Event()

    async def send() -> Any:
        sent.set()
        await asyncio.Event().wait()

    asked = asyncio.ensure_future(one.call(send, most=Usage(100, 200), seed=0))
    await sent.wait()
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    assert (one.counts.unknown_cost, one._held) == (pytest.approx(0.3), 0.0)


def test_a_service_that_has_enough_to_do_costs_no_try(clock) -> None:
    full = Transient("full", busy=True)
    with pytest.raises(NoReply, match=r"cut \(after 2 tries\)"):
        call(requests(retries=1), [*[full] * 1100, Transient("cut"), *[full] * 2, Transient("cut")])
    # A fault that counts begins again. No float holds 2 to the power of 1024.
    longest = [min(2.0 ** min(n, 9), 60.0) for n in (*range(1100), 0, 1, 2)]
    assert len(clock.slept) == 1103
    assert all(most / 2 <= pause <= most for pause, most in zip(clock.slept, longest, strict=True))


def test_places_and_pace_are_new_in_another_event_loop(clock) -> None:
    one, sent = requests(concurrent=1, per_minute=30), Overlap(Usage(1, 1))
    for _ in range(2):
        assert many(one, 2, sent.send) == [0, 1]
    assert sent.most == 1 and clock.slept == [2.0, 2.0]


def test_its_user_says_what_is_raised(clock) -> None:
    one = Requests(Limits(0, 60.0), failed=lambda words, fault: OutOfMemory(f"{words}, {fault.charged}"))
    with pytest.raises(OutOfMemory, match=r"^cut \(after 1 try\), True$"):
        call(one, [Transient("cut", charged=True)])


# --- what a service says


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "7"}, 7.0),
        ({"retry-after-ms": "2500", "retry-after": "7"}, 2.5),
        ({"retry-after": formatdate(1040, usegmt=True)}, 40.0),
        ({"retry-after": formatdate(960, usegmt=True)}, 0.0),
        ({"retry-after": "-3"}, 0.0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": ""}, None),
        ({}, None),
    ],
    ids=str,
)
def test_retry_after_is_a_number_or_a_date(clock, headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after(headers) == seconds


def test_which_status_may_pass() -> None:
    assert [status for status in range(200, 502) if may_pass(status)] == [408, 409, 425, 429, 500, 501]


def test_what_a_service_says_is_shown_without_the_key_on_one_line() -> None:
    assert hidden("bad\n  key sk-1 (sk-1)", "sk-1") == "bad key *** (***)"
    assert hidden("x" * 301, "") == "x" * 300 + "..."


def test_a_key_is_read_from_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "k3y")
    assert key_of("SOME_KEY", "engine.key_variable") == key_of("SOME_KEY") == "k3y"
    assert key_of("", "engine.key_variable") == key_of("") == ""
    monkeypatch.setenv("SOME_KEY", "")
    assert key_of("SOME_KEY") == ""
    with pytest.raises(ConfigError) as caught:
        key_of("SOME_KEY", "engine.key_variable")
    assert str(caught.value) == (
        "engine.key_variable: SOME_KEY is not set; set it in the environment or in .env, or set "
        'engine.key_variable = "" if no key is needed'
    )
