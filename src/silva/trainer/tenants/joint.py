"""The decoder of one model for tokens of several runs in one pass; each run has the bits that it has alone.

    linear layers, norms, embeddings      all tokens together
    attention, adapters, activations      each part alone

No sum over tokens mixes parts, and the rows of products that all share have the same bits in any company
(row_rules.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from silva.models.attention import SideBySide
from silva.models.loading import LoadedModel
from silva.models.lora_runs import LoraRuns
from silva.models.row_rules import RowRule, of_training
from silva.models.trie import build
from silva.trainer.gradients import summed_in_place
from silva.trainer.policy import Pack, attention_over


class JointDecoder:
    """The decoder of a plain model over which `adapters` are installed. `rule`: what `rule_of` says of it."""

    def __init__(self, loaded: LoadedModel, adapters: LoraRuns, rule: RowRule | None) -> None:
        self._loaded, self._adapters, self._rule = loaded, adapters, rule

    @contextmanager
    def hidden(self, parts: Sequence[tuple[str, Pack]]) -> Iterator[tuple[torch.Tensor, list[slice]]]:
        """The last hidden states [U, H] of runs and their tries, and which of them are whose.

        The backward pass belongs within too.
        """
        tries = [pack.trie for _, pack in parts]
        tokens = [pack.tokens for _, pack in parts]
        positions = [pack.positions for _, pack in parts]
        total = sum(map(len, tries))
        if fill := (self._rule.padded(total) if self._rule else total) - total:
            tries.append(build([np.zeros(fill, np.int64)]))
            tokens.append(tokens[0].new_zeros(1, fill))
            positions.append(torch.arange(fill, device=self._loaded.device)[None])
        stops = np.cumsum([len(trie) for trie in tries]).tolist()
        runs = [run for run, _ in parts] + [None] * bool(fill)
        spans = [(n, stop - len(trie), stop) for n, stop, trie in zip(runs, stops, tries, strict=True)]
        with self._adapters.rows(spans), summed_in_place(self._loaded.model):
            hidden = self._loaded.model.get_decoder()(
                input_ids=torch.cat(tokens, 1),
                position_ids=torch.cat(positions, 1),
                use_cache=False,
                packed=SideBySide([(attention_over(self._loaded, trie), len(trie)) for trie in tries]),
            ).last_hidden_state[0]
            yield hidden, [slice(start, stop) for _, start, stop in spans[: len(parts)]]


def rule_of(loaded: LoadedModel) -> RowRule | None:
    """How many tokens a joint pass needs of a model, which is undivided yet. None: there are no joint passes
    (on a GPU, with experts, or if no number of rows suffices)."""
    decoder = loaded.model.get_decoder()
    if loaded.device.type != "cpu" or any(parameter.ndim > 2 for parameter in decoder.parameters()):
        return None
    return of_training(module for module in decoder.modules() if isinstance(module, nn.Linear | Conv1D))
