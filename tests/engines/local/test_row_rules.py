"""Sampling keeps to the rules that were probed. They are forced here, whatever the machine needs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import torch
from torch import nn

from silva.config.sections import Lora, TinyModel
from silva.engines.local.engine import LocalEngine
from silva.models import steady
from silva.models.loading import LoadedModel, load_model
from silva.models.same_bits import RowRule, RowRules
from silva.types import Completion, SamplingParams

FORCED = [
    RowRules(),
    RowRules(linear=RowRule(4), attention=RowRule(4)),
    RowRules(linear=RowRule(4, 4), attention=RowRule(4, 4), matrices=3, lanes=128),
    RowRules(lanes=256),
    RowRules(one_thread=True),
    RowRules(hold=False),
]


def sample(engine: LocalEngine) -> list[Completion]:
    """Twelve requests of which some share a prompt, arriving together."""

    async def run() -> list[Completion]:
        requests = [
            engine.sample(list(range(5 + n // 3)), SamplingParams(max_tokens=4 + n, seed=n))
            for n in range(12)
        ]
        return list(await asyncio.gather(*requests))

    return asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize("rules", FORCED, ids=lambda rules: rules.describe())
def test_sampling_under_any_rules(
    rules: RowRules,
    tiny_model: LoadedModel,
    make_engine: Callable[..., LocalEngine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The numbers stay, and every product has the rows it needs."""
    expected = sample(make_engine(tiny_model))
    monkeypatch.setattr(steady, "probe", lambda *_, **__: rules)
    engine = make_engine(tiny_model)
    assert engine.rules == rules
    rows: list[int] = []
    threads: set[int] = set()

    def seen(tokens: torch.Tensor, step: object) -> torch.Tensor:
        rows.append(len(tokens))
        threads.add(torch.get_num_threads())
        return decoder(tokens, step)

    decoder, engine.batch.decoder = engine.batch.decoder, seen  # type: ignore[assignment]
    compute = engine._compute  # each thread has its own number of threads
    compute.submit(torch.set_num_threads, 2).result()
    got = sample(engine)
    assert compute.submit(torch.get_num_threads).result() == 2  # as it was
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.tokens == theirs.tokens
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
    assert rows and all(rules.linear.padded(n) == n for n in rows)
    assert not rules.one_thread or threads == {1}


def test_small_layers_with_a_rule_of_their_own_get_their_rows(
    make_engine: Callable[..., LocalEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = TinyModel(layers=1, width=32, heads=4, kv_heads=2, context=64, lora=Lora(rank=4))
    loaded, rows = load_model(settings, seed=0), list[int]()
    forward = nn.Linear.forward

    def counted(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        if (self.in_features, self.out_features) == (32, 4):
            rows.append(x.numel() // 32)
        return forward(self, x)

    monkeypatch.setattr(nn.Linear, "forward", counted)
    monkeypatch.setattr(steady, "probe", lambda *_, **__: RowRules(alone={(32, 4): RowRule(16)}))
    engine = make_engine(loaded)
    rows.clear()  # those of its check
    sample(engine)
    assert rows and min(rows) >= 16
