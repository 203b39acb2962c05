"""Plain causal attention, and what is refused instead of being left out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from silva.errors import ModelError
from silva.models.attention import attend


class Attention(torch.nn.Module):
    layer_idx = 0
    config = SimpleNamespace(model_type="some")


def tensors(queries: int = 3, keys: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One head of size 1; every score is 0, so a token sees the mean of the values up to its own."""
    values = torch.tensor([3.0, 5.0, 10.0])[:keys].view(1, 1, keys, 1)
    return torch.zeros(1, 1, queries, 1), torch.ones(1, 1, keys, 1), values


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"softcap": None, "s_aux": None, "encoder_hidden_states": None},
        {"sliding_window": 3, "position_ids": torch.arange(3)[None], "use_cache": True},
    ],
)
def test_arguments_that_change_nothing(arguments: dict[str, Any]) -> None:
    out, weights = attend(Attention(), *tensors(), None, **arguments)
    torch.testing.assert_close(out.flatten(), torch.tensor([3.0, 4.0, 6.0]))
    assert weights is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"softcap": 50.0}, r"softcap = 50\.0"),
        ({"s_aux": torch.zeros(4)}, r"s_aux = a tensor of \[4\]"),
        ({"is_causal": False}, "is_causal = False"),
        ({"attention_mask": torch.zeros(1, 1, 3, 3)}, r"attention_mask = a tensor of \[1, 1, 3, 3\]"),
    ],
)
@pytest.mark.parametrize("packed", [None, object()])  # refused before it is asked
def test_what_is_not_computed_is_refused(arguments: dict[str, Any], words: str, packed: Any) -> None:
    given = {"attention_mask": None, **arguments}
    with pytest.raises(ModelError, match=f"the attention of the family some takes {words}"):
        attend(Attention(), *tensors(), given.pop("attention_mask"), packed=packed, **given)


def test_a_cache_of_transformers_is_refused() -> None:
    """torch's causal mask would let the one query see the first key only."""
    with pytest.raises(ModelError, match="got 1 queries for 3 keys, expected as many of both"):
        attend(Attention(), *tensors(queries=1), None)
