"""The local engine: continuous batching, what is computed and kept, stops, faults, shared weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from silva.config.sections import TinyModel
from silva.engines.local.engine import LocalEngine
from silva.engines.settings import LocalEngineSettings as Settings
from silva.errors import ConfigError, ContextOverflow, EngineError, OutOfMemory
from silva.models.loading import LoadedModel, load_model
from silva.types import Completion, SamplingParams, Snapshot

Stepped = Callable[..., tuple[LocalEngine, Any]]
Make = Callable[..., LocalEngine]
TINY = TinyModel(layers=2, width=32, heads=4, kv_heads=2, context=256)


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(0, 256, length).tolist()


def ask(engine: LocalEngine, tokens: Sequence[int], max_tokens: int = 4, **params: Any) -> asyncio.Task:
    return asyncio.ensure_future(engine.sample(tokens, SamplingParams(max_tokens=max_tokens, **params)))


def answer(engine: LocalEngine, tokens: Sequence[int], max_tokens: int = 4, **params: Any) -> Completion:
    return asyncio.run(engine.sample(tokens, SamplingParams(max_tokens=max_tokens, **params)))


# --- continuous batching


@pytest.mark.slow
@pytest.mark.parametrize("late", [prompt(30, 9), prompt(40, 0)[:30], prompt(90, 5)[:60] + prompt(3)])
def test_a_late_request_gets_its_first_token_within_two_steps(
    tiny_model: LoadedModel, stepped: Stepped, late: list[int]
) -> None:
    """Also where its prompt is known already, or begins like one that arrives with it."""

    async def run() -> None:
        engine, stepper = stepped(tiny_model)
        early = [ask(engine, prompt(40, i), max_tokens=50, seed=i) for i in range(3)]
        await stepper.tick(7)
        together, one = ask(engine, prompt(90, 5), 1), ask(engine, late, 1)
        await stepper.tick(2)
        assert one.done() and together.done() and not any(task.done() for task in early)
        await stepper.tick(40)
        assert not any(task.done() for task in early)
        await stepper.tick()  # 50 in all: nobody was held up by the late ones
        assert all(task.done() for task in early)

    asyncio.run(run())


def test_a_stream_tells_of_each_token_in_the_step_that_gave_it(
    tiny_model: LoadedModel, stepped: Stepped
) -> None:
    """Also across new weights: every token keeps its version."""

    async def run() -> None:
        engine, stepper = stepped(tiny_model)
        told: list[tuple[int, float]] = []
        params = SamplingParams(max_tokens=9, seed=3)
        task = asyncio.ensure_future(
            engine.stream(prompt(20), params, lambda *new: told.extend(zip(*new, strict=True)))
        )
        for steps in range(1, 6):
            await stepper.tick()
            assert len(told) == steps and not task.done()
        loading = asyncio.ensure_future(engine.load(Snapshot(1)))
        await stepper.tick(2)  # the step that has begun, then the load
        assert loading.done() and len(told) == 6
        await stepper.tick(3)
        found = task.result()
        assert told == [*zip(found.tokens, found.logprobs, strict=True)]
        assert found.versions == (0,) * 6 + (1,) * 3
        given_up: list[int] = []
        task = asyncio.ensure_future(engine.stream(prompt(20), params, lambda new, _: given_up.extend(new)))
        await stepper.tick(2)
        task.cancel()
        await stepper.tick()
        assert len(given_up) == 2
        task = asyncio.ensure_future(engine.stream(prompt(20), params, lambda new, _: given_up.extend(new)))
        await stepper.settle()
        step, job = stepper.jobs.popleft()
        done = job()
        task.cancel()  # while the step ends
        step.set_result(done)
        await stepper.settle()
        assert len(given_up) == 2

    asyncio.run(run())


def test_a_short_prompt_does_not_wait_for_a_long_one(tiny_model: LoadedModel, stepped: Stepped) -> None:
    async def run() -> None:
        engine, stepper = stepped(tiny_model, prefill_tokens=64)
        long = ask(engine, prompt(300), 1)
        await stepper.tick()
        short = ask(engine, prompt(10, 7), 1)
        await stepper.tick(2)
        assert short.done() and not long.done()
        await stepper.tick(2)  # 310 prompt tokens in steps of 64
        assert long.done()

    asyncio.run(run())


def test_a_group_computes_its_prompt_once(tiny_model: LoadedModel, stepped: Stepped) -> None:
    async def run() -> list[Completion]:
        engine, stepper = stepped(tiny_model)
        tasks = [ask(engine, prompt(100), 5, seed=i) for i in range(8)]
        await stepper.tick(5)
        assert engine.stats.prefill_tokens == 100
        assert engine.stats.cached_tokens == 7 * 100
        assert engine.stats.decode_tokens == 8 * 4  # the last of 5 tokens is never fed back
        return [task.result() for task in tasks]

    completions = asyncio.run(run())
    assert [c.cached_tokens for c in completions] == [0] + [100] * 7
    assert len({c.tokens for c in completions}) == 8


def test_a_shared_prefix_is_computed_once(tiny_model: LoadedModel, stepped: Stepped) -> None:
    trunk = prompt(70)
    prompts = [trunk + prompt(10 + i, i) for i in range(5)] + [trunk[:33] + prompt(20, 7), trunk[:50]]
    unique = {tuple(p[: n + 1]) for p in prompts for n in range(len(p))}

    async def run() -> None:
        engine, stepper = stepped(tiny_model)
        tasks = [ask(engine, p) for p in prompts]
        await stepper.tick(5)
        assert all(task.done() for task in tasks)
        assert engine.stats.prefill_tokens == len(unique)

    asyncio.run(run())


def test_a_second_turn_reuses_the_first(tiny_model: LoadedModel, stepped: Stepped) -> None:
    async def run() -> None:
        engine, stepper = stepped(tiny_model)
        task = ask(engine, prompt(60), 10)
        await stepper.tick(10)
        first = task.result()
        task = ask(engine, [*prompt(60), *first.tokens, *prompt(20, 1)], 1)
        await stepper.tick()
        # All but the last sampled token were fed back when they were sampled.
        assert task.result().cached_tokens == 60 + 9
        assert engine.stats.prefill_tokens == 60 + 1 + 20
        assert len([row for row in engine.cache.rows if len(row.tokens)]) == 1  # continued in its place

    asyncio.run(run())


def test_finished_sequences_are_kept_as_long_as_there_are_rows(
    tiny_model: LoadedModel, stepped: Stepped
) -> None:
    async def run(cached_sequences: int) -> int:
        engine, stepper = stepped(tiny_model, max_concurrent=1, cached_sequences=cached_sequences)
        for seed in (0, 1, 2, 0):
            task = ask(engine, prompt(50, seed), 1)
            await stepper.tick()
            assert task.done()
        return engine.stats.prefill_tokens

    assert asyncio.run(run(0)) == asyncio.run(run(1)) == 200
    assert asyncio.run(run(2)) == 150


def test_memory_is_that_of_the_sequences_that_it_can_keep(tiny_model: LoadedModel, stepped: Stepped) -> None:
    engine, _ = stepped(tiny_model, max_concurrent=2, cached_sequences=3)
    assert 0 < engine.memory(4, 64) < engine.memory(5, 64) == engine.memory(500, 64)


def test_max_concurrent_is_respected(tiny_model: LoadedModel, stepped: Stepped) -> None:
    async def run() -> None:
        engine, stepper = stepped(tiny_model, max_concurrent=3)
        tasks = [ask(engine, prompt(5, i), 2 + i) for i in range(7)]
        seen = []
        while not all(task.done() for task in tasks):
            await stepper.tick()
            seen.append(engine.running)
        assert max(seen) == 3 and engine.running == 0
        assert sum(row.busy for row in engine.cache.rows) == 0

    asyncio.run(run())


def test_cancel_frees_the_place_and_its_row(tiny_model: LoadedModel, stepped: Stepped) -> None:
    async def run() -> None:
        engine, stepper = stepped(tiny_model, max_concurrent=2, cached_sequences=0)
        first, second = ask(engine, prompt(20), 100), ask(engine, prompt(30, 1), 100)
        third, fourth = ask(engine, prompt(40, 2), 1), ask(engine, prompt(50, 3), 1)
        await stepper.tick(3)
        assert engine.running == 2
        first.cancel()  # running
        third.cancel()  # waiting
        await stepper.settle()
        await stepper.tick()  # the step that was about to begin already drops it
        assert first.cancelled() and third.cancelled() and fourth.done() and not second.done()
        assert engine.stats.prefill_tokens == 20 + 30 + 50
        assert [row.busy for row in engine.cache.rows] == [False, True]

    asyncio.run(run())


def test_a_long_prompt_is_cut_and_does_not_stall_decoding(tiny_model: LoadedModel, stepped: Stepped) -> None:
    async def run() -> None:
        engine, stepper = stepped(tiny_model, prefill_tokens=64)
        decoding = [ask(engine, prompt(10, i), 100, seed=i) for i in range(3)]
        await stepper.tick(2)
        long = ask(engine, prompt(300), 1)
        for step in range(5):
            before = engine.stats.decode_tokens, engine.stats.prefill_tokens
            await stepper.tick()
            assert engine.stats.decode_tokens - before[0] == 3
            assert engine.stats.prefill_tokens - before[1] == (64, 64, 64, 64, 300 - 4 * 64)[step]
            assert long.done() == (step == 4)
        for task in decoding:
            task.cancel()
        await stepper.tick()
        assert engine.running == 0

    asyncio.run(run())


# --- where sampling stops


def test_more_context_than_the_model_has_is_refused(tiny_model: LoadedModel, make_engine: Make) -> None:
    most = tiny_model.context
    assert make_engine(tiny_model, context=most).capabilities.context == most
    with pytest.raises(ConfigError, match=rf"engine.context: got {most + 1}, expected at most the {most} of"):
        make_engine(tiny_model, context=most + 1)


def test_stop_tokens_and_limits(tiny_model: LoadedModel, make_engine: Make) -> None:
    engine = make_engine(tiny_model, context=40)
    free = answer(engine, prompt(30), 6, seed=3)
    assert (free.stop_reason, len(free.tokens)) == ("length", 6)
    stopped = answer(engine, prompt(30), 6, seed=3, stop_token_ids=(300, free.tokens[2]))
    at = free.tokens.index(free.tokens[2])
    assert (stopped.stop_reason, stopped.tokens) == ("stop_token", free.tokens[: at + 1])
    full = answer(engine, prompt(30), 100, seed=3)
    assert (full.stop_reason, len(full.tokens)) == ("context_overflow", 10)
    assert full.tokens[:6] == free.tokens
    exact = answer(engine, prompt(30), 10, seed=3)
    assert (exact.stop_reason, exact.tokens) == ("length", full.tokens)
    assert answer(engine, prompt(39), 5).stop_reason == "context_overflow"
    with pytest.raises(ContextOverflow, match="prompt of 40 tokens leaves no room in a context of 40"):
        answer(engine, prompt(40))


def test_stop_strings_reach_across_tokens(tiny_model: LoadedModel, make_engine: Make) -> None:
    """One token is one byte here: a string of three characters takes three tokens, with é four."""
    engine = make_engine(tiny_model)
    tokenizer = tiny_model.tokenizer
    free = answer(engine, prompt(30), 40, seed=1)
    text = tokenizer.decode(free.tokens[10:14])
    wanted = next(text[i : i + 3] for i in range(2) if "�" not in text[i : i + 3])
    stopped = answer(engine, prompt(30), 40, seed=1, stop=("never said", wanted))
    assert stopped.stop_reason == "stop_string"
    assert stopped.tokens == free.tokens[: len(stopped.tokens)]
    said = tokenizer.decode(stopped.tokens)
    assert said.endswith(wanted) and wanted not in said[:-1]


@pytest.mark.slow
def test_the_token_that_completes_a_stop_string_is_kept_whole(tiny_model: LoadedModel) -> None:
    """With a vocabulary of words a token can reach past the string; it was sampled, so it stays."""

    class Words:
        def decode(self, tokens: Sequence[int]) -> str:
            return "".join(("a", "b</", "x>", ">tail")[t % 4] for t in tokens)

    words = LoadedModel(
        tiny_model.model, Words(), "words", tiny_model.device, tiny_model.dtype, tiny_model.context, False
    )  # type: ignore[arg-type]
    with ThreadPoolExecutor(1) as compute:
        engine = LocalEngine(words, Settings(), compute)
        found = 0
        for seed in range(15):
            free = answer(engine, prompt(9), 12, seed=seed)
            stopped = answer(engine, prompt(9), 12, seed=seed, stop=("</>",))
            pairs = [i for i, (a, b) in enumerate(zip(free.tokens, free.tokens[1:], strict=False)) if
                     (a % 4, b % 4) == (1, 3)]  # fmt: skip
            end = pairs[0] + 2 if pairs else 12
            assert stopped.tokens == free.tokens[:end]
            assert stopped.stop_reason == ("stop_string" if pairs else "length")
            found += bool(pairs)
        assert found > 2


def test_an_empty_prompt_is_refused(tiny_model: LoadedModel, make_engine: Make) -> None:
    with pytest.raises(EngineError, match="got an empty prompt, expected at least one token"):
        answer(make_engine(tiny_model), [])


# --- what is reported


def test_recorded_numbers_equal_a_plain_forward(tiny_model: LoadedModel, make_engine: Make) -> None:
    engine = make_engine(tiny_model)
    got = answer(engine, prompt(50), 30, temperature=0.7)
    sequence = torch.tensor([[*prompt(50), *got.tokens]])
    with torch.no_grad():
        logits = tiny_model.model(input_ids=sequence).logits[0, 49:-1].double()
    at = torch.tensor(got.tokens)[:, None]
    tempered = torch.distributions.Categorical(logits=logits / 0.7)
    expected = tempered.log_prob(at[:, 0])
    np.testing.assert_allclose(got.logprobs, expected, atol=1e-5)
    np.testing.assert_allclose(got.entropies, tempered.entropy(), atol=1e-5)
    np.testing.assert_allclose(got.raw_logprobs, logits.log_softmax(-1).gather(1, at)[:, 0], atol=1e-5)


def test_tokens_after_a_known_prefix_are_scored_without_computing_it_again(
    tiny_model: LoadedModel, make_engine: Make
) -> None:
    """Also together with requests that sample, and to the last bit as in an engine that knows nothing."""
    engine, state, thoughts = make_engine(tiny_model), prompt(100), [prompt(9, i) for i in range(3)]

    async def run() -> list[Any]:
        await engine.sample(state, SamplingParams(1))
        before = engine.stats.prefill_tokens
        asked = [engine.score([*state, *thought], 100) for thought in thoughts]
        found = await asyncio.gather(*asked, engine.sample(state, SamplingParams(3)))
        assert engine.stats.prefill_tokens - before == 3 * 9
        return list(found)

    *scores, completion = asyncio.run(run())
    fresh = make_engine(tiny_model)
    assert scores == [asyncio.run(fresh.score([*state, *thought], 100)) for thought in thoughts]
    assert completion.tokens == answer(make_engine(tiny_model), state, 3).tokens
    assert not engine.running


def test_scores_equal_a_plain_forward(tiny_model: LoadedModel, make_engine: Make) -> None:
    engine, tokens = make_engine(tiny_model, context=300), prompt(300)
    with torch.no_grad():
        logits = tiny_model.model(input_ids=torch.tensor([tokens])).logits[0].double()
    logprobs = logits[:-1].log_softmax(-1)
    expected, best = logprobs.gather(1, torch.tensor(tokens)[1:, None])[:, 0], logprobs.max(-1)
    for start in (1, 170, 299):
        got = asyncio.run(engine.score(tokens, start))
        assert got.version == engine.version
        np.testing.assert_allclose(got.logprobs, expected[start - 1 :], atol=1e-5)
        assert list(got.likeliest) == best.indices[start - 1 :].tolist()
        np.testing.assert_allclose(got.likeliest_logprobs, best.values[start - 1 :], atol=1e-5)
    assert asyncio.run(engine.score(tokens, 300)).logprobs == ()
    with pytest.raises(EngineError, match="start 0 out of range, expected 1 to 300"):
        asyncio.run(engine.score(tokens, 0))
    with pytest.raises(ContextOverflow, match="got 301 tokens, expected at most 300"):
        asyncio.run(engine.score([*tokens, 1], 5))


# --- faults


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (ValueError("odd shapes"), EngineError, "sampling failed: ValueError: odd shapes"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to get 9."), OutOfMemory,
         r"while sampling: lower engine.max_concurrent \(now 5\).* rollout.limits.max_episode_tokens"),
        (MemoryError(), OutOfMemory, r"\(MemoryError\)"),
    ],
)  # fmt: skip
def test_a_failed_step_fails_its_requests_and_no_later_one(
    tiny_model: LoadedModel, stepped: Stepped, error: Exception, kind: type[Exception], words: str
) -> None:
    async def run() -> None:
        engine, stepper = stepped(tiny_model, max_concurrent=5)
        forward, calls = engine.batch.decoder, []

        def failing(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            if len(calls) == 3:
                raise error
            return forward(*args, **kwargs)

        expected = ask(engine, prompt(20), 6)
        await stepper.tick(6)
        engine.batch.decoder = failing
        tasks = [ask(engine, prompt(10, i), 50) for i in range(8)]  # five run, three wait
        await stepper.tick(3)
        for task in tasks:
            with pytest.raises(kind, match=words) as caught:
                await task
            assert caught.value.__cause__ is error
        assert engine.running == 0 and not any(row.busy for row in engine.cache.rows)
        again = ask(engine, prompt(20), 6)
        await stepper.tick(6)
        assert again.result() == expected.result()

    asyncio.run(run())


def test_weights_that_are_not_numbers_are_an_error(make_engine: Make) -> None:
    loaded = load_model(TINY, seed=0)
    engine = make_engine(loaded)
    with torch.no_grad():
        loaded.model.get_parameter("model.norm.weight")[3] = float("nan")
    with pytest.raises(EngineError, match=r"the model's logits are not finite \(version 0\)"):
        answer(engine, prompt(5))
    with pytest.raises(EngineError, match="sampling failed: AttributeError"):
        engine.batch._loaded = None
        asyncio.run(engine.score(prompt(5), 2))


def test_an_interrupted_event_loop_leaves_the_engine_usable(
    tiny_model: LoadedModel, make_engine: Make
) -> None:
    engine = make_engine(tiny_model)

    async def leave() -> None:
        for seed in range(3):
            ask(engine, prompt(20, seed), 500)
        await asyncio.sleep(0.02)

    asyncio.run(leave())
    assert answer(engine, prompt(9), 8) == answer(make_engine(tiny_model), prompt(9), 8)
    assert engine.running == 0 and not any(row.busy for row in engine.cache.rows)
