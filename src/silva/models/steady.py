"""A model whose tokens have the same bits whatever is computed with them: the local engine samples with one,
and so does training with `trainer.exact`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from silva.models.attention import head_dim
from silva.models.decoder import Decoder, decoder_of
from silva.models.loading import LoadedModel, copied
from silva.models.prepacked import PrepackedLinears
from silva.models.same_bits import RowRules, fill_up, probe


@dataclass(frozen=True)
class SteadyModel:
    """A model's own parameters in modules that are called as `rules` say; `rules` is None on a GPU, where
    nothing is filled up. What is done to these modules changes nothing for others who use the model."""

    loaded: LoadedModel
    rules: RowRules | None
    decoder: Decoder
    packed: PrepackedLinears | None

    @classmethod
    def of(cls, loaded: LoadedModel, *, prepack: bool) -> SteadyModel:
        """`prepack`: multiply by copies of the large weights where that is faster (prepacked.py)."""
        loaded = copied(loaded, [*loaded.model.parameters(), *loaded.model.buffers()])
        rules = None
        if loaded.device.type == "cpu":
            rules = probe(loaded.model, head_dim=head_dim(loaded.model.config), dtype=loaded.dtype)
            fill_up(loaded.model, rules.alone)
        decoder, packed = decoder_of(loaded.model), None
        if prepack and rules is not None:
            with threads_of(rules):
                packed = PrepackedLinears(loaded.model, decoder.linears, rules.linear)
            if packed.kernel is not None and not packed.kernel.exact:
                rules = dataclasses.replace(rules, packed=packed.kernel.name)
        return cls(loaded, rules, decoder, packed)


@contextmanager
def threads_of(rules: RowRules) -> Iterator[None]:
    """One thread if the rules ask for it."""
    before = torch.get_num_threads()
    if rules.one_thread:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if rules.one_thread:
            torch.set_num_threads(before)
