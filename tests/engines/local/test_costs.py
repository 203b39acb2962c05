"""What requests must not cost others: places after they are cancelled, time for long stop strings."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.engines.local.test_engine import Stepped, ask, prompt

from silva.models.loading import LoadedModel
from silva.types import Completion, SamplingParams


def test_requests_that_are_cancelled_before_they_run_are_gone_at_once(
    tiny_model: LoadedModel, stepped: Stepped
) -> None:
    """Those that hold the places may take minutes more."""

    async def run() -> None:
        engine, stepper = stepped(tiny_model, max_concurrent=1, cached_sequences=0)
        first = ask(engine, prompt(20), 100)
        await stepper.tick(2)
        others = [ask(engine, prompt(30, i), 1) for i in range(50)]
        await stepper.settle()
        assert len(engine.batch.waiting) == 50
        for each in others[10:]:
            each.cancel()
        await stepper.settle()
        assert len(engine.batch.waiting) == 10 and engine.running == 1
        first.cancel()
        while not all(each.done() for each in others):
            await stepper.tick()
        assert all(each.result().tokens for each in others[:10])

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize("ends", [False, True])
def test_a_long_stop_string_is_looked_for_only_where_it_may_end(
    tiny_model: LoadedModel, stepped: Stepped, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    decode, lengths = tiny_model.tokenizer.decode, list[int]()

    def counted(tokens: Any, *args: Any, **options: Any) -> str:
        lengths.append(len(tokens))
        return decode(tokens, *args, **options)

    async def run(*stop: str) -> Completion:
        engine, stepper = stepped(tiny_model, max_concurrent=1)
        asked = asyncio.ensure_future(engine.sample(prompt(20), SamplingParams(200, seed=3, stop=stop)))
        await stepper.settle()
        while not asked.done():
            await stepper.tick()
        return asked.result()

    whole = asyncio.run(run())
    said = decode(whole.tokens[:150])
    monkeypatch.setattr(tiny_model.tokenizer, "decode", counted)
    found = asyncio.run(run(said[-60:] if ends else said[-60:-1] + "\x00\x00"))
    if ends:
        assert found.stop_reason == "stop_string" and len(found.tokens) <= 150
        assert found.tokens == whole.tokens[: len(found.tokens)]
    else:
        assert found.tokens == whole.tokens and max(lengths) <= 36
