"""What a request gets has the same bits whatever else runs, in any order, however it is cut or cached."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from silva.config.sections import TinyModel
from silva.engines.local.engine import LocalEngine
from silva.models.loading import LoadedModel, load_model
from silva.types import Completion, SamplingParams

Stepped = Callable[..., tuple[LocalEngine, Any]]
Job = tuple[list[int], SamplingParams]
Bits = list[tuple[tuple, ...]]

pytestmark = pytest.mark.same_bits


def make_jobs(vocabulary: int, lengths: Sequence[int], max_tokens: int) -> list[Job]:
    """Prompts of these lengths; every third begins like the one before, every fifth equals it."""
    rng, jobs = random.Random(0), []
    for i, length in enumerate(lengths):
        tokens = [rng.randrange(vocabulary) for _ in range(length)]
        if i % 5 == 4:
            tokens = jobs[-1][0]
        elif i % 3 == 2:
            tokens = jobs[-1][0][: rng.randrange(1, len(jobs[-1][0]))] + tokens[:40]
        params = SamplingParams(
            max_tokens=max_tokens, temperature=(1.0, 0.7, 0.0)[i % 3], top_k=(0, 5)[i % 2], seed=i
        )
        jobs.append((tokens, params))
    return jobs


# Decoding and prompts cross positions 64, 256 and 512, where sums over positions are cut.
LENGTHS = (1, 20, 60, 64, 65, 250, 255, 256, 257, 300, 505, 515, 700, 3)
TINY_JOBS = make_jobs(256, LENGTHS, 14)


@dataclass(frozen=True)
class Schedule:
    order: tuple[int, ...]
    delays: tuple[int, ...]  # engine steps before each request arrives
    max_concurrent: int = 64
    cached_sequences: int = 64
    prefill_tokens: int = 512
    disturb: bool = False  # other requests come and are cancelled


def play(stepped: Stepped, loaded: LoadedModel, jobs: Sequence[Job], schedule: Schedule) -> Bits:
    names = ("max_concurrent", "cached_sequences", "prefill_tokens")
    engine, stepper = stepped(loaded, **{name: getattr(schedule, name) for name in names})

    async def run() -> list[Completion]:
        tasks: dict[int, asyncio.Future] = {}
        for number, delay in zip(schedule.order, schedule.delays, strict=True):
            for _ in range(delay):
                await stepper.settle()
                if stepper.jobs:
                    await stepper.tick()
            tasks[number] = asyncio.ensure_future(engine.sample(*jobs[number]))
            if schedule.disturb and number % 3 == 0:
                tokens, params = jobs[number]
                noise = asyncio.ensure_future(engine.sample([*tokens[: number * 9 + 1], 7], params))
                await stepper.tick()
                noise.cancel()
        await stepper.settle()
        while not all(task.done() for task in tasks.values()):
            await stepper.tick()
        return [tasks[number].result() for number in range(len(jobs))]

    return [(c.tokens, c.logprobs, c.raw_logprobs, c.entropies, (c.stop_reason,)) for c in asyncio.run(run())]


def grown(loaded: LoadedModel) -> LoadedModel:
    """With weights as large as training makes them: with small ones the last bits of attention never show."""
    with torch.no_grad():
        for weight in loaded.model.parameters():
            if weight.ndim > 1:
                weight.mul_(8)
    return loaded


def alone(stepped: Stepped, loaded: LoadedModel, jobs: Sequence[Job]) -> Bits:
    """Each request in an engine of its own, its prompt in one piece."""
    return [play(stepped, loaded, [job], Schedule((0,), (0,), 1, 0, 1024))[0] for job in jobs]


@pytest.fixture(scope="module")
def expected() -> dict[str, Bits]:
    return {}


def test_mkl_was_told_before_torch_loaded() -> None:
    assert os.environ["MKL_CBWR"].endswith("STRICT")


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    return Schedule(
        order=tuple(draw(st.permutations(range(len(TINY_JOBS))))),
        delays=tuple(draw(st.lists(st.integers(0, 4), min_size=len(TINY_JOBS), max_size=len(TINY_JOBS)))),
        max_concurrent=draw(st.sampled_from([1, 2, 3, 7, 64])),
        cached_sequences=draw(st.sampled_from([0, 1, 2, 5, 64])),
        prefill_tokens=draw(st.sampled_from([7, 37, 64, 100, 255, 512, 2048])),
        disturb=draw(st.booleans()),
    )


@given(schedule=schedules())
@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@pytest.mark.slow
def test_any_schedule_gives_the_same_bits(
    tiny_model: LoadedModel, stepped: Stepped, expected: dict[str, Bits], schedule: Schedule
) -> None:
    reference = expected.setdefault("tiny", []) or alone(stepped, tiny_model, TINY_JOBS)
    expected["tiny"] = reference
    assert play(stepped, tiny_model, TINY_JOBS, schedule) == reference


@pytest.mark.slow
@pytest.mark.parametrize(("width", "heads", "kv_heads"), [(64, 4, 4), (32, 8, 8), (16, 8, 4), (36, 2, 1)])
def test_odd_shapes_do_too(stepped: Stepped, width: int, heads: int, kv_heads: int) -> None:
    """Heads that share no keys, heads of 4 and 2 numbers (other kernels for a single query, both), and an MLP
    of 144, which ends within a vector."""
    settings = TinyModel(layers=1, width=width, heads=heads, kv_heads=kv_heads, context=1024)
    loaded, jobs = grown(load_model(settings, seed=0)), TINY_JOBS[:9]
    reference = alone(stepped, loaded, jobs)
    for seed, prefill_tokens in enumerate((512, 101, 7)):
        rng = random.Random(seed)
        order, delays = tuple(rng.sample(range(9), 9)), tuple(rng.choices(range(4), k=9))
        schedule = Schedule(order, delays, 5, seed, prefill_tokens, disturb=True)
        assert play(stepped, loaded, jobs, schedule) == reference


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_a_reply_has_the_bits_of_the_same_tokens_in_a_prompt(stepped: Stepped, kv_heads: int) -> None:
    """The next turn of a dialogue finds what was decoded in the cache, or recomputes it after an eviction."""
    loaded = grown(
        load_model(TinyModel(layers=2, width=64, heads=4, kv_heads=kv_heads, context=1024), seed=0)
    )
    jobs = TINY_JOBS[:8]
    replies = alone(stepped, loaded, jobs)
    follow = [
        ([*prompt, *reply[0], 1, 2, 3], params) for (prompt, params), reply in zip(jobs, replies, strict=True)
    ]
    schedule = Schedule(tuple(range(16)), (0,) * 8 + (60,) + (0,) * 7)  # when all replies are there
    assert play(stepped, loaded, [*jobs, *follow], schedule) == replies + alone(stepped, loaded, follow)


@pytest.mark.slow
def test_any_number_of_threads_that_share_the_work_does(tiny_model: LoadedModel, stepped: Stepped) -> None:
    """With three threads shares end within a vector: torch's own SiLU then depends on the batch."""
    before = torch.get_num_threads()
    jobs = TINY_JOBS[8:]
    try:
        torch.set_num_threads(3)
        reference = alone(stepped, tiny_model, jobs)
        order, delays = tuple(range(len(jobs)))[::-1], (0, 0, 1, 0, 2, 0)
        for prefill_tokens in (701, 2048):
            schedule = Schedule(order, delays, prefill_tokens=prefill_tokens)
            assert play(stepped, tiny_model, jobs, schedule) == reference
    finally:
        torch.set_num_threads(before)


def test_smollm2_under_several_schedules(smollm2: LoadedModel, stepped: Stepped) -> None:
    jobs = make_jobs(49152, (40, 251, 64, 300, 17, 508), 8)
    reference = alone(stepped, smollm2, jobs)
    for schedule in (
        Schedule(tuple(range(6)), (0,) * 6),
        Schedule((5, 3, 1, 0, 2, 4), (0, 1, 0, 3, 2, 0), max_concurrent=3, cached_sequences=0),
        Schedule((4, 2, 0, 5, 1, 3), (2, 0, 0, 1, 0, 5), prefill_tokens=100, disturb=True),
        Schedule(tuple(range(6)), (0,) * 6, max_concurrent=1, cached_sequences=1, prefill_tokens=37),
    ):
        assert play(stepped, smollm2, jobs, schedule) == reference
