"""Log-probabilities of trained tokens against full logits, whole and in chunks, with their gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma2Config, Gemma2ForCausalLM

from silva.errors import RecordError
from silva.models import attention
from silva.models.loading import LoadedModel
from silva.trainer.head import CHUNK_ROWS, Head
from silva.trainer.policy import check_rows, pack, token_logprobs, trained
from silva.types import Sample

Make = Callable[..., LoadedModel]
Rows = Callable[..., list[Sample]]
Naive = Callable[[LoadedModel, list[Sample]], tuple[torch.Tensor, torch.Tensor]]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 5e-6)])
def test_equal_to_full_logits(
    tiny: Make, make_samples: Rows, dtype: str, tolerance: float, naive: Naive
) -> None:
    loaded, samples = tiny(dtype), make_samples([9, 4, 30, 17])
    found = token_logprobs(loaded, pack(loaded, samples))
    logprobs, entropies = naive(loaded, samples)
    assert found.logprobs.dtype == getattr(torch, dtype)
    torch.testing.assert_close(found.logprobs, logprobs, rtol=0, atol=tolerance)
    torch.testing.assert_close(found.entropies, entropies, rtol=0, atol=tolerance)
    assert found.rows.bincount().tolist() == [int((s.loss_weights > 0).sum()) for s in samples]


def test_each_token_has_its_own_temperature(tiny: Make, make_samples: Rows, naive: Naive) -> None:
    loaded, (sample,) = tiny("float64"), make_samples([20])
    mixed = sample.replace(temperatures=np.linspace(0.5, 1.5, 20))
    found = token_logprobs(loaded, pack(loaded, [mixed]))
    torch.testing.assert_close(found.logprobs, naive(loaded, [mixed])[0], rtol=0, atol=1e-12)


def test_bfloat16_models_still_get_float32_logprobs(tiny: Make, make_samples: Rows) -> None:
    loaded, samples = tiny("bfloat16"), make_samples([12, 7])
    found = token_logprobs(loaded, pack(loaded, samples))
    assert found.logprobs.dtype == torch.float32
    logits = loaded.model(input_ids=torch.from_numpy(samples[0].tokens)[None]).logits[0].float() / 0.7
    where = int(np.flatnonzero(samples[0].loss_weights)[0])
    exact = torch.log_softmax(logits[where - 1], -1)[samples[0].tokens[where]]
    assert abs(float((found.logprobs[0] - exact).detach())) < 0.02


@pytest.mark.parametrize("entropy_grad", [False, True])
def test_chunks_change_neither_values_nor_gradients(
    tiny: Make, make_samples: Rows, entropy_grad: bool
) -> None:
    loaded, samples = tiny("float64"), make_samples([120] * 5)  # about 300 tokens: three chunks
    parameters = [p for p in loaded.model.parameters()]
    results = []
    for chunk_bytes in (2**40, 0):
        found = token_logprobs(
            loaded, pack(loaded, samples), chunk_bytes=chunk_bytes, entropy_grad=entropy_grad
        )
        assert found.entropies.requires_grad == entropy_grad
        total = found.logprobs.square().sum() + found.entropies.sum()
        results.append((found, torch.autograd.grad(total, parameters)))
    (whole, whole_grads), (chunked, chunked_grads) = results
    assert len(whole.logprobs) > 256
    torch.testing.assert_close(chunked.logprobs, whole.logprobs, rtol=0, atol=1e-13)
    torch.testing.assert_close(chunked.entropies, whole.entropies, rtol=0, atol=1e-13)
    torch.testing.assert_close(chunked_grads, whole_grads, rtol=1e-10, atol=1e-10)


class Unordered(TorchDispatchMode):
    """Sums over repeated places that threads of a CPU make in the order in which they come."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "index_put" in str(func) and len(args) > 3 and args[3]:  # accumulate
            (places,) = (x for x in args[1] if x is not None)
            if places.dtype == torch.int64 and len(places.unique()) < len(places):
                self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("budget", [None, 12])
def test_gradients_of_forks_are_summed_in_a_fixed_order(
    tiny: Make, make_samples: Rows, budget: int | None
) -> None:
    loaded, (a, b) = tiny(), make_samples([20, 20])
    forked = b.replace(tokens=np.concatenate([a.tokens[:11], b.tokens[11:]]), loss_weights=a.loss_weights)
    batch = pack(loaded, [a, forked], least=1)
    assert len(batch.predictors.unique()) < len(batch.predictors) < len(batch.pairs)
    with Unordered() as unordered:
        token_logprobs(loaded, batch, budget=budget).logprobs.sum().backward()
        assert not unordered.seen
        batch.temperatures.clone().requires_grad_()[batch.pairs].sum().backward()
    assert unordered.seen  # what it looks for does exist


def test_chunks_keep_no_logits_for_the_backward_pass(tiny: Make, make_samples: Rows) -> None:
    loaded, samples = tiny(), make_samples([120] * 5)

    def kept(chunk_bytes: int) -> int:
        """Rows of all saved tensors that are as wide as the vocabulary."""
        shapes: list[torch.Size] = []

        def seen(tensor: torch.Tensor) -> torch.Tensor:
            shapes.append(tensor.shape)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(seen, lambda tensor: tensor):
            token_logprobs(loaded, pack(loaded, samples), chunk_bytes=chunk_bytes)
        return sum(s[0] for s in shapes if len(s) == 2 and s[1] == loaded.model.config.vocab_size)

    assert kept(2**40) > 256
    assert kept(0) == 0


def test_rows_of_the_head_at_once_are_those_of_the_device(
    tiny: Make, make_samples: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, samples = tiny(), make_samples([120] * 5)
    batch, seen = pack(loaded, samples), list[int]()

    def whole(self: Head, hidden: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(len(hidden))
        return hidden[:, 0], hidden[:, 1]

    monkeypatch.setattr(Head, "_whole", whole)
    monkeypatch.setitem(CHUNK_ROWS, "cpu", 100)
    with torch.no_grad():
        token_logprobs(loaded, batch, chunk_bytes=0)
    assert sum(seen) == len(batch.predictors) and set(seen[:-1]) == {100} and seen[-1] <= 100


def test_entropy_gradient_by_finite_differences(tiny: Make, make_samples: Rows) -> None:
    loaded, samples = tiny("float64"), make_samples([12, 8])
    weight = loaded.model.get_parameter("model.layers.1.mlp.up_proj.weight")

    def entropy() -> torch.Tensor:
        return token_logprobs(loaded, pack(loaded, samples), entropy_grad=True).entropies.sum()

    (gradient,) = torch.autograd.grad(entropy(), [weight])
    direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values = []
    for step in (1e-4, -1e-4):
        with torch.no_grad():
            weight += step * direction
            values.append(float(entropy()))
            weight -= step * direction
    assert float((gradient * direction).sum()) == pytest.approx((values[0] - values[1]) / 2e-4, rel=1e-5)


def test_greedy_tokens_cannot_be_trained(tiny: Make, make_samples: Rows) -> None:
    (sample,) = make_samples([6])
    temperatures = sample.temperatures.copy()
    temperatures[5] = 0.0
    with pytest.raises(RecordError, match=r"sample of t0: token 5 was sampled at temperature 0\.0"):
        check_rows(tiny(), [sample.replace(temperatures=temperatures)])


@pytest.mark.parametrize("weight", [np.nan, -0.5])
def test_a_weight_must_be_a_share(make_samples: Rows, weight: float) -> None:
    (sample,) = make_samples([6])
    with pytest.raises(RecordError, match=f"sample of t0: got a loss weight of {weight}, expected 0 or more"):
        trained(sample.replace(loss_weights=np.array([0, 1, 1, weight, 0, 1])))


SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "pad_token_id": 0,
}


def test_soft_caps_come_before_the_temperature(tiny: Make, make_samples: Rows, naive: Naive) -> None:
    torch.manual_seed(0)
    config = Gemma2Config(**SMALL, final_logit_softcapping=0.05, attn_logit_softcapping=None)
    config._attn_implementation = attention.NAME
    loaded = replace(tiny(), model=Gemma2ForCausalLM(config).eval())
    samples = [s.replace(tokens=s.tokens % 64) for s in make_samples([9, 5])]
    found = token_logprobs(loaded, pack(loaded, samples))
    torch.testing.assert_close(found.logprobs, naive(loaded, samples)[0], rtol=0, atol=5e-6)
    assert found.logprobs.min().item() > -np.log(64) - 2 * 0.05 / 0.7  # the cap is at work
