"""Tries of samples whose routes are replayed (models/routing.py).

Rows share a token where it is the same and went to the same experts. Siblings read their prompt from the same
cache, so they share it as ever. Rows whose prefix was computed by other weights, or in another batch with
other last bits, may have been routed differently somewhere: from there on each has tokens of its own, because
what it was drawn from is what its own routes give.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from silva.errors import RecordError
from silva.models.routing import ReplayedRoutes, Routing
from silva.models.trie import Trie, build
from silva.types import Sample

_BITS = 32  # of a key that are the token


def keys(samples: Sequence[Sample], routing: Routing) -> list[np.ndarray]:
    """[T] int64 for each sample: equal where tokens and the experts that they went to are.

    Raises:
        RecordError: as `routing.known`, or a sample of the policy has no routes.
    """
    return [tokens for tokens, _ in _keyed(samples, routing)]


def routed_trie(
    samples: Sequence[Sample], routing: Routing, least: int, device: torch.device
) -> tuple[Trie, ReplayedRoutes]:
    """The trie of the samples, and what routers do with its tokens. Errors as of `keys`."""
    keyed = _keyed(samples, routing)
    trie = build([key for key, _ in keyed], least)
    experts = np.empty((len(trie), *keyed[0][1].shape[1:]), np.int32)
    for (_, went), path in zip(keyed, trie.rows, strict=True):
        experts[path] = went
    trie = dataclasses.replace(trie, tokens=trie.tokens & ((1 << _BITS) - 1))
    return trie, ReplayedRoutes(routing, torch.from_numpy(experts).to(device, torch.int64))


def _keyed(samples: Sequence[Sample], routing: Routing) -> list[tuple[np.ndarray, np.ndarray]]:
    """Of each sample its keys, and the experts [T, layers, k] that its tokens went to, -1: unknown."""
    found, numbers = [], dict[bytes, int]()  # of sets of experts
    for sample in samples:
        routes = routing.known(sample.routes, len(sample), f"the sample of {sample.trajectory}")
        if sample.routes is None and (sampled := (sample.versions >= 0) & (sample.loss_weights > 0)).any():
            raise RecordError(
                f"sample of {sample.trajectory}: {int(sampled.sum())} tokens were sampled without a record "
                "of their experts, which trainer.replay_routing needs; expected routes from the engine"
            )
        went = np.concatenate([routes[1:], np.full_like(routes[:1], -1)])
        sets = [numbers.setdefault(each.tobytes(), len(numbers)) for each in np.sort(went)]
        found.append((np.asarray(sample.tokens, np.int64) | (np.array(sets) << _BITS), went))
    return found
