"""What cannot be divided is refused, with the key and the reason."""

from __future__ import annotations

import pytest
from tests import moe
from tests.test_families import SIZES
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Phi3Config, PreTrainedConfig

from silva.errors import CapabilityError
from silva.trainer.settings import Parallel
from silva.trainer.sharding.tensor_parallel import styles

HEADS = SIZES | {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("config", "ranks", "words"),
    [
        (LlamaConfig(**HEADS), 4, "tp = 4: the model has num_key_value_heads = 2; expected a divisor"),
        (LlamaConfig(**HEADS), 3, "tp = 3: the model has num_attention_heads = 4"),
        (Phi3Config(**HEADS), 2, "o_proj of phi3 is divided in transformers as rowwise_split_input"),
        (GPT2Config(vocab_size=262, n_embd=32, n_layer=1, n_head=2), 2, "does not say how gpt2 is divided"),
        (moe.config("qwen3_moe"), 1, "experts of qwen3_moe"),
        (moe.config("qwen2_moe"), 1, "experts of qwen2_moe"),
    ],
)
def test_what_cannot_be_divided(config: PreTrainedConfig, ranks: int, words: str) -> None:
    with pytest.raises(CapabilityError, match=words):
        styles(AutoModelForCausalLM.from_config(config), ranks)


@pytest.mark.parametrize(
    ("parallel", "ranks", "shape"),
    [
        (Parallel(), 8, (1, 1, 8, 1)),
        (Parallel(dp_replicate=2), 8, (1, 2, 4, 1)),
        (Parallel(tp=2, cp=2), 16, (1, 1, 8, 2)),
        (Parallel(dp_replicate=2, dp_shard=1, tp=2), 4, (1, 2, 1, 2)),
        (Parallel(pp=4, tp=2), 16, (4, 1, 2, 2)),
    ],
)
def test_the_mesh(parallel: Parallel, ranks: int, shape: tuple[int, ...]) -> None:
    assert tuple(parallel.shape(ranks).values()) == shape


@pytest.mark.parametrize("parallel", [Parallel(tp=3), Parallel(dp_shard=3), Parallel(cp=2, tp=8)])
def test_ranks_that_do_not_fit(parallel: Parallel) -> None:
    with pytest.raises(CapabilityError, match=r"got 8 ranks for .* expected (3|6|16): see trainer.ranks"):
        parallel.shape(8)
