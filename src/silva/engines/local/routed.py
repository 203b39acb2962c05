"""A decoder whose routers' choices are kept beside the states of the cache."""

from __future__ import annotations

from typing import Any

import torch

from silva.models.decoder import Decoder
from silva.models.routing import Routing


class RoutedDecoder:
    """Another decoder, over steps of a cache (`RaggedStep`); what its routers choose goes into the cache."""

    recordable = False

    def __init__(self, decoder: Decoder, routing: Routing) -> None:
        self._decoder, self._routing = decoder, routing
        self.linears = decoder.linears

    def __call__(self, tokens_N: torch.Tensor, step: Any) -> torch.Tensor:
        with self._routing.recorded() as chosen:
            states = self._decoder(tokens_N, step)
        count, store = len(step.rows), step.cache.outputs[1]
        routes = torch.stack(chosen, 1)[:count].flatten(1)
        store[step.rows, 0, step.positions[:count]] = routes.to(store.dtype)
        return states
