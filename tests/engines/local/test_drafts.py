"""Drafts change how many steps a completion takes, and no bit of it: right or wrong, short or too long."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from silva.config.sections import TinyModel
from silva.engines.local.drafts import LOOKAHEAD, Drafts
from silva.engines.local.engine import LocalEngine
from silva.engines.local.history import Trail
from silva.engines.local.request import EngineRequest, EngineStats, row_of
from silva.models.loading import LoadedModel, load_model
from silva.models.row_rules import ANY
from silva.types import Completion, SamplingParams, Snapshot

Stepped = Callable[..., tuple[LocalEngine, Any]]
Job = tuple[list[int], SamplingParams]
CONTEXT = 300  # two blocks of attention, and an edge that prompts come close to

pytestmark = pytest.mark.same_bits


class AnyDrafts:
    """In place of `Drafts`: what will be drawn, with errors, of any length."""

    def __init__(self, expected: Sequence[tuple[Job, Completion]], seed: int) -> None:
        self._expected = {(tuple(tokens), params): found.tokens for (tokens, params), found in expected}
        self._random = random.Random(seed)

    def begin(self, request: EngineRequest) -> None:
        pass

    def plan(
        self, requests: Sequence[EngineRequest], followers: Sequence[EngineRequest], prompt: int
    ) -> None:
        for request in requests:
            room = min(request.params.max_tokens - len(request.tokens), CONTEXT - row_of(request).length)
            truth = self._expected.get((tuple(request.prompt.tolist()), request.params), ())
            draft = list(truth[len(request.tokens) :])[: self._random.randrange(12)]
            if draft and self._random.random() < 0.5:
                draft[self._random.randrange(len(draft))] = self._random.randrange(256)
            if self._random.random() < 0.2:  # beyond the end, too
                draft += [self._random.randrange(256) for _ in range(5)]
            request.draft = draft[: room - 1]

    def learn(self, *_: Any, **__: Any) -> None:
        pass


@st.composite
def jobs(draw: st.DrawFn) -> list[Job]:
    """Some begin like others; some end at the edge of the context, on a token, or on a text across tokens."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    made: list[Job] = []
    for _ in range(draw(st.integers(1, 9))):
        length = draw(st.sampled_from([1, 5, 30, 62, 250, 257, CONTEXT - 9, CONTEXT - 1]))
        tokens = [rng.randrange(256) for _ in range(length)]
        if made and draw(st.booleans()):
            old = rng.choice(made)[0]
            tokens = (old[: rng.randrange(1, len(old) + 1)] + tokens)[:length]
        elif made and draw(st.booleans()):  # a sibling, which says the same for a while
            tokens = list(rng.choice(made)[0])
        params = SamplingParams(
            max_tokens=draw(st.integers(1, 20)),
            temperature=draw(st.sampled_from([1.0, 0.3, 0.0, 1.7])),
            top_k=draw(st.sampled_from([0, 3])),
            top_p=draw(st.sampled_from([1.0, 0.8])),
            min_p=draw(st.sampled_from([0.0, 0.1])),
            stop_token_ids=frozenset(draw(st.sampled_from([(), tuple(range(0, 256, 9))]))),
            stop=draw(st.sampled_from([(), ("e",), ("ab", "\n")])),
            seed=draw(st.integers(0, 3)),
        )
        made.append((tokens, params))
    return made


def fields(completion: Completion, *, versions: bool = True) -> tuple[Any, ...]:
    c = completion
    bits = [np.array(numbers).tobytes() for numbers in (c.logprobs, c.raw_logprobs, c.entropies)]
    return (c.tokens, *bits, c.versions if versions else (), c.stop_reason)


def alone(stepped: Stepped, loaded: LoadedModel, job: Job) -> Completion:
    engine, stepper = stepped(loaded, drafts="off", max_concurrent=1, cached_sequences=0, context=CONTEXT)

    async def run() -> Completion:
        task = asyncio.ensure_future(engine.sample(*job))
        await stepper.settle()
        while not task.done():
            await stepper.tick()
        return task.result()

    return asyncio.run(run())


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    loaded = load_model(TinyModel(layers=2, width=32, heads=4, kv_heads=2, context=512), seed=0)
    with torch.no_grad():  # as large as training makes them: the last bits of attention show
        for weight in loaded.model.parameters():
            if weight.ndim > 1:
                weight.mul_(8)
    return loaded


@given(jobs=jobs(), data=st.data())
@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@pytest.mark.slow
def test_no_draft_changes_a_bit(model: LoadedModel, stepped: Stepped, jobs: list[Job], data: Any) -> None:
    """Whatever is drafted, cancelled, evicted, and loaded again in between."""
    expected = [alone(stepped, model, job) for job in jobs]
    forest = data.draw(st.booleans())
    engine, stepper = stepped(
        model,
        drafts="forest" if forest else "off",
        context=CONTEXT,
        max_concurrent=data.draw(st.sampled_from([1, 2, 64])),
        cached_sequences=data.draw(st.sampled_from([0, 1, 64])),
        prefill_tokens=data.draw(st.sampled_from([37, 512])),
    )
    if not forest:
        seed = data.draw(st.integers(0, 99))
        engine.batch.drafts = AnyDrafts(list(zip(jobs, expected, strict=True)), seed)
    loads = data.draw(st.booleans())

    async def run() -> list[Completion]:
        tasks = []
        for number, job in enumerate(jobs):
            tasks.append(asyncio.ensure_future(engine.sample(*job)))
            for _ in range(data.draw(st.integers(0, 3))):
                await stepper.settle()
                if stepper.jobs:
                    await stepper.tick()
            if data.draw(st.booleans()):
                noise = asyncio.ensure_future(engine.sample(*job))
                await stepper.settle()
                await stepper.tick()
                noise.cancel()
            if loads and number == 1:
                again = asyncio.ensure_future(engine.load(Snapshot(version=1)))
                await stepper.settle()
                await stepper.tick(len(stepper.jobs))
                await again
        await stepper.settle()
        while stepper.jobs:  # also those that only drop a cancelled request
            await stepper.tick()
        return [task.result() for task in tasks]

    found = asyncio.run(run())
    assert [fields(each, versions=not loads) for each in found] == [
        fields(each, versions=not loads) for each in expected
    ]
    assert not any(row.busy for row in engine.cache.rows)
    assert engine.stats.decode_tokens >= sum(len(each.tokens) - 1 for each in expected)


def test_right_drafts_save_steps(model: LoadedModel, stepped: Stepped) -> None:
    job = ([5, 6, 7], SamplingParams(max_tokens=19, seed=1))
    expected = alone(stepped, model, job)
    engine, stepper = stepped(model, context=CONTEXT)

    class Right(AnyDrafts):
        def plan(
            self, requests: Sequence[EngineRequest], followers: Sequence[EngineRequest], prompt: int
        ) -> None:
            for request in requests:
                request.draft = list(expected.tokens[len(request.tokens) : -1][:8])

    engine.batch.drafts = Right([], 0)

    async def run() -> Completion:
        task = asyncio.ensure_future(engine.sample(*job))
        await stepper.tick(3)  # nine tokens a step: with the prompt, and after it
        return await task

    assert fields(asyncio.run(run())) == fields(expected)
    stats = engine.stats
    assert (stats.steps, stats.drafted_tokens, stats.accepted_tokens, stats.decode_tokens) == (3, 16, 16, 18)


@pytest.mark.slow
def test_a_reply_that_was_given_before_is_drafted(model: LoadedModel, make_engine: Any) -> None:
    """The real thing: the same question with the same seed, in other company, has the same answer at once."""
    asked = [([1, 2, 3, seed], SamplingParams(max_tokens=60, seed=seed)) for seed in range(6)]

    async def play(engine: LocalEngine) -> list[Completion]:
        return await asyncio.gather(*(engine.sample(*job) for job in asked))

    expected = asyncio.run(play(make_engine(model, drafts="off")))
    engine = make_engine(model)
    for _ in range(4):
        assert list(map(fields, asyncio.run(play(engine)))) == list(map(fields, expected))
    stats = engine.stats
    assert stats.accepted_tokens > 0.5 * stats.drafted_tokens > 100
    assert stats.decode_tokens == 4 * 6 * 59


def test_no_draft_is_longer_than_there_is_room_for(model: LoadedModel, stepped: Stepped) -> None:
    """Neither max_tokens nor the context is passed, and the draft leaves a place for the token after it."""
    drafts, text = Drafts(40, ANY, EngineStats()), list(range(100, 160))
    drafts._times.learn(1, 0, 1.0)
    drafts._times.row = 0.001  # cheap
    for _ in range(8):
        Trail(drafts._history).extend(text)
    engine, _ = stepped(model)
    for length, tokens, most in ((10, 30, LOOKAHEAD), (10, 4, 3), (10, 1, 0), (34, 30, 5), (39, 30, 0)):
        request = EngineRequest(np.array(text[:length]), SamplingParams(tokens), None)  # type: ignore[arg-type]
        request.row, request.cached = engine.cache.acquire(None, 0, request.prompt)  # type: ignore[misc]
        drafts.begin(request)
        drafts.plan([request], [], 0)
        assert request.draft == text[length:][:most]
        request.params = SamplingParams(tokens, stop_token_ids=(112,))  # nothing comes after it
        drafts.plan([request], [], 0)
        assert request.draft == text[length:][: min(most, 2) if length == 10 else most]


def test_drafts_can_be_switched_off_and_need_rows_of_equal_bits(model: LoadedModel, make_engine: Any) -> None:
    assert make_engine(model, drafts="off").batch.drafts is None
    assert (make_engine(model).batch.drafts is None) == (not make_engine(model).rules.hold)


def test_a_draft_goes_to_those_that_others_follow(model: LoadedModel, stepped: Stepped) -> None:
    """All texts go on as likely, and only a row that gives several tokens pays."""
    drafts, text = Drafts(100, ANY, EngineStats()), list(range(100, 160))
    times = drafts._times
    times._base, times.row, times._steps = 0.1, 1.0, 1
    for _ in range(8):
        Trail(drafts._history).extend(text)
    engine, _ = stepped(model)
    asked = [EngineRequest(np.array(text[n : n + 10]), SamplingParams(9), None) for n in (0, 15, 30)]  # type: ignore[arg-type]
    for request in asked:
        request.row, request.cached = engine.cache.acquire(None, 0, request.prompt)  # type: ignore[misc]
        drafts.begin(request)
    drafts.plan(asked, [], 0)
    assert not any(request.draft for request in asked)
    one = asked[1]
    others = [
        EngineRequest(one.prompt, one.params, one.future, row=one.row, source=one.row) for _ in range(5)
    ]
    drafts.plan(asked, others, 0)
    assert [bool(request.draft) for request in asked] == [False, True, False]
    assert one.draft == text[25 : 25 + len(one.draft)]
