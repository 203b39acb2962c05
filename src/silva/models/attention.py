"""The one attention of Silva, registered with transformers as "silva".

Alone it is plain causal attention over padded rows [B, T]: padding stands on the right, where causal
attention never looks, so no mask is needed. With `packed` the tokens of many sequences lie in one row and
`packed` says who sees whom: a step of the engine over its cache (kv_cache.py), or a trie in training
(trie_attention.py). Everything else of a model runs token by token through transformers unchanged, for every
family that lets its attention be replaced.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

NAME = "silva"


class Packed(Protocol):
    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor: ...


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packed: Packed | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """query [B, heads, T, d], key and value [B, kv_heads, T, d] -> [B, T, heads, d]."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if packed is not None:
        return packed.attend(int(module.layer_idx), query, key, value, scaling), None  # type: ignore[arg-type]
    out = F.scaled_dot_product_attention(
        query,
        key,
        value,
        is_causal=True,
        scale=scaling,
        dropout_p=dropout,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2), None


AttentionInterface.register(NAME, attend)
