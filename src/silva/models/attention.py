"""The one attention of Silva, registered with transformers as "silva".

Alone it is plain causal attention over padded rows [B, T]: padding stands on the right, where causal
attention never looks, so no mask is needed. With `packed` the tokens of many sequences lie in one row and
`packed` says who sees whom: a step of the engine over its cache (ragged_step.py), or a trie in training
(trie_attention.py). Everything else of a model runs token by token through transformers unchanged, for every
family that lets its attention be replaced.

What a family adds to attention (a soft cap, sinks) reaches `attend` as an argument. An unknown argument is
refused: without it another model would be sampled and trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from silva.errors import ModelError

NAME = "silva"
HARMLESS = {
    "position_ids": "positions are in the queries and keys already",
    "sliding_window": "the context is at most the window (loading.py)",
    "use_cache": "keys and values stay with `packed`",
    "output_attentions": "nothing here asks for them",
    "output_router_logits": "of experts, after attention",
}
"""Arguments that change nothing here, with the reason."""


class Packed(Protocol):
    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor: ...


class SideBySide:
    """The tokens of several passes in one: each part attends to itself alone, as it would without the others.

    Args:
        parts: the attention of each, and how many tokens it has.
    """

    def __init__(self, parts: Sequence[tuple[Packed, int]]) -> None:
        self._parts = [part for part, _ in parts]
        self._sizes = [size for _, size in parts]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """Of one row: query [1, heads, N, d], key and value [1, kv_heads, N, d] -> [1, N, heads, d]."""
        split = (x.split(self._sizes, 2) for x in (query, key, value))
        outs = [part.attend(layer, *qkv, scaling) for part, *qkv in zip(self._parts, *split, strict=True)]
        return torch.cat(outs, 1)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packed: Packed | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """query [B, heads, T, d], key and value [B, kv_heads, T, d] -> [B, T, heads, d].

    Raises:
        ModelError: a mask, or another argument that may change the result.
    """
    _refuse_unknown(module, attention_mask=attention_mask, **others)
    if packed is None and query.shape[2] != key.shape[2]:
        raise ModelError(
            f"got {query.shape[2]} queries for {key.shape[2]} keys, expected as many of both: "
            "this model has no cache of transformers; call it with use_cache=False"
        )
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if packed is not None:
        return packed.attend(int(module.layer_idx), query, key, value, scaling), None  # type: ignore[arg-type]
    gqa = query.shape[1] != key.shape[1]
    out = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, dropout_p=dropout, enable_gqa=gqa
    )
    return out.transpose(1, 2), None


def head_dim(config: Any) -> int:
    """Numbers of a head, by a model's configuration."""
    text = config.get_text_config()
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def _refuse_unknown(module: torch.nn.Module, **arguments: Any) -> None:
    for name, value in arguments.items():
        if value is None or name in HARMLESS:
            continue
        family = getattr(getattr(module, "config", None), "model_type", type(module).__name__)
        shown = f"a tensor of {list(value.shape)}" if torch.is_tensor(value) else repr(value)
        raise ModelError(
            f"the attention of the family {family} takes {name} = {shown}, which Silva's attention does not "
            "compute, so it would sample and train another model; expected plain causal attention"
        )


AttentionInterface.register(NAME, attend)


def context_of(config: Any) -> int:
    """The context within which attention is plain and positions do not depend on the length.

    Sliding attention sees everything within its window. LongRoPE rotates all queries and keys of a pass
    differently if one sequence exceeds the original length.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    limits = [getattr(text, "max_position_embeddings", None) or 2048, getattr(text, "sliding_window", None)]
    rotations = getattr(text, "rope_parameters", None) or {}
    for rotation in (rotations, *(part for part in rotations.values() if isinstance(part, dict))):
        if rotation.get("rope_type") == "longrope":
            limits.append(rotation.get("original_max_position_embeddings"))
    return min(int(limit) for limit in limits if limit)
