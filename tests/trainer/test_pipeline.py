"""A model in stages gives what it gives in one piece; what cannot be cut is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.test_families import SIZES
from transformers import AutoModelForCausalLM, GraniteConfig, LlamaConfig, Qwen3Config

from silva.errors import CapabilityError
from silva.models.loading import LoadedModel
from silva.trainer.policy import attention_over, pack
from silva.trainer.sharding.pipeline import InFlight, Stage, cut
from silva.types import Sample


def parameters(model: Any) -> set[str]:
    return {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("stages", [2, 4])
def test_stages_one_after_another_are_the_model(
    tiny: Callable[..., LoadedModel], make_samples: Callable[..., list[Sample]], stages: int
) -> None:
    loaded = tiny("float64", layers=4)
    batch = pack(loaded, make_samples([30, 9]))
    decoder: Any = loaded.model.get_decoder()
    packed = attention_over(loaded, batch.trie)
    about = {"input_ids": batch.tokens, "position_ids": batch.positions, "use_cache": False}
    expected = decoder(**about, packed=packed).last_hidden_state
    x = batch.tokens
    for number in range(stages):
        stage = Stage(loaded.model, number, stages)
        stage.run = InFlight(loaded, [batch], lambda number, hidden: hidden[None])
        x = stage(x, number=torch.tensor([0]))
    torch.testing.assert_close(x, expected, rtol=0, atol=0)


@pytest.mark.parametrize("interleaved", [False, True])
def test_every_parameter_is_on_one_rank_under_its_own_name(
    tiny: Callable[..., LoadedModel], interleaved: bool
) -> None:
    """Embeddings that are the head too are on both ends."""
    whole = parameters(tiny(layers=4).model)
    ranks = [tiny(layers=4).model for _ in range(2)]
    for rank, model in enumerate(ranks):
        cut(model, rank, 2, interleaved)
    first, last = map(parameters, ranks)
    assert first | last == whole and first & last == {"model.embed_tokens.weight"}
    of_first = {name.split(".")[2] for name in first if ".layers." in name}
    assert of_first == ({"0", "2"} if interleaved else {"0", "1"})
    assert "model.norm.weight" in last


@pytest.mark.parametrize("config", [LlamaConfig, Qwen3Config])
def test_more_stages_than_layers_are_refused(config: Any) -> None:
    model = AutoModelForCausalLM.from_config(config(**SIZES))
    with pytest.raises(CapabilityError, match=r"got 4 stages for 2 layers, expected at most as many"):
        cut(model, 0, 2, True)


def test_a_decoder_that_would_do_something_in_every_stage_is_refused() -> None:
    """Granite multiplies what comes from the embeddings."""
    model = AutoModelForCausalLM.from_config(GraniteConfig(**SIZES, embedding_multiplier=3.0))
    with pytest.raises(CapabilityError, match=r"granite changes hidden states .* pp = 1"):
        cut(model, 0, 2, False)
