"""A token that several replies have in common is computed once, and every reply is as it is alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from silva.config.sections import TinyModel
from silva.engines.local.engine import LocalEngine
from silva.engines.local.following import LOOKAHEAD, follow, look_ahead
from silva.engines.local.request import EngineRequest, row_of
from silva.models.loading import LoadedModel, load_model
from silva.types import Completion, SamplingParams, Snapshot

PROMPT = list(range(40, 60))

pytestmark = pytest.mark.same_bits


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    loaded = load_model(TinyModel(layers=2, width=32, heads=4, kv_heads=2, context=900), seed=0)
    with torch.no_grad():  # so that siblings agree for a while
        for weight in loaded.model.parameters():
            if weight.ndim > 1:
                weight.mul_(6)
    return loaded


def params(seed: int, tokens: int = 24, temperature: float = 0.7, **more: Any) -> SamplingParams:
    return SamplingParams(tokens, temperature=temperature, seed=seed, **more)


def bits(completion: Completion) -> tuple[Any, ...]:
    c = completion
    numbers = [np.array(each).tobytes() for each in (c.logprobs, c.raw_logprobs, c.entropies)]
    return (c.tokens, *numbers, c.stop_reason)


async def finish(stepper: Any, tasks: Sequence[asyncio.Future[Completion]]) -> list[Completion]:
    while not all(task.done() for task in tasks):
        await stepper.settle()
        if stepper.jobs:
            await stepper.tick()
    return [task.result() for task in tasks]


def sample(engine: LocalEngine, prompt: Sequence[int], each: SamplingParams) -> asyncio.Future[Completion]:
    return asyncio.ensure_future(engine.sample(prompt, each))


def alone(stepped: Any, model: LoadedModel, prompt: Sequence[int], each: SamplingParams) -> tuple[Any, ...]:
    engine, stepper = stepped(model, max_concurrent=1, cached_sequences=0)

    async def run() -> Completion:
        return (await finish(stepper, [sample(engine, prompt, each)]))[0]

    return bits(asyncio.run(run()))


def nodes(replies: Sequence[Completion]) -> int:
    """Distinct texts after which another token was drawn, the bare prompt left out."""
    return len({each.tokens[:n] for each in replies for n in range(1, len(each.tokens))})


@pytest.mark.slow
@pytest.mark.parametrize("length", [20, 250])
def test_a_token_that_siblings_share_is_computed_once(model: LoadedModel, stepped: Any, length: int) -> None:
    """Also where the text passes the end of a block of attention."""
    prompt = (PROMPT * 13)[:length]
    asked = [params(seed, temperature=(0.0, 0.01, 0.03)[seed % 3]) for seed in range(12)]
    engine, stepper = stepped(model)

    async def run() -> list[Completion]:
        return await finish(stepper, [sample(engine, prompt, each) for each in asked])

    replies = asyncio.run(run())
    assert [bits(each) for each in replies] == [alone(stepped, model, prompt, each) for each in asked]
    stats, drawn = engine.stats, sum(len(each.tokens) - 1 for each in replies)
    assert stats.decode_tokens == drawn
    assert stats.decode_tokens - stats.shared_tokens == nodes(replies) < 0.8 * drawn
    assert stats.prefill_tokens == length


def test_who_comes_later_draws_from_what_is_known_many_tokens_in_a_step(
    model: LoadedModel, make_engine: Any
) -> None:
    engine, asked = make_engine(model), params(3, 40)

    async def run() -> tuple[Completion, Completion]:
        first = await engine.sample(PROMPT, asked)
        before = engine.stats.steps, engine.stats.prefill_tokens
        again = await engine.sample(PROMPT, asked)
        assert engine.stats.steps - before[0] == -(-40 // (LOOKAHEAD + 1))
        assert engine.stats.prefill_tokens == before[1]
        return first, again

    first, again = asyncio.run(run())
    assert bits(first) == bits(again)
    assert engine.stats.shared_tokens == 39 and engine.stats.seconds_saved != 0


@pytest.mark.slow
@pytest.mark.parametrize("ended", ["cancelled", "length", "stop"])
def test_a_leader_that_ends_leaves_its_followers_what_it_knows(
    model: LoadedModel, stepped: Any, ended: str
) -> None:
    """With one seed both say the same; not a token is computed twice."""
    whole = alone(stepped, model, PROMPT, params(5))
    stop = {"stop_token_ids": (whole[0][9],)} if ended == "stop" else {}
    leader = params(5, 10 if ended == "length" else 24, **stop)
    engine, stepper = stepped(model)

    async def run() -> Completion:
        first = sample(engine, PROMPT, leader)
        await stepper.settle()
        follower = sample(engine, PROMPT, params(5))
        for _ in range(6):
            await stepper.settle()
            await stepper.tick()
        if ended == "cancelled":
            first.cancel()
        found = (await finish(stepper, [follower]))[0]
        assert first.done()
        return found

    assert bits(asyncio.run(run())) == whole
    stats = engine.stats
    assert stats.shared_tokens > 3
    assert stats.decode_tokens - stats.shared_tokens == len(set(whole[0][:n] for n in range(1, 24)))


@pytest.mark.slow
def test_followers_wait_for_their_leader_when_new_weights_have_come(model: LoadedModel, stepped: Any) -> None:
    """All keys and values are gone then; one of them computes again what they have in common."""
    asked = [params(5), params(5, 20), params(5, 22)]
    engine, stepper = stepped(model)

    async def run() -> list[Completion]:
        tasks = [sample(engine, PROMPT, each) for each in asked]
        for _ in range(8):
            await stepper.settle()
            await stepper.tick()
        before = engine.stats.prefill_tokens
        loading = asyncio.ensure_future(engine.load(Snapshot(version=1)))
        await stepper.settle()
        await stepper.tick(len(stepper.jobs))
        await loading
        replies = await finish(stepper, tasks)
        said = sum(version == 0 for version in replies[0].versions)
        assert engine.stats.prefill_tokens - before == len(PROMPT) + said
        return replies

    expected = [alone(stepped, model, PROMPT, each) for each in asked]
    assert [bits(each) for each in asyncio.run(run())] == expected


def test_siblings_come_in_with_the_last_token_of_their_prompt_and_move_no_draft(
    model: LoadedModel, stepped: Any
) -> None:
    """The first one computes the prompt and a draft behind it in one step, in which the others begin."""
    asked = [params(seed, 6) for seed in range(4)]
    expected = [alone(stepped, model, PROMPT, each) for each in asked]
    engine, stepper = stepped(model)

    class Right:
        def begin(self, request: EngineRequest) -> None: ...

        def plan(
            self, requests: Sequence[EngineRequest], followers: Sequence[EngineRequest], prompt: int
        ) -> None:
            for request in requests:
                request.draft = list(expected[request.params.seed][0][len(request.tokens) : 5])

        def learn(self, *_: Any) -> None: ...

    engine.batch.drafts = Right()

    async def run() -> list[Completion]:
        tasks = [sample(engine, PROMPT, each) for each in asked]
        await stepper.tick()
        assert tasks[0].done() and engine.running == 3
        return await finish(stepper, tasks)

    assert [bits(each) for each in asyncio.run(run())] == expected
    assert engine.stats.steps == 2 and engine.stats.prefill_tokens == len(PROMPT)


def test_a_row_that_was_given_to_others_is_no_source(model: LoadedModel, stepped: Any) -> None:
    """The only idle row is the one that a reply is being read from."""
    engine, stepper = stepped(model, max_concurrent=2, cached_sequences=0)
    whole = alone(stepped, model, PROMPT, params(5))

    async def run() -> list[Completion]:
        short = sample(engine, PROMPT, params(5, 12))
        await finish(stepper, [short])
        follower = sample(engine, PROMPT, params(5))
        for _ in range(4):
            await stepper.settle()
            await stepper.tick()
        assert engine.stats.shared_tokens > 0
        stranger = sample(engine, PROMPT[::-1], params(6))
        return await finish(stepper, [follower, stranger])

    found = asyncio.run(run())
    assert bits(found[0]) == whole
    assert bits(found[1]) == alone(stepped, model, PROMPT[::-1], params(6))


def test_only_one_of_those_who_diverge_together_leads(model: LoadedModel, stepped: Any) -> None:
    engine, _ = stepped(model)
    cache = engine.cache

    def request(text: list[int], computed: int) -> EngineRequest:
        made = EngineRequest(np.array(text[:3]), params(0), None, tokens=text[3:])  # type: ignore[arg-type]
        made.row, _ = cache.acquire(None, 0, np.array(text))  # type: ignore[misc]
        row_of(made).computed = computed
        return made

    old, *new = [request([1, 2, 3, 4, 5], 5)] + [request([1, 2, 3, 4, last], 3) for last in (6, 6, 5, 6)]
    old.computes = True
    follow(cache, [old, *new])
    assert [each.source for each in new] == [None, row_of(new[0]), row_of(old), row_of(new[0])]
    assert [each.computes for each in new] == [True, False, False, False]
    assert [row_of(each).computed for each in new] == [4, 3, 3, 3]  # what it goes on from is copied
    follow(cache, [old, *new])
    assert [each.source for each in new] == [None, row_of(new[0]), row_of(old), row_of(new[0])]


def test_nobody_looks_further_ahead_than_the_reply_may_go(model: LoadedModel, stepped: Any) -> None:
    engine, _ = stepped(model)
    source, _ = engine.cache.acquire(None, 0, np.arange(100, 130))
    source.computed = 25
    row, _ = engine.cache.acquire(None, 0, np.arange(100, 112))

    def draft(after: int, **limits: Any) -> list[int]:
        asked = EngineRequest(np.arange(100, 110), params(0, **limits), None)  # type: ignore[arg-type]
        asked.row, asked.source, asked.tokens = row, source, [110] * after
        look_ahead([asked])
        return asked.draft

    assert draft(1) == list(range(112, 112 + LOOKAHEAD))
    assert draft(1, tokens=6) == [112, 113, 114, 115]
    assert draft(1, tokens=2) == []
    assert draft(1, stop_token_ids=(114,)) == [112, 113]  # and 114 is drawn without being a draft
    source.computed = 14
    assert draft(1) == [112, 113]
    source.computed = 12
    assert draft(1) == []
