"""`trainer.exact`: the trainer's log-probabilities have the bits that the sampler recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.test_families import TAKEN, saved

from silva.config.sections import Lora, TinyModel
from silva.engines.local.engine import LocalEngine
from silva.engines.settings import LocalEngineSettings
from silva.errors import CapabilityError
from silva.models import blocked_attention, steady
from silva.models.loading import LoadedModel, load_model
from silva.models.prepacked import JoinedLinear
from silva.models.same_bits import RowRules
from silva.trainer import exact
from silva.trainer.learner import Learner
from silva.trainer.settings import LocalTrainerSettings
from silva.types import LossSpec, OptimParams, Sample, SamplingParams, Snapshot

pytestmark = pytest.mark.same_bits

LENGTHS = (5, 250, 290)
"""Prompts: sums over positions are cut at 256."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """With several, some machines need one in float64, which is refused."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make_engine() -> Iterator[Callable[..., LocalEngine]]:
    with ThreadPoolExecutor(1) as compute:
        yield lambda loaded, **settings: LocalEngine(loaded, LocalEngineSettings(**settings), compute)


def model(dtype: str = "float32", *, lora: bool = False, **others: Any) -> LoadedModel:
    """With weights as large as training makes them, and adapters that say something."""
    adapters = Lora(rank=4, alpha=8.0) if lora else None
    settings = TinyModel(
        layers=2, width=96, heads=4, kv_heads=2, context=512, dtype=dtype, lora=adapters, **others
    )
    loaded = load_model(settings, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in loaded.model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.1, generator=generator)
            elif weight.ndim > 1:
                weight.mul_(3)
    return loaded


def sampled(
    engine: LocalEngine, temperature: float = 0.7, lengths: tuple[int, ...] = LENGTHS
) -> list[Sample]:
    """Two replies to each of some prompts, two of which begin alike; and turns that go on from replies."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 256, length).tolist() for length in lengths]
    prompts.append([*prompts[-1][: len(prompts[-1]) * 9 // 10], 3, 4])

    async def reply(tokens: list[int], seed: int) -> list[tuple[list[int], Any]]:
        parts = []
        for turn in range(2):
            params = SamplingParams(12, temperature=temperature, seed=2 * seed + turn)
            found = await engine.sample(tokens, params)
            parts.append((tokens, found))
            tokens = [*tokens, *found.tokens, 9, 8, 7]
        return parts

    async def play() -> list[list[tuple[list[int], Any]]]:
        replies = [reply(prompt, 2 * i + j) for i, prompt in enumerate(prompts) for j in range(2)]
        return await asyncio.gather(*replies)

    return [sample_of(parts, temperature, str(i)) for i, parts in enumerate(asyncio.run(play()))]


def sample_of(parts: list[tuple[list[int], Any]], temperature: float, name: str) -> Sample:
    prompt, last = parts[-1]
    tokens = np.array([*prompt, *last.tokens])
    logprobs = np.full(len(tokens), np.nan)
    for before, found in parts:
        logprobs[len(before) : len(before) + len(found.tokens)] = found.logprobs
    mask = ~np.isnan(logprobs)
    return Sample(
        tokens=tokens,
        loss_weights=np.where(mask, 1 / mask.sum(), 0.0),
        logprobs=logprobs,
        temperatures=np.full(len(tokens), temperature),
        versions=np.where(mask, 0, -1),
        trajectory=name,
        group="g",
        advantages=np.where(mask, float(len(name) % 2) - 0.5, 0.0),
    )


def learner(loaded: LoadedModel, **settings: Any) -> Learner:
    chosen = LocalTrainerSettings(**{"exact": True, "self_check": False} | settings)
    return Learner(exact.exact_model(loaded, chosen) if chosen.exact else loaded, chosen, seed=0)


def apart(learner: Learner, samples: list[Sample]) -> float:
    """The largest difference between what the trainer computes and what was recorded."""
    (found,) = (learner.score(samples, frozenset({"logprobs"})).logprobs,)
    assert found is not None
    return max(float(np.nanmax(np.abs(a - s.logprobs))) for a, s in zip(found, samples, strict=True))


def gradient(made: Learner, samples: list[Sample]) -> tuple[dict[str, float], torch.Tensor]:
    metrics = made.forward_backward(samples, LossSpec("clipped", {"entropy_coef": 0.1}))
    return metrics, torch.cat(
        [p.grad.flatten() for p in made.stepper.parameters.values() if p.grad is not None]
    )


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "lora"), [("float32", False), ("float64", True), ("bfloat16", False)])
def test_bits_are_those_of_the_sampler_and_the_gradient_is_the_ordinary_one(
    dtype: str, lora: bool, make_engine: Callable[..., LocalEngine]
) -> None:
    """On one trie, on one that is walked, and again after an update."""
    loaded = model(dtype, lora=lora)
    engine = make_engine(loaded)
    samples, plain = sampled(engine), learner(loaded, exact=False)
    assert apart(plain, samples) > 0
    metrics, expected = gradient(plain, samples)
    plain.drop_gradients()
    assert metrics["mismatch_kl"] > 0
    for budget in (4096, 400):
        made = learner(loaded, micro_batch_tokens=budget)
        assert apart(made, samples) == 0, budget
        metrics, found = gradient(made, samples)
        assert metrics["mismatch_kl"] == 0 and metrics["ratio"] == 1, budget
        gap = float((found - expected).norm() / expected.norm())
        assert 0 < gap < {"float32": 1e-5, "float64": 1e-13, "bfloat16": 3e-2}[dtype], budget
    made.optim_step(OptimParams(lr=1e-2))
    assert apart(made, samples) > 1e-3
    asyncio.run(engine.load(Snapshot(1)))
    assert apart(made, sampled(engine)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt_neox", "gemma3_text", "qwen2", "gpt2"])
def test_families_have_these_bits(
    family: str, make_engine: Callable[..., LocalEngine], tmp_path: Path
) -> None:
    """With norms, biases, rotations and activations of their own, which transformers computes."""
    config = next(config for config in TAKEN if config.model_type == family)
    loaded = load_model(saved(config, tmp_path), seed=0)
    with torch.no_grad():
        for name, weight in loaded.model.named_parameters():
            if name.endswith("bias"):
                weight.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    samples, made = sampled(make_engine(loaded), lengths=(3, 12)), learner(loaded)
    assert apart(made, samples) == 0
    gradient(made, samples)
    made.optim_step(OptimParams(lr=1e-2))
    assert apart(made, samples) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("where", ["product", "attention", "head"])
def test_a_sum_in_another_order_is_seen(
    where: str, make_engine: Callable[..., LocalEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise zero would say that nothing was looked at."""
    loaded = model()
    samples, made = sampled(make_engine(loaded)), learner(loaded)

    def turned(group: JoinedLinear, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([F.linear(x.flip(-1), layer.weight.flip(-1)) for layer in group.layers], -1)

    def whole(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        probabilities = logits.softmax(-1)
        return logits.logsumexp(-1), probabilities, probabilities

    match where:
        case "product":
            monkeypatch.setattr(JoinedLinear, "_made", turned)
        case "attention":
            monkeypatch.setattr(blocked_attention, "BLOCK", 32)
        case "head":
            monkeypatch.setattr(exact, "log_normaliser", whole)
    assert 0 < apart(made, samples) < 1e-3


@pytest.mark.parametrize(
    ("rules", "settings", "expected"),
    [
        (RowRules(hold=False), {}, "the last bits of a product depend on how many rows"),
        (RowRules(one_thread=True), {}, "set placement.threads = 1"),
        (RowRules(), {"gradient_checkpointing": True}, "trainer.gradient_checkpointing computes"),
        (RowRules(), {"ranks": 2}, "trainer.ranks = 2"),
    ],
)
def test_what_cannot_have_these_bits_is_refused(
    rules: RowRules, settings: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steady, "probe", lambda *_, **__: rules)
    with pytest.raises(CapabilityError, match=f"trainer.exact = true: .*{expected}"):
        learner(model(), **settings)


def test_dropout_of_adapters_is_refused(tiny: Callable[..., LoadedModel]) -> None:
    with pytest.raises(CapabilityError, match=r"trainer.exact = true: model.lora.dropout"):
        learner(tiny(lora=True, dropout=0.1))


def test_entropies_are_those_of_the_distribution_also_with_impossible_tokens() -> None:
    """Of a large vocabulary, and with the same bits in any company."""
    logits = torch.randn(3, 49_153, generator=torch.Generator().manual_seed(0)) * 4
    logits[1, 7] = -torch.inf

    def entropies(rows: torch.Tensor) -> torch.Tensor:
        targets = torch.zeros(len(rows), 1, dtype=torch.int64)
        found: torch.Tensor = exact.ExactLogprobs.apply(rows, targets)[1]  # type: ignore[no-untyped-call]
        return found

    expected = torch.distributions.Categorical(logits=logits.double()).entropy()
    torch.testing.assert_close(entropies(logits).double(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(entropies(logits[:1]), entropies(logits)[:1], rtol=0, atol=0)
