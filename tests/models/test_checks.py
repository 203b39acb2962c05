"""A model is used only if Silva runs it as transformers does; families are in tests/test_families.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.utils import logging

from silva.config.sections import TinyModel
from silva.errors import ModelError
from silva.models import checks
from silva.models.loading import LoadedModel, load_model

TINY = TinyModel(layers=2, width=32, heads=4, kv_heads=2, context=64)


@pytest.fixture
def tiny() -> LoadedModel:
    return load_model(TINY, seed=0)


def test_a_check_leaves_the_model_as_it_was(tiny: LoadedModel) -> None:
    before = logging.get_verbosity()
    checks.check_model(tiny)
    assert tiny.model.config._attn_implementation == "silva" and logging.get_verbosity() == before
    assert not tiny.model.get_decoder()._forward_hooks
    assert all(p.requires_grad and p.grad is None for p in tiny.model.parameters())


@pytest.mark.parametrize("context", [1, 2, 3])
def test_contexts_shorter_than_the_check_are_taken(context: int) -> None:
    assert load_model(TINY.model_copy(update={"context": context}), seed=0).context == context


def test_a_head_that_starts_at_zero_is_taken(tiny: LoadedModel) -> None:
    with torch.no_grad():
        tiny.model.get_output_embeddings().weight.zero_()  # the embeddings as well: all states are 0
    checks.check_model(tiny)


def test_numbers_that_overflow_are_refused(tiny: LoadedModel) -> None:
    with torch.no_grad():
        tiny.model.get_parameter("model.norm.weight").fill_(3e38)
    with pytest.raises(
        ModelError, match=r"NaN or infinity for 16 random tokens .* torch\.float32 may be too"
    ):
        checks.check_model(tiny)


def test_running_out_of_memory_is_not_the_model_s_fault(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError("all taken")

    monkeypatch.setattr(checks, "_packed", fail)
    with pytest.raises(MemoryError, match="all taken"):
        checks.check_model(tiny)
