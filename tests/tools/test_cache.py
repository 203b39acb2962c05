"""The cache: one request for equal queries in a loop, in threads, processes: what is kept, and what not."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import sqlite3
import threading

import pytest

from silva.errors import ConfigError
from silva.ports import Clock, use_clock
from silva.tools import cache as module
from silva.tools.cache import Cache, CacheFault, arpo_answers, arpo_query

KEY = ["serper", {"num": 10, "gl": "us"}, "the nile"]


class Maker:
    """Counts its calls; answers when `gate` is set."""

    def __init__(self, answer=None, fault: Exception | None = None, open_: bool = True) -> None:
        self.answer, self.fault, self.calls = answer, fault, 0
        self.gate = asyncio.Event()
        if open_:
            self.gate.set()

    async def __call__(self):
        self.calls += 1
        await self.gate.wait()
        if self.fault:
            raise self.fault
        return self.answer


async def turns(n: int = 200) -> None:
    for _ in range(n):
        await asyncio.sleep(0)


@pytest.fixture(params=["file", "memory"])
def cache(request, tmp_path):
    made = Cache(tmp_path / "c" / "cache.sqlite" if request.param == "file" else "")
    yield made
    made.close()


def test_what_was_made_is_kept(cache) -> None:
    async def run():
        make = Maker({"hits": [("a", 1.5, None)]})
        assert await cache.get(KEY) is None
        first = await cache.get_or_make(KEY, make)
        again = await cache.get_or_make(["serper", {"gl": "us", "num": 10}, "the nile"], make)
        assert first == again == await cache.get(KEY) == {"hits": [["a", 1.5, None]]}
        assert await cache.get_or_make([*KEY, 2], make) and make.calls == 2
        return make.calls

    assert asyncio.run(run()) == 2


def test_it_outlives_its_object(tmp_path) -> None:
    path = tmp_path / "cache.sqlite"
    first = Cache(path)
    asyncio.run(first.get_or_make(KEY, Maker("kept \ud800")))  # a lone surrogate is legal JSON
    first.close()
    second = Cache(path)
    assert asyncio.run(second.get_or_make(KEY, Maker(fault=RuntimeError("not called")))) == "kept \ud800"
    assert b"SQLite format 3" in path.read_bytes()[:20]
    [mode] = sqlite3.connect(path).execute("PRAGMA journal_mode").fetchone()
    assert mode == "wal"
    second.close()


def test_equal_requests_at_once_are_made_once(cache) -> None:
    async def run():
        make = Maker("x", open_=False)
        calls = [asyncio.create_task(cache.get_or_make(KEY, make)) for _ in range(20)]
        await turns()
        make.gate.set()
        return await asyncio.gather(*calls), make.calls

    assert asyncio.run(run()) == (["x"] * 20, 1)


def test_a_failure_reaches_all_who_wait_and_is_not_kept(cache) -> None:
    async def run():
        make = Maker(fault=OSError("down"), open_=False)
        calls = [asyncio.create_task(cache.get_or_make(KEY, make)) for _ in range(3)]
        await turns()
        make.gate.set()
        found = await asyncio.gather(*calls, return_exceptions=True)
        return [str(error) for error in found], make.calls, await cache.get_or_make(KEY, Maker("up"))

    assert asyncio.run(run()) == (["down"] * 3, 1, "up")


def test_who_gives_up_does_not_take_it_from_the_others(cache) -> None:
    async def run():
        make = Maker("x", open_=False)
        first, second = (asyncio.create_task(cache.get_or_make(KEY, make)) for _ in range(2))
        await turns()
        first.cancel()
        await turns()
        make.gate.set()
        assert await second == "x" and first.cancelled()
        return make.calls

    assert asyncio.run(run()) == 1


def test_if_all_give_up_the_request_is_cancelled_and_free_again(cache) -> None:
    async def run():
        make, ended = Maker(open_=False), asyncio.Event()

        async def watched():
            try:
                return await make()
            finally:
                ended.set()

        call = asyncio.create_task(cache.get_or_make(KEY, watched))
        while not make.calls:
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait_for(ended.wait(), 10)
        return await asyncio.wait_for(cache.get_or_make(KEY, Maker("new")), 10)

    assert asyncio.run(run()) == "new"


def test_what_is_no_json_is_an_error_and_frees_the_request(cache) -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        asyncio.run(cache.get_or_make(KEY, Maker(object())))
    assert asyncio.run(cache.get_or_make(KEY, Maker(1))) == 1


def test_threads_share_one_request(cache) -> None:
    calls, found = [], []
    started = threading.Barrier(4)

    async def make():
        calls.append(1)
        await turns()
        return len(calls)

    def work():
        started.wait()
        found.append(asyncio.run(cache.get_or_make(KEY, make)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert (found, calls) == ([1] * 4, [1])


def look_up(path, ready, said) -> None:
    async def make():
        said.put("made")
        await turns()
        return "answer"

    ready.wait()
    said.put(asyncio.run(Cache(path).get_or_make(KEY, make)))


def test_processes_share_one_request_and_one_count(tmp_path) -> None:
    path, context = tmp_path / "cache.sqlite", multiprocessing.get_context("fork")
    ready, said = context.Barrier(3), context.Queue()
    processes = [context.Process(target=look_up, args=(path, ready, said), daemon=True) for _ in range(3)]
    for process in processes:
        process.start()
    assert sorted(said.get(timeout=30) for _ in range(4)) == ["answer"] * 3 + ["made"]
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0, 0, 0]


class Fast(Clock):
    """Each sleep moves the time on at once."""

    def __init__(self) -> None:
        self.now = 1000.0

    def time(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        await asyncio.sleep(0)


def test_the_claim_of_a_dead_process_lapses(tmp_path) -> None:
    path = tmp_path / "cache.sqlite"
    with use_clock(Fast()) as clock:
        dead = Cache(path)
        dead._claim(json.dumps(KEY, sort_keys=True, separators=(",", ":")), "dead")
        assert asyncio.run(Cache(path).get_or_make(KEY, Maker("mine"))) == "mine"
        assert module.LEASE <= clock.now - 1000 <= module.LEASE * 4 / 3 + 1


def test_a_live_claim_does_not_lapse(tmp_path) -> None:
    """The request takes ten leases; another user of the file waits for it all the same."""
    path, slow = tmp_path / "cache.sqlite", Maker("slow", open_=False)

    async def run():
        first = asyncio.create_task(Cache(path).get_or_make(KEY, slow))
        while not slow.calls:
            await asyncio.sleep(0)
        second = asyncio.create_task(Cache(path).get_or_make(KEY, Maker("twice")))
        end = clock.now + 10 * module.LEASE
        while clock.now < end and not second.done():
            await asyncio.sleep(0)
        assert not second.done()
        slow.gate.set()
        return await first, await second

    with use_clock(Together()) as clock:
        assert asyncio.run(run()) == ("slow", "slow")


class Together(Fast):
    """The time moves on to the next moment that somebody waits for, once all wait."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[float] = []

    async def sleep(self, seconds: float) -> None:
        end = self.now + seconds
        self.ends.append(end)
        while self.now < end:
            if end == min(self.ends):
                await asyncio.sleep(0.0005)  # real time, for the threads that read the file
                self.now = max(self.now, end)
            await asyncio.sleep(0)
        self.ends.remove(end)


def test_counts_are_shared_and_end_at_their_limit(tmp_path) -> None:
    one, other = Cache(tmp_path / "c.sqlite"), Cache(tmp_path / "c.sqlite")
    assert [one.spend("serper", 3), other.spend("serper", 3), one.spend("serper", 3)] == [1, 2, 3]
    assert other.spend("serper", 3) is None and other.spend("brave", 3) == 1
    assert other.spend("serper", 4) == 4  # a raised limit goes on from there


@pytest.mark.parametrize("content", [b"not a database, but long enough to be read as one" * 50, b"{}"])
def test_another_file_is_refused(tmp_path, content) -> None:
    path = tmp_path / "cache.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"cache\.json: cannot be used: file is not a database"):
        Cache(path)
    assert path.read_bytes() == content
    with pytest.raises(ConfigError, match="cannot be used"):
        Cache(path / "c.sqlite")  # a folder that cannot be made
    sqlite3.connect(tmp_path / "c.sqlite").execute("PRAGMA user_version = 9")
    with pytest.raises(ConfigError, match="a cache of version 9, expected 1"):
        Cache(tmp_path / "c.sqlite")


def test_a_file_that_breaks_later_is_a_fault_not_an_answer(tmp_path) -> None:
    cache = Cache(tmp_path / "c.sqlite")
    other = sqlite3.connect(tmp_path / "c.sqlite")
    other.execute("DROP TABLE answers")
    other.commit()
    with pytest.raises(CacheFault, match=r"c\.sqlite: no such table: answers"):
        asyncio.run(cache.get_or_make(KEY, Maker("x")))
    assert issubclass(CacheFault, OSError)


ARPO = {
    "capital of France": "Page 1: Paris is the capital.\nIt is old.\nPage 2: France\n",
    "who wrote Hamlet": "Page 1: Shakespeare",
    "nothing": "No search results found.",
    "failed": "",
    "summary": "A text without pages.",
}


def test_arpos_cache_is_read(tmp_path) -> None:
    path = tmp_path / "search_cache.json"
    path.write_text(json.dumps(ARPO, ensure_ascii=False))
    digest, entries = arpo_answers(path)
    assert dict(entries) == {
        "capital of France": ["Paris is the capital.\nIt is old.", "France"],
        "who wrote Hamlet": ["Shakespeare"],
        "nothing": [],
        "summary": ["A text without pages."],
    }
    assert arpo_query('"capital" of France') == "capital of France"
    cache = Cache(tmp_path / "c.sqlite")
    asyncio.run(cache.get_or_make(["arpo", "nothing"], Maker(["kept"])))
    entries = [(["arpo", q], a) for q, a in arpo_answers(path)[1]]
    assert cache.import_answers(digest, entries) == 3
    assert cache.import_answers(digest, entries) == 0
    assert asyncio.run(cache.get(["arpo", "nothing"])) == ["kept"]
    assert asyncio.run(cache.get(["arpo", "who wrote Hamlet"])) == ["Shakespeare"]


@pytest.mark.parametrize("content", ["", "[]", '{"a": 1}', '{"a": ["b"]}'])
def test_what_is_not_arpos_cache_is_named(tmp_path, content) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"a\.json: .*ARPO's cache"):
        arpo_answers(path)
