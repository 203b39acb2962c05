"""One batch of requests that have an adapter each: every one gets what PEFT gives, and what it gets alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tests.engines.local.adapters import (
    ALPHA,
    LAYERS,
    MLP,
    RANKS,
    SIZES,
    bits,
    drawn,
    load,
    make,
    prompt,
    with_peft,
)
from transformers import LlamaConfig, Qwen3Config

from silva.engines.local.engine import LocalEngine
from silva.engines.local.following import follow
from silva.engines.local.kv_cache import KvCache
from silva.engines.local.request import EngineRequest
from silva.errors import EngineError
from silva.models.decoder import AnyDecoder
from silva.models.loading import LoadedModel
from silva.types import Completion, SamplingParams, Snapshot, TokenScores

Stepped = Callable[..., tuple[LocalEngine, Any]]
Make = Callable[..., LocalEngine]


@pytest.fixture(scope="module")
def llama() -> LoadedModel:
    return make(LlamaConfig(**SIZES))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "config",
    [LlamaConfig(**SIZES), Qwen3Config(**SIZES), LlamaConfig(**SIZES, hidden_act="gelu")],
    ids=["llama", "qwen3", "through transformers"],
)
def test_a_request_gets_what_the_model_gives_with_peft_s_adapter(
    make_engine: Make, config: Any, dtype: torch.dtype
) -> None:
    loaded = make(config, dtype)
    engine = make_engine(loaded)
    assert isinstance(engine.batch.decoder, AnyDecoder) == (config.hidden_act == "gelu")
    parameters = drawn(loaded, "clerk", (*LAYERS, "lm_head"))
    expected_model = with_peft(loaded, parameters, RANKS["clerk"])

    read: list[tuple[int, torch.Tensor]] = []

    async def run() -> tuple[Completion, Completion, TokenScores]:
        await engine.load_adapter("clerk", parameters, scale=ALPHA / RANKS["clerk"], version=7)
        for parameter in parameters.values():  # it is trained further
            parameter.data.add_(1)
        params = SamplingParams(max_tokens=12, seed=5)
        own, plain = await asyncio.gather(
            engine.sample(prompt(9), params, adapter="clerk"), engine.sample(prompt(9), params)
        )
        scores = await engine.score(
            [*prompt(9), *own.tokens], 2, adapter="clerk", top=3,
            read=lambda logits, first: read.append((first, logits.log_softmax(-1))),
        )  # fmt: skip
        return own, plain, scores

    own, plain, scores = asyncio.run(run())
    tokens = [*prompt(9), *own.tokens]
    with torch.no_grad():
        expected = expected_model(torch.tensor([tokens])).logits[0, :-1].to(dtype).log_softmax(-1)
    of_tokens = expected[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])]
    exactly = {"rtol": 0, "atol": 1e-12 if dtype == torch.float64 else 3e-5}
    np.testing.assert_allclose(own.raw_logprobs, of_tokens[8:], **exactly)
    np.testing.assert_allclose(own.entropies, -(expected.exp() * expected).sum(-1)[8:], **exactly)
    np.testing.assert_allclose(scores.logprobs, of_tokens[1:], **exactly)
    ((first, logprobs),) = read
    assert first == 2
    np.testing.assert_allclose(logprobs, expected[1:], **exactly)
    best = expected[1:].topk(3)
    assert [[token for token, _ in each] for each in scores.top] == best.indices.tolist()
    np.testing.assert_allclose([[p for _, p in each] for each in scores.top], best.values, **exactly)
    assert own.versions == (7,) * 12 and scores.version == 7
    assert plain.tokens != own.tokens and plain.versions == (0,) * 12


def test_adapters_are_wider_than_a_narrow_model(make_engine: Make) -> None:
    """As in PEFT, whose products with bfloat16's states are in float32 too."""
    loaded = make(LlamaConfig(**SIZES), torch.bfloat16)
    engine, parameters = make_engine(loaded), drawn(loaded, "clerk")
    assert {parameter.dtype for parameter in parameters.values()} == {torch.float32}

    async def run() -> tuple[TokenScores, TokenScores]:
        await engine.load_adapter("clerk", parameters, scale=ALPHA / RANKS["clerk"])
        return await engine.score(prompt(60), 1, adapter="clerk"), await engine.score(prompt(60), 1)

    own, plain = (torch.tensor(found.logprobs) for found in asyncio.run(run()))
    with torch.no_grad():
        logits = with_peft(loaded, parameters, RANKS["clerk"])(torch.tensor([prompt(60)])).logits[0, :-1]
    expected = logits.float().log_softmax(-1)[torch.arange(59), torch.tensor(prompt(60)[1:])]
    assert float((own - expected).abs().mean()) < 0.02 < 0.5 < float((plain - expected).abs().mean())


# --- in company


JOBS: list[tuple[str | None, list[int], SamplingParams]] = [
    ("poet", prompt(40), SamplingParams(9, seed=1)),
    (None, prompt(40), SamplingParams(9, seed=1)),
    ("clerk", prompt(40), SamplingParams(12, temperature=0)),
    ("jester", prompt(40)[:25] + prompt(60, 1), SamplingParams(9, temperature=0.7, top_k=5, seed=2)),
    ("poet", prompt(40), SamplingParams(12, seed=3)),
    ("clerk", prompt(3), SamplingParams(9, seed=1)),
]


def play(
    engine: LocalEngine, stepper: Any, loaded: LoadedModel, jobs: Sequence[int], apart: int
) -> list[Any]:
    """So many steps pass before another request comes; each reply is scored as well."""

    async def one(number: int) -> list[Any]:
        name, tokens, params = JOBS[number]
        reply = await engine.sample(tokens, params, adapter=name)
        scores = await engine.score([*tokens, *reply.tokens], 1, adapter=name, top=2)
        return [bits(reply), scores]

    async def run() -> list[Any]:
        for name in RANKS:
            loading = asyncio.ensure_future(load(engine, loaded, name, version=RANKS[name]))
            await stepper.tick(2)
            assert loading.done()
        tasks = []
        for number in jobs:
            tasks.append(asyncio.ensure_future(one(number)))
            await stepper.settle()
            for _ in range(apart):
                if stepper.jobs:
                    await stepper.tick()
        while not all(task.done() for task in tasks):
            await stepper.tick()
        return [task.result() for task in tasks]

    return asyncio.run(run())


@pytest.mark.same_bits
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.slow
def test_requests_in_one_batch_have_the_bits_that_they_have_alone(
    stepped: Stepped, dtype: torch.dtype
) -> None:
    for config in (LlamaConfig(**SIZES), Qwen3Config(**SIZES)):
        loaded = make(config, dtype)
        alone = [play(*stepped(loaded), loaded, [number], 0)[0] for number in range(len(JOBS))]
        assert len({reply.tokens[:9] for reply, _ in alone}) == len(JOBS)
        for apart, settings in (
            (0, {}),
            (0, {"drafts": "forest"}),
            (1, {"prefill_tokens": 7, "max_concurrent": 3, "cached_sequences": 0}),
            (3, {"max_concurrent": 2, "cached_sequences": 1}),
        ):
            engine, stepper = stepped(loaded, **settings)
            order = range(len(JOBS)) if apart % 2 else range(len(JOBS))[::-1]
            found = play(engine, stepper, loaded, order, apart)
            assert found == [alone[number] for number in order]


def test_a_step_shares_the_model_s_products(llama: LoadedModel, stepped: Stepped) -> None:
    """Six requests of three adapters and none: one pass of the decoder a token."""
    engine, stepper = stepped(llama)
    calls: list[int] = []
    decoder = engine.batch.decoder
    engine.batch.decoder = lambda tokens, step: calls.append(len(tokens)) or decoder(tokens, step)  # type: ignore[assignment,func-returns-value]
    play(engine, stepper, llama, range(5), 0)
    assert len(calls) == 12 + 1  # the longest reply, and its last token for the scores


# --- versions and the cache


def test_a_request_keeps_the_version_that_it_began_with(llama: LoadedModel, stepped: Stepped) -> None:
    async def run() -> None:
        engine, stepper = stepped(llama)

        async def ticked(work: Any) -> Any:
            task = asyncio.ensure_future(work)
            await stepper.settle()
            while not task.done():
                await stepper.tick()
            return task.result()

        def ask() -> Any:
            return engine.sample(prompt(20), SamplingParams(8, seed=1), adapter="poet")

        await ticked(load(engine, llama, "poet", version=1))
        first = await ticked(ask())
        early = asyncio.ensure_future(ask())
        await stepper.tick(4)
        await ticked(load(engine, llama, "poet", seed=1, version=2))
        late = await ticked(ask())
        again = await ticked(ask())
        await stepper.settle()
        assert engine.adapters == {"poet": 2}
        assert bits(early.result()) == bits(first) and first.versions == (1,) * 8
        assert late.tokens != first.tokens and late.versions == (2,) * 8 and late.cached_tokens == 0
        assert bits(again) == bits(late) and again.cached_tokens == 20

    asyncio.run(run())


def test_nobody_goes_on_from_what_another_adapter_computed(llama: LoadedModel, make_engine: Make) -> None:
    """Each adapter is asked twice: the second time the cache knows the prompt, also after a load."""
    engine = make_engine(llama)

    async def run() -> list[tuple[int, bool]]:
        for name in RANKS:
            await load(engine, llama, name)
        found, replies = [], {}
        for name in [*RANKS, None] * 2:
            reply = await engine.sample(prompt(30), SamplingParams(3, seed=1), adapter=name)
            known = replies.setdefault(name, bits(reply)) == bits(reply)
            found.append((reply.cached_tokens, known))
        await engine.load(Snapshot(1))
        reply = await engine.sample(prompt(30), SamplingParams(3, seed=1), adapter="clerk")
        return [*found, (reply.cached_tokens, bits(reply) == replies["clerk"])]

    assert asyncio.run(run()) == [(0, True)] * 4 + [(30, True)] * 4 + [(0, True)]


def test_nobody_follows_a_request_of_another_adapter(llama: LoadedModel) -> None:
    """Also where the row that it drew from has gone to one with the same tokens."""

    async def run() -> None:
        cache = KvCache(
            llama.model.config, rows=3, context=64, dtype=torch.float32, device=torch.device("cpu")
        )
        tokens, requests = np.arange(9), []
        for adapter in (1, 1, 2):
            got = cache.acquire(None, 0, tokens, adapter=adapter)
            assert got is not None
            requests.append(EngineRequest(tokens, SamplingParams(4), row=got[0]))
        first, second, other = requests
        follow(cache, requests)
        assert first.computes and second.source is first.row and other.computes
        first.row.computed = 9
        cache.release(first.row)
        follow(cache, [second])
        assert second.source is first.row
        first.row.adapter = 2
        follow(cache, [second])
        assert second.source is None and second.computes

    asyncio.run(run())


# --- what goes wrong


def test_an_adapter_that_is_not_there_is_an_error_of_that_request_alone(
    llama: LoadedModel, stepped: Stepped
) -> None:
    async def run() -> None:
        engine, stepper = stepped(llama)
        for name in ("poet", "clerk"):
            loading = asyncio.ensure_future(load(engine, llama, name))
            await stepper.tick(2)
            assert loading.done()
        good = asyncio.ensure_future(engine.sample(prompt(9), SamplingParams(3), adapter="poet"))
        await stepper.tick()
        expected = "adapter: got piper, expected one that is loaded: clerk, poet"
        with pytest.raises(EngineError, match=expected):
            await engine.sample(prompt(9), SamplingParams(3), adapter="piper")
        with pytest.raises(EngineError, match=expected):
            await engine.score(prompt(9), 9, adapter="piper")
        await stepper.tick(2)
        assert len(good.result().tokens) == 3

    asyncio.run(run())


def test_an_adapter_with_nan_fails_its_own_requests(llama: LoadedModel, make_engine: Make) -> None:
    """And leaves nothing in the rows that others get next."""
    engine = make_engine(llama, max_concurrent=4, cached_sequences=0)
    broken = drawn(llama, "poet")
    broken["model.layers.0.self_attn.v_proj.lora_B.weight"].data[0, 0] = float("nan")
    jobs = [("clerk", 10), ("poet", 90), (None, 12), ("poet", 60)]

    async def ask(name: str | None, length: int) -> Any:
        return await engine.sample(prompt(length), SamplingParams(4, seed=2), adapter=name)

    async def run() -> None:
        await engine.load_adapter("poet", broken, scale=1.0, version=3)
        await load(engine, llama, "clerk")
        expected = {name: bits(await ask(name, length)) for name, length in jobs if name != "poet"}
        together = await asyncio.gather(*(ask(*job) for job in jobs), return_exceptions=True)
        for (name, _), got in zip(jobs, together, strict=True):
            if name == "poet":
                assert str(got).startswith(
                    "with the adapter poet the model's logits are not finite (version 3)"
                )
            else:
                assert bits(got) == expected[name]
        with pytest.raises(EngineError, match="with the adapter poet"):
            await engine.score(prompt(20), 1, adapter="poet")
        after = [ask(*jobs[number]) for number in (0, 2) * 4]
        for number, got in zip((0, 2) * 4, await asyncio.gather(*after), strict=True):
            assert bits(got) == expected[jobs[number][0]]

    asyncio.run(run())


def test_a_token_with_nan_fails_the_requests_that_have_it(make_engine: Make) -> None:
    """And no later one in their row, with an adapter or without."""
    loaded = make(LlamaConfig(**SIZES))
    loaded.model.get_input_embeddings().weight.data[49] = float("nan")
    engine = make_engine(loaded, max_concurrent=1, cached_sequences=0)
    good = [token % 49 for token in prompt(12)]

    async def run() -> None:
        await load(engine, loaded, "clerk")
        for name in (None, "clerk"):
            ask = partial(engine.sample, params=SamplingParams(4, temperature=0), adapter=name)
            first = await ask([*good, 1])
            for bad in ([49, *good, *good], [*good, 49, *good]):
                with pytest.raises(EngineError, match="logits are not finite"):
                    await ask(bad)
                assert bits(await ask([*good, 1])) == bits(first)

    asyncio.run(run())


def test_of_too_many_adapters_the_one_used_longest_ago_goes(llama: LoadedModel, make_engine: Make) -> None:
    engine = make_engine(llama, max_adapters=2)

    async def run() -> None:
        await load(engine, llama, "poet")
        await load(engine, llama, "clerk", version=4)
        await engine.sample(prompt(5), SamplingParams(1), adapter="poet")
        await load(engine, llama, "jester")
        assert engine.adapters == {"poet": 0, "jester": 0}
        with pytest.raises(EngineError, match="got clerk, expected one that is loaded: jester, poet"):
            await engine.sample(prompt(5), SamplingParams(1), adapter="clerk")
        await load(engine, llama, "clerk", version=5)
        assert engine.adapters == {"jester": 0, "clerk": 5}

    asyncio.run(run())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({f"{MLP}.lora_A.weight": (4, 32)}, rf"got {MLP}, expected the name of a linear layer"),
        (
            {f"{MLP}.up_proj.weight": (4, 32)},
            r"up_proj.weight, expected <layer>.lora_A.weight or lora_B.weight",
        ),
        (
            {f"{MLP}.up_proj.lora_B.weight": (88, 5)},
            rf"poet, {MLP}.up_proj: got A \[4, 32\] and B \[88, 5\],",
        ),
    ],
    ids=["no linear layer", "no adapter", "other sizes"],
)
def test_what_does_not_fit_the_model_is_refused(
    llama: LoadedModel, make_engine: Make, change: dict[str, tuple[int, ...]], message: str
) -> None:
    engine = make_engine(llama)
    parameters = drawn(llama, "poet") | {name: torch.zeros(shape) for name, shape in change.items()}
    with pytest.raises(EngineError, match=message):
        asyncio.run(engine.load_adapter("poet", parameters, scale=1.0))
    assert engine.adapters == {}


def test_steps_with_adapters_are_no_cuda_graphs(llama: LoadedModel, make_engine: Make) -> None:
    engine = make_engine(llama)

    class Refusing:
        def __call__(self, rows: Any) -> None:
            raise AssertionError

    engine.batch.graphs = Refusing()  # type: ignore[assignment]

    async def run() -> Completion:
        assert engine.notes == []
        await load(engine, llama, "poet")
        return await engine.sample(prompt(5), SamplingParams(4), adapter="poet")

    assert len(asyncio.run(run()).tokens) == 4
    assert engine.notes == [
        "steps with adapters are no CUDA graphs: every layer waits for Python to launch it"
    ]
    with pytest.raises(EngineError, match="AssertionError"):
        asyncio.run(engine.sample(prompt(5), SamplingParams(4)))
