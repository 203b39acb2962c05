"""Attention of ranks that share a chunk's tokens, by heads (DeepSpeed Ulysses, arXiv:2309.14509).

    [heads, n tokens of this rank] ──all to all──> [heads / ranks, all tokens] ──attention over the chunk──>
    [all tokens, heads / ranks] ──all to all──> [n tokens of this rank, heads]

Each rank attends with all of its heads' tokens, so it does as much as every other, whatever the trie. What
walks keep of earlier chunks is of its own heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from silva.errors import CapabilityError
from silva.models.trie import Trie
from silva.models.trie_attention import Chunk, FlexTrieAttention, KeyValue, Layers, TrieAttention


class UlyssesAttention:
    """What `attention.attend` calls for one forward pass over one chunk, of which this rank has a share.

    Args:
        shares: of all ranks, in order; one that is empty takes a token to fill up, which attends to nothing.
        rank: whose tokens go through the model here.
        outside: keys and values that earlier passes have left in `found`, of the heads of this rank.
        exchange: x [ranks, ...] for each rank -> [ranks, ...] that each has for this one, with a gradient.
        flex: the trie, if the chunk is all of it and goes through FlexAttention.
    """

    def __init__(
        self,
        shares: Sequence[Chunk],
        rank: int,
        outside: Mapping[int, Layers],
        exchange: Callable[[torch.Tensor], torch.Tensor],
        *,
        dtype: torch.dtype,
        device: torch.device,
        flex: Trie | None = None,
    ) -> None:
        self._lengths, self._exchange = [len(share) for share in shares], exchange
        self._n = max(1, *self._lengths)
        self.found: dict[int, dict[int, KeyValue]] = {}  # of a whole trie nothing is looked at later
        self._inner: TrieAttention | FlexTrieAttention
        if flex is not None:
            self._inner = FlexTrieAttention(flex, device)
            return
        kept = frozenset[int]().union(*(share.kept for share in shares))
        whole = Chunk(shares[0].pieces, shares[0].first, shares[-1].last, kept)
        self._inner = TrieAttention(whole, outside, dtype=dtype, device=device)
        self.found = self._inner.found

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """Shapes as of `TrieAttention.attend`, of this rank's tokens."""
        ranks, tokens = len(self._lengths), query.shape[2]
        if key.shape[1] % ranks:  # fewer than ranks: several have the same one
            key, value = (x.repeat_interleave(ranks // x.shape[1], 1) for x in (key, value))
        given = [x[0].unflatten(0, (ranks, -1)) for x in (query, key, value)]  # [ranks, heads, n, d]
        sent = F.pad(torch.cat(given, 1), (0, 0, 0, self._n - tokens))
        came = zip(self._exchange(sent), self._lengths, strict=True)
        of_all = torch.cat([of_rank[:, :length] for of_rank, length in came], 1)[None]
        q, k, v = of_all.split([x.shape[1] for x in given], 1)
        out = self._inner.attend(layer, q, k, v, scaling)[0]  # [all tokens, heads of this rank, d]
        parts = [F.pad(x, (0, 0, 0, 0, 0, self._n - len(x))) for x in out.split(self._lengths)]
        mine = self._exchange(torch.stack(parts))[:, :tokens]  # [ranks, n, heads, d]
        return mine.transpose(0, 1).flatten(1, 2)[None]


def check_heads(config: Any, ranks: int, tp: int) -> None:
    """Whether so many ranks can take a share of the heads each, of which tensor parallel leaves 1 / tp.

    Raises:
        CapabilityError: they cannot, and why.
    """
    text = config.get_text_config()
    heads = text.num_attention_heads // tp
    of_keys = (getattr(text, "num_key_value_heads", None) or text.num_attention_heads) // tp
    key = f'trainer.parallel.cp = {ranks} with cp_style = "ulysses"'
    left = f" on each of {tp} ranks of tp" if tp > 1 else ""
    if heads % ranks:
        raise CapabilityError(
            f"{key}: each rank takes a share of the heads, and the model has {heads}{left} "
            '(num_attention_heads); expected a divisor, or cp_style = "all_gather"'
        )
    if of_keys % ranks and ranks % of_keys:
        raise CapabilityError(
            f"{key}: heads of keys and values are divided or repeated, and the model has {of_keys}{left} "
            '(num_key_value_heads); expected a divisor or a multiple, or cp_style = "all_gather"'
        )
