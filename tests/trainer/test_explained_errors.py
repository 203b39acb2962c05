"""What goes wrong in an update: numbers that are not finite, memory, nothing to train."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from tests.trainer.updates import REINFORCE, Make, Rows, gradients, make_trainer, optim_step, train

from silva.config.sections import Optimizer
from silva.errors import CapabilityError, NonFiniteError, OutOfMemory
from silva.models import memory
from silva.trainer import learner
from silva.trainer.explained_errors import refuse_too_large


def test_nonfinite_updates_are_skipped_then_refused(tiny: Make, make_samples: Rows) -> None:
    loaded, samples = tiny(), make_samples([9, 5])
    bad = [samples[0].replace(advantages=np.full(9, np.inf)), samples[1]]
    schedule = Optimizer(lr=1e-2, schedule="linear")  # 10 updates
    trainer = make_trainer(loaded, optimizer=schedule, max_nonfinite=2)
    before = {n: p.clone() for n, p in loaded.model.named_parameters()}
    skipped = train(trainer, bad)
    assert skipped["nonfinite"] == 1.0
    assert all(torch.equal(before[n], p) for n, p in loaded.model.named_parameters())
    good = train(trainer, samples)  # in between: the count of skips in a row starts again
    assert good["nonfinite"] == 0.0 and np.isfinite(good["grad_norm"])
    assert good["lr"] == pytest.approx(1e-2 * 8 / 9)  # the schedule went on
    train(trainer, bad)
    with pytest.raises(NonFiniteError) as caught:
        train(trainer, bad)
    for words in ("update 3", "2 updates in a row", "t0, t1", "first model.", "Lower trainer.optimizer.lr"):
        assert words in str(caught.value)
    assert gradients(loaded) == {}


def test_a_nonfinite_gradient_alone_is_caught_too(tiny: Make, make_samples: Rows) -> None:
    loaded, samples = tiny(), make_samples([9])
    trainer = make_trainer(loaded, max_nonfinite=1)
    asyncio.run(trainer.forward_backward(samples, REINFORCE))
    name = "model.layers.1.mlp.up_proj.weight"
    loaded.model.get_parameter(name).grad[3, 4] = float("nan")  # type: ignore[index]
    with pytest.raises(NonFiniteError, match=f"the gradient of 1 of 20 parameters, first {name}"):
        asyncio.run(optim_step(trainer))


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
    ],
)
def test_out_of_memory_names_what_to_lower(
    tiny: Make, make_samples: Rows, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    loaded, samples = tiny(), make_samples([9, 30])
    trainer = make_trainer(loaded, micro_batch_tokens=30)
    asyncio.run(trainer.forward_backward(samples, REINFORCE))

    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(learner, "token_logprobs", fail)
    with pytest.raises(OutOfMemory, match=r"training 1 rows of up to 30 tokens.*_tokens \(now 30\)") as got:
        asyncio.run(trainer.forward_backward(samples, REINFORCE))
    assert "trainer.gradient_checkpointing = true" in str(got.value)
    assert gradients(loaded) == {} and not loaded.model.training


def test_memory_of_the_optimizer_is_explained_too_and_other_errors_pass_through(
    tiny: Make, make_samples: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(tiny())
    asyncio.run(trainer.forward_backward(make_samples([9]), REINFORCE))
    step = Mock(side_effect=[MemoryError, RuntimeError("shapes do not match")])
    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    with pytest.raises(OutOfMemory, match=r"while stepping the optimizer: .* \[model\.lora\]"):
        asyncio.run(optim_step(trainer))
    with pytest.raises(RuntimeError, match="shapes do not match"):
        asyncio.run(optim_step(trainer))


def test_nothing_to_train_is_refused(tiny: Make) -> None:
    loaded = tiny()
    loaded.model.requires_grad_(False)
    with pytest.raises(CapabilityError, match="no parameter requires a gradient"):
        make_trainer(loaded)


@pytest.mark.parametrize(("dtype", "each"), [("float32", 16), ("bfloat16", 18)])
def test_a_model_that_cannot_be_trained_in_the_memory_here_is_refused(
    tiny: Make, monkeypatch: pytest.MonkeyPatch, dtype: str, each: int
) -> None:
    loaded = tiny(dtype)
    needed = each * sum(p.numel() for p in loaded.model.parameters())
    monkeypatch.setattr(memory, "memory_limit", lambda: needed)
    make_trainer(loaded)
    monkeypatch.setattr(memory, "memory_limit", lambda: needed - 1)
    with pytest.raises(CapabilityError, match=f"alone take {needed / 1024:.3g} KiB, and there are .* here"):
        make_trainer(loaded)
    refuse_too_large(loaded, parts=2)
    monkeypatch.setattr(memory, "memory_limit", lambda: needed // 2 - 1)
    with pytest.raises(CapabilityError, match=f"on each of 2 ranks {needed / 2048:.3g} KiB, and there are"):
        refuse_too_large(loaded, parts=2)
