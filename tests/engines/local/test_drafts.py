"""Drafts change how many steps a completion takes, and no bit of it: right or wrong, short or too long."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from silva.config.sections import TinyModel
from silva.engines.local.drafts import AHEAD, MARGIN, Ahead, Chances, Drafts, StepTimes, Work
from silva.engines.local.engine import LocalEngine
from silva.engines.local.history import Guess, Trail
from silva.engines.local.request import EngineStats, Request, row_of
from silva.engines.local.same_bits import ANY
from silva.models.loading import LoadedModel, load_model
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

    def begin(self, request: Request) -> None:
        pass

    def plan(self, requests: Sequence[Request], followers: Sequence[Request], prompt: int) -> None:
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
        def plan(self, requests: Sequence[Request], followers: Sequence[Request], prompt: int) -> None:
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
    for length, tokens, most in ((10, 30, AHEAD), (10, 4, 3), (10, 1, 0), (34, 30, 5), (39, 30, 0)):
        request = Request(np.array(text[:length]), SamplingParams(tokens), None)  # type: ignore[arg-type]
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


# --- how many


def test_times_of_steps_are_fitted() -> None:
    """Against the numbers they were made of; a step that took long for another reason hardly counts."""
    times, rng = StepTimes(), np.random.default_rng(0)
    for _ in range(600):
        rows, prompt = int(rng.integers(1, 65)), int(rng.integers(0, 2) * rng.integers(0, 300))
        times.learn(rows, prompt, 0.040 + 0.002 * rows + 0.0005 * prompt + rng.normal(0, 1e-4))
    assert times.of(8) == pytest.approx(0.056, rel=0.02)
    assert times.of(28) == pytest.approx(0.040 + 0.002 * 26.5, rel=0.02)  # on a stair from 25 to 28
    assert times.of(8, 100) == pytest.approx(0.106, rel=0.02)
    assert times.row == pytest.approx(0.002, rel=0.05)
    times.learn(8, 0, 60.0)
    assert times.of(8) < 0.1


def test_times_rise_in_stairs() -> None:
    """As matrix products do, whose kernels take eight rows at once, say."""
    times, rng = StepTimes(), np.random.default_rng(0)
    for _ in range(600):
        rows = int(rng.integers(1, 33))
        times.learn(rows, 0, 0.060 + 0.016 * (-(-rows // 8) - 1) + rng.normal(0, 1e-3))
    found = [times.of(rows) for rows in (8, 9, 16, 17, 24, 32)]
    assert found == pytest.approx([0.060, 0.076, 0.076, 0.092, 0.092, 0.108], rel=0.04)


def test_rows_are_cheap_where_steps_are_long() -> None:
    """Of 80 rows and 150 tokens of prompts, a row takes less than a two-hundredth of a step."""
    times, rng = StepTimes(), np.random.default_rng(0)
    for _ in range(600):
        rows, prompt = int(rng.integers(60, 100)), int(rng.integers(100, 200))
        seconds = 0.03 + 0.0013 * (rows + prompt) + rng.normal(0, 1e-4)
        times.learn(rows, prompt, seconds, drafting=True)
    assert times.row == pytest.approx(0.0013, rel=0.05)
    assert times.of(32, drafting=True) == pytest.approx(0.03 + 0.0013 * 32, rel=0.1)


def test_a_step_with_drafts_has_a_price_of_its_own() -> None:
    times, rng = StepTimes(), np.random.default_rng(0)
    for step in range(600):
        rows, prompt = int(rng.integers(1, 65)), 30 * (step % 2)
        drafting = bool(rng.integers(2))
        times.learn(rows, prompt, 0.04 + 0.001 * (rows + prompt) + 0.02 * drafting, drafting=drafting)
    for prompt in (0, 30):
        more = times.of(16, prompt, drafting=True) - times.of(16, prompt)
        assert more == pytest.approx(0.02, rel=0.15)


def test_before_much_is_measured_28_rows_cost_as_much_as_the_rest_of_a_step() -> None:
    times = StepTimes()
    times.learn(8, 0, 0.080)
    assert times.of(8) == pytest.approx(0.080, rel=0.1)
    assert times.of(20) - times.of(12) == pytest.approx(8 * 0.080 / 36)


def test_chances_are_shares_of_hits() -> None:
    chances, sure, unsure = Chances(), Guess(1, 0, 8, 8), Guess(1, 3, 1, 1)
    assert chances.of(sure) == pytest.approx(8 / 9) and chances.of(unsure) == pytest.approx(1 / 2)
    for number in range(300):
        chances.learn(sure, number % 10 != 0)
        chances.learn(unsure, number % 10 == 0)
    assert chances.of(sure) == pytest.approx(0.9, abs=0.01)
    assert chances.of(unsure) == pytest.approx(0.1, abs=0.01)
    for _ in range(1000):  # the policy has changed
        chances.learn(sure, False)
    assert chances.of(sure) < 0.15


@given(
    chances=st.lists(st.lists(st.floats(0, 1), max_size=4), min_size=1, max_size=4),
    row=st.floats(0.001, 1),
    stair=st.floats(0, 1),
    own=st.floats(0, 1),
)
def test_the_drafts_chosen_give_the_most_tokens_a_second(
    chances: list[list[float]], row: float, stair: float, own: float
) -> None:
    """Against all combinations of lengths, where a fifth row costs a stair as well, and a first draft."""
    drafts = Drafts(100, ANY, EngineStats())
    times = drafts._times
    times._base, times.row, times._steps = 1.0, row, 1
    times._stairs = {
        (rows, drafting): ((1 + row * rows + stair * (rows > 4) + own * drafting) * 1e9, 1e9, 1)
        for rows in range(1, 65)
        for drafting in (False, True)
    }
    requests, offers, gains = [], [], []
    for number, each in enumerate(chances):
        likely = np.cumprod(each)
        request = Request(np.array([1]), SamplingParams(50), None)  # type: ignore[arg-type]
        request.ahead = Ahead(Trail(drafts._history), guesses=[Guess(9, 0, 1, 1)] * len(each))
        requests.append(request)
        offers += [(-float(chance), 0, number, length) for length, chance in enumerate(likely, 1)]
        gains.append(np.append(0.0, np.cumsum(likely)))

    def rate(lengths: Sequence[int]) -> float:
        tokens = len(requests) + sum(gain[length] for gain, length in zip(gains, lengths, strict=True))
        rows = len(requests) + sum(lengths)
        rows = rows if rows <= 8 else -(-rows // 4) * 4
        return float(tokens) / (1 + row * rows + stair * (rows > 4) + own * (sum(lengths) > 0))

    drafts._choose(requests, sorted(offers), [1] * len(requests), 0, 0)
    none, found = rate([0] * len(requests)), rate([len(request.draft) for request in requests])
    best = max(map(rate, itertools.product(*(range(len(each) + 1) for each in chances))))
    assert found == pytest.approx(best if best > MARGIN * none else none, rel=1e-6)


def silent(drafts: Drafts, count: int) -> list[Request]:
    """Requests of which nothing is learned but time."""
    made = [Request(np.array([1]), SamplingParams(50), None) for _ in range(count)]  # type: ignore[arg-type]
    for request in made:
        request.ahead = Ahead(Trail(drafts._history))
    return made


@pytest.mark.parametrize("requests", [0, 4])
def test_looking_ahead_pauses_where_it_costs_time_each_time_for_longer(requests: int) -> None:
    """Also if all that it does is to read prompts that take many steps."""
    drafts, pauses, steps = Drafts(100, ANY, EngineStats()), [], 0
    sampled = silent(drafts, requests)
    while len(pauses) < 9:
        drafts._spent = 0.0 if drafts._pause else 0.05  # of a step of 1 second: nothing is ever accepted
        drafts.learn(sampled, Work(requests, 0, 0, draws=requests), 1 + drafts._spent)
        steps += 1
        if drafts._pause and (not pauses or steps > pauses[-1][0] + pauses[-1][1]):
            pauses.append((steps, drafts._pause))
    assert [length for _, length in pauses] == [32, 64, 128, 256, 512, 1024, 2048, 4096, 4096]
    assert drafts._stats.seconds_saved == pytest.approx(-0.05 * 32 * 9, rel=0.05)


@pytest.mark.parametrize(
    ("gain", "spent", "pauses"),
    [(0.01, 0, True), (0.1, 0, False), (0.1, 0.01, False), (0.1, 0.04, True), (None, 0, False)],
)
def test_drafts_that_bring_next_to_nothing_pause_and_steps_without_any_do_not(
    gain: float | None, spent: float, pauses: bool
) -> None:
    """Every second step gains so much of a second; looking ahead takes so much of each."""
    drafts, paused = Drafts(100, ANY, EngineStats()), False
    for step in range(500):
        drafts._spent = spent
        drafted = step % 2 if gain else 0  # and drawn: of 4 requests, so that it saves a quarter of a step
        seconds = 1 + drafted * (0.25 - (gain or 0)) + spent
        work = Work(4, drafted, 0, draws=4 + drafted, accepted=drafted)
        drafts.learn(silent(drafts, 4), work, seconds)
        paused = paused or drafts._pause > 0
    assert paused == pauses


def test_drafts_that_pay_never_pause() -> None:
    drafts = Drafts(100, ANY, EngineStats())
    sampled = silent(drafts, 4)
    for step in range(500):
        drafts._spent = 0.05
        drafted = step % 5
        seconds = 1 + 0.01 * drafted + drafts._spent
        work = Work(4, drafted, 0, draws=4 + drafted, accepted=drafted // 2)
        drafts.learn(sampled, work, seconds)
        assert not drafts._pause
    # Of five steps of 4 tokens a second, two give one token more and one gives two.
    assert drafts._stats.seconds_saved == pytest.approx(100 * (2 * 0.25 + 0.5 - 0.1 - 5 * 0.05), rel=0.1)


def test_a_window_that_pays_halves_the_next_pause() -> None:
    drafts, halves = Drafts(100, ANY, EngineStats()), []
    sampled, drafts._longer_pause = silent(drafts, 4), 128
    for step in range(160):
        drafts.learn(sampled, Work(4, step % 2, 0, draws=4 + step % 2, accepted=step % 2), 1.0)
        if step % 32 == 31:
            halves.append(drafts._longer_pause)
    assert halves == [64, 32, 32, 32, 32]


def test_those_that_draw_from_what_is_known_have_a_price_of_their_own() -> None:
    """Nothing is computed for them but logits, so rows must not look cheaper for it."""
    drafts, rng = Drafts(100, ANY, EngineStats()), np.random.default_rng(0)
    for _ in range(600):
        rows, known = int(rng.integers(1, 9)), int(rng.integers(0, 30))
        seconds = 0.04 + 0.002 * rows + 0.0003 * known
        drafts.learn(silent(drafts, rows + known), Work(rows, 0, 0, draws=rows + known), seconds)
    assert drafts._times.of(8) == pytest.approx(0.056, rel=0.02)
    assert drafts._times.of(4, others=20) == pytest.approx(0.054, rel=0.02)


def test_a_draft_goes_to_those_that_others_follow(model: LoadedModel, stepped: Stepped) -> None:
    """All texts go on as likely, and only a row that gives several tokens pays."""
    drafts, text = Drafts(100, ANY, EngineStats()), list(range(100, 160))
    times = drafts._times
    times._base, times.row, times._steps = 0.1, 1.0, 1
    for _ in range(8):
        Trail(drafts._history).extend(text)
    engine, _ = stepped(model)
    asked = [Request(np.array(text[n : n + 10]), SamplingParams(9), None) for n in (0, 15, 30)]  # type: ignore[arg-type]
    for request in asked:
        request.row, request.cached = engine.cache.acquire(None, 0, request.prompt)  # type: ignore[misc]
        drafts.begin(request)
    drafts.plan(asked, [], 0)
    assert not any(request.draft for request in asked)
    one = asked[1]
    others = [Request(one.prompt, one.params, one.future, row=one.row, source=one.row) for _ in range(5)]
    drafts.plan(asked, others, 0)
    assert [bool(request.draft) for request in asked] == [False, True, False]
    assert one.draft == text[25 : 25 + len(one.draft)]


def test_times_follow_a_machine_that_becomes_slower_or_faster() -> None:
    times = StepTimes()
    for factor in (1.0, 3.0, 0.5):
        for step in range(600):
            rows = (8, 12, 32)[step % 3]
            times.learn(rows, 0, factor * (0.04 + 0.002 * rows))
            assert all(times.of(rows) > 0 for rows in range(1, 100))
        assert times.of(8) == pytest.approx(factor * 0.056, rel=0.1)


def test_a_step_that_packs_weights_brings_no_pause() -> None:
    drafts = Drafts(100, ANY, EngineStats())
    for step in range(300):
        seconds = 0.5 if step % 30 == 1 else 0.05
        drafts.learn(silent(drafts, 8), Work(8, 0, 0, draws=8), seconds)
        assert not drafts._pause
    assert abs(drafts._stats.seconds_saved) < 0.1
