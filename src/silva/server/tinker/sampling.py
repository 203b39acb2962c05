"""Requests that sample: each is a row, and as many as the engine has places for are asked at once.

    accepted row ──> a turn of its owner ──> engine, once for each sample ──> result

Owners take turns, so nobody waits for the whole queue of another. After a restart all that is unfinished is
asked again, with the same seeds. Not here: the engine, and where adapters come from (checkpoints.py).
"""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from silva.aio import gather
from silva.errors import SilvaError
from silva.ports import CLOCK, derive
from silva.protocols import ReadLogits
from silva.server.parsing import parse, read
from silva.server.tinker.bodies import SampleBody
from silva.server.tinker.futures import FutureResult, Futures, failure
from silva.server.tinker.messages import Top, sampled_bytes
from silva.server.tinker.places import PromptPlaces
from silva.server.tinker.tables import Tables
from silva.types import Completion, SamplingParams, TokenScores
from silva.wire.guard import HttpError

EMPTY = -99999.0  # as the SDK marks a place without top-k
T = TypeVar("T")


class Sampler(Protocol):
    """One engine that samples from the base model with any of its adapters, which are folders."""

    context: int
    vocabulary: int
    ends: tuple[int, ...]

    async def sample(
        self, tokens: Sequence[int], params: SamplingParams, adapter: Path | None
    ) -> Completion: ...
    async def score(
        self,
        tokens: Sequence[int],
        start: int,
        adapter: Path | None,
        top: int,
        read: ReadLogits | None = None,
    ) -> TokenScores: ...


class OwnerTurns:
    """Lets so many work at once; those who wait come in turns of their owners."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def of(self, owner: str) -> AsyncIterator[None]:
        if self._free:
            self._free -= 1
        else:
            await self._turn(owner)
        try:
            yield
        finally:
            self._pass_on()

    async def _turn(self, owner: str) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it had just got a place
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        while self._waiting:
            owner = next(iter(self._waiting))
            queue = self._waiting.pop(owner)
            turn = queue.popleft()
            if queue and turn.done():  # it was cancelled: the next one of the same owner
                self._waiting = {owner: queue, **self._waiting}
            elif queue:
                self._waiting[owner] = queue  # behind the others
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1


class SampleQueue:
    """Does the requests of all sampling sessions.

    Args:
        places: samples that the engine works on at once.
        folder: of folders of weights.
    """

    def __init__(
        self,
        tables: Tables,
        futures: Futures,
        sampler: Sampler,
        places: int,
        folder: Path,
        log: Callable[[str], None],
    ) -> None:
        self._tables, self._futures, self._sampler = tables, futures, sampler
        self._turns, self._folder, self._log = OwnerTurns(places), folder, log
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def resume(self) -> None:
        """Ask for all that a server before this one has accepted."""
        for row in await self._tables.rows(
            "SELECT id FROM requests WHERE kind = 'sample' AND finished IS NULL ORDER BY line, seq"
        ):
            self.begin(row["id"])

    def begin(self, name: str) -> None:
        """Do an accepted request, once, however often it is told."""
        if name in self._tasks:
            return
        task = asyncio.ensure_future(self._done(name))
        self._tasks[name] = task
        task.add_done_callback(lambda _: self._tasks.pop(name, None))

    async def cancel(self, name: str) -> None:
        """Nobody waits for it any more."""
        task = self._tasks.get(name)
        if task is not None:
            task.cancel()
            await self._finish(name, failure(HttpError(400, f"request {name}: cancelled")))

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _done(self, name: str) -> None:
        while True:
            try:
                return await self._do(name)
            except Exception as error:  # of the database: nothing has been recorded, and it is done again
                self._log(f"tinker: sample: {type(error).__name__}: {error}")
                await CLOCK.sleep(1.0)

    async def _do(self, name: str) -> None:
        row = await self._tables.row(
            "SELECT r.owner, r.body, r.finished, s.folder FROM requests r JOIN samplers s ON s.id = r.line "
            "WHERE r.id = ?",
            name,
        )
        if row is not None and row["finished"] is not None:
            return
        try:
            if row is None:
                raise HttpError(410, "the sampling session is gone")
            folder = None if row["folder"] is None else self._folder / row["folder"]
            asked = read(SampleBody, parse(bytes(row["body"])))
            result = FutureResult(await self._sampled(asked, row["owner"], folder, int(name, 16)))
        except Exception as error:
            if not isinstance(error, SilvaError):
                self._log(f"tinker: sample: {type(error).__name__}: {error}")
            result = failure(error)
        await self._finish(name, result)

    async def _finish(self, name: str, result: FutureResult) -> None:
        """It is never done again."""
        await self._futures.finish(
            {name: result}, lambda db: db.execute("UPDATE requests SET body = NULL WHERE id = ?", (name,))
        )

    async def _sampled(self, asked: SampleBody, owner: str, adapter: Path | None, drawn: int) -> bytes:
        tokens, context = asked.prompt.tokens, self._sampler.context
        if not tokens or len(tokens) >= context:
            raise HttpError(400, f"prompt: got {len(tokens)} tokens, expected 1 to {context - 1}")
        if max(tokens) >= self._sampler.vocabulary:
            raise HttpError(400, f"prompt: got the token {max(tokens)}, expected less than "
                                 f"{self._sampler.vocabulary}")  # fmt: skip
        given = asked.sampling_params
        first = drawn >> 65 if given.seed is None else given.seed
        room, k = context - len(tokens), asked.topk_sample_logprobs
        places = PromptPlaces(asked, tokens, self._sampler.vocabulary, first)

        async def one(number: int) -> tuple[Sequence[int], Sequence[float], bool, Top | None]:
            params = given.params(room, derive(first, "tinker", number), self._sampler.ends)
            found = await self._turn(owner, self._sampler.sample, tokens, params, adapter)
            top = None
            if k:  # keys and values are there, of its last token too if another one follows
                whole = [*tokens, *found.tokens]
                scores = await self._turn(owner, self._sampler.score, whole, len(tokens), adapter, k)
                top = _table(scores.top, 0, k)
            return found.tokens, found.logprobs, found.stop_reason != "length", top

        samples = gather(functools.partial(one, number)() for number in range(asked.num_samples))
        works: list[Any] = [self._prompt(asked, owner, tokens, adapter, places), samples]
        scores, sequences = await gather(works)
        own, top = scores
        return await asyncio.to_thread(lambda: sampled_bytes(sequences, own, top, places.named, places.drawn))

    async def _prompt(
        self,
        asked: SampleBody,
        owner: str,
        tokens: Sequence[int],
        adapter: Path | None,
        places: PromptPlaces,
    ) -> tuple[np.ndarray | None, Top | None]:
        """Log-probabilities of the prompt's tokens and the likeliest ones at each place, if they are asked
        for; the first token has none."""
        k, last = asked.topk_prompt_logprobs, asked.prompt_logprobs_last_n
        own = asked.prompt_logprobs or k > 0
        if own and last is not None and last >= len(tokens):
            raise HttpError(400, f"prompt_logprobs_last_n: got {last}, expected 1 to {len(tokens) - 1}")
        first = len(tokens) - last if own and last is not None else 1
        starts = [*([first] if own else []), *([] if places.start is None else [places.start])]
        if not starts:
            return None, None
        start = min(starts)
        read = None if places.start is None else places.read
        found = await self._turn(owner, self._sampler.score, tokens, start, adapter, k, read)
        logprobs = np.full(len(tokens), np.nan, np.float32)
        logprobs[first:] = found.logprobs[first - start :]
        top = _table(found.top[first - start :], first, k) if k else None
        return (logprobs if asked.prompt_logprobs else None), top

    async def _turn(self, owner: str, ask: Callable[..., Awaitable[T]], *args: Any) -> T:
        async with self._turns.of(owner):
            return await ask(*args)


def _table(top: Sequence[Sequence[tuple[int, float]]], first: int, k: int) -> Top:
    """The likeliest tokens at places, below `first` rows that have none."""
    ids = np.zeros((first + len(top), k), np.int32)
    values = np.full((first + len(top), k), EMPTY, np.float32)
    for place, each in enumerate(top, first):
        ids[place, : len(each)] = [token for token, _ in each]
        values[place, : len(each)] = [value for _, value in each]
    return ids, values
