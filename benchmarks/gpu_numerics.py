"""For gpu.py: whether what is measured there computes the right numbers."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from unittest import mock

import numpy as np

import silva  # noqa: F401  # isort: skip  (before torch, which reads at its start what this sets)
import torch
from common import Row
from forests import drawn, group, row, turn_tree
from gpu_setup import SHAPES, Machine, engine, load

from silva.engines.local.engine import LocalEngine
from silva.models import trie_attention
from silva.models.loading import LoadedModel
from silva.trainer import policy
from silva.trainer.policy import pack, token_logprobs
from silva.types import Completion, Sample, SamplingParams

WITHOUT_FLEX: tuple[int, dict[str, int]] = sys.maxsize, {"cuda": sys.maxsize}


@contextmanager
def attending(flex_least: int, one_product: dict[str, int]) -> Iterator[None]:
    """Tries of so many tokens through FlexAttention, other ones of so many pairs as one product."""
    with (
        mock.patch.object(policy, "FLEX_MIN_TOKENS", flex_least),
        mock.patch.object(trie_attention, "ONE_PRODUCT", one_product),
    ):
        yield


def numerics(there: Machine) -> tuple[list[Row], bool]:
    gpu = there.device.type == "cuda"
    shape = dataclasses.replace(SHAPES["0.6B" if gpu else "toy"], layers=2)
    narrow = load(shape, there.device, torch.bfloat16, "bf16")
    wide = load(shape, there.device, torch.float32, "fp32")
    wide.model.load_state_dict(narrow.model.state_dict())
    rng = np.random.default_rng(1)
    # No lengths are multiples of FlexAttention's blocks; on a GPU the trie goes through it, no row does.
    samples = turn_tree(drawn(rng, wide), 147 if gpu else 13, 4, (2, 4), 2)[0]
    samples += group(drawn(rng, wide), 310 if gpu else 40, 5, 61 if gpu else 9)
    weights = torch.from_numpy(rng.normal(size=sum(int((s.loss_weights > 0).sum()) for s in samples)))
    weights = weights.to(there.device, torch.float32)
    exact = _logprobs_gradient(wide, [[s] for s in samples], weights)
    rows, good = [], True

    def held(metric: str, value: float, limit: float, unit: str = "") -> None:
        nonlocal good
        good &= value <= limit  # false for NaN
        rows.append(Row("numerics", metric, value, unit, target=f"<= {limit:.3g}"))

    default = policy.FLEX_MIN_TOKENS, trie_attention.ONE_PRODUCT, None
    ways: dict[str, tuple[int, dict[str, int], int | None]] = {"trie": default}
    if gpu:
        ways["trie, in one product"] = *WITHOUT_FLEX, None
        ways["trie, by segment"] = sys.maxsize, {}, None
        ways["trie, chunk by chunk"] = *default[:2], 500
    for way, (flex_least, one_product, budget) in ways.items():
        with attending(flex_least, one_product):
            ours = _logprobs_gradient(wide, [samples], weights, budget)
        held(
            f"fp32, {way} and one row at a time: log-probabilities",
            float((ours[0] - exact[0]).abs().max()),
            1e-4,
            "nats",
        )
        held(f"fp32, {way} and one row at a time: gradient", _apart(ours, exact), 1e-3)
    flat = _logprobs_gradient(narrow, [[s] for s in samples], weights)
    ours = _logprobs_gradient(narrow, [samples], weights)
    held("bf16 one row at a time and fp32: gradient", _apart(flat, exact), 0.1)
    held("bf16 trie and fp32: gradient", _apart(ours, exact), 1.5 * _apart(flat, exact))
    held("bf16 trie and fp32: log-probabilities, RMS", _rms(ours, exact), 1.5 * _rms(flat, exact), "nats")
    held("fp32, sampling and one row at a time: log-probabilities", _sampled_apart(wide), 1e-4, "nats")
    return rows, good


Computed = tuple[torch.Tensor, list[torch.Tensor]]


def _logprobs_gradient(
    loaded: LoadedModel,
    batches: Sequence[Sequence[Sample]],
    weights: torch.Tensor,
    budget: int | None = None,
) -> Computed:
    """Log-probabilities [N] in float32, and the gradient of their weighted sum."""
    loaded.model.zero_grad(set_to_none=True)
    parts, start = [], 0
    for samples in batches:
        logprobs = token_logprobs(loaded, pack(loaded, samples), budget=budget).logprobs
        (logprobs * weights[start : start + len(logprobs)]).sum().backward()
        start += len(logprobs)
        parts.append(logprobs.detach())
    gradient = [p.grad.float().clone() for p in loaded.model.parameters()]
    loaded.model.zero_grad(set_to_none=True)
    return torch.cat(parts), gradient


def _rms(ours: Computed, theirs: Computed) -> float:
    return float((ours[0] - theirs[0]).square().mean().sqrt())


def _apart(ours: Computed, theirs: Computed) -> float:
    """Norm of the difference of the gradients over the norm of the second."""
    norm = torch.nn.utils.get_total_norm
    return float(norm([a - b for a, b in zip(ours[1], theirs[1], strict=True)]) / norm(theirs[1]))


def _sampled_apart(loaded: LoadedModel) -> float:
    """Largest gap between the log-probabilities of sampled tokens by the engine and by the trainer."""
    rng, width = np.random.default_rng(4), loaded.model.config.vocab_size
    lengths, new = (700, 700, 700, 690, 300, 257, 40, 1, 513, 90), 24  # a group, a fork of it, and others
    shared = rng.integers(5, width, max(lengths)).tolist()
    prompts = [shared[:n] if i < 4 else rng.integers(5, width, n).tolist() for i, n in enumerate(lengths)]

    async def sample(sampler: LocalEngine) -> list[Completion]:
        params = [SamplingParams(new, seed=seed) for seed in range(len(prompts))]
        return await asyncio.gather(*map(sampler.sample, prompts, params))

    with ThreadPoolExecutor(1) as compute:
        found = asyncio.run(sample(engine(loaded, len(prompts), compute)))
    gaps = [0.0]
    for prompt, completion in zip(prompts, found, strict=True):
        tokens = np.array([*prompt, *completion.tokens])
        batch = pack(loaded, [row(tokens, [(len(prompt), len(tokens))])])
        with torch.no_grad():
            trained = token_logprobs(loaded, batch).logprobs.tolist()
        gaps += [abs(a - b) for a, b in zip(trained, completion.logprobs, strict=True)]
    return max(gaps)
