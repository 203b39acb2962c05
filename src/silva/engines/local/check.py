"""The engine's steps are tried on a model before it samples: they must give what transformers would."""

from __future__ import annotations

import itertools

import torch

from silva.engines.local.kv_cache import KvCache
from silva.engines.local.ragged_step import RaggedStep, Span
from silva.models.checks import apart, own_states, refuse, sequences
from silva.models.decoder import decoder_of
from silva.models.loading import LoadedModel


def check_steps(loaded: LoadedModel) -> None:
    """Refuse a model that the engine would run otherwise than transformers does.

    Raises:
        ModelError: two short sequences get other last states as requests of the engine, or fail.
    """
    refuse(loaded, _disagreement)


def _disagreement(loaded: LoadedModel) -> str | None:
    tokens = sequences(loaded)
    own, _ = own_states(loaded.model, tokens)
    if gap := apart(_sampled(loaded, tokens), own):
        return (
            f"gives other states in the engine's steps than with transformers {gap}: it would be trained on "
            "tokens of another model"
        )
    return None


@torch.inference_mode()
def _sampled(loaded: LoadedModel, tokens: torch.Tensor) -> torch.Tensor:
    """[2, T, H], in two steps: what a layer has stored must be what the next one looks at."""
    rows, (count, length) = tokens.cpu().numpy(), tokens.shape
    cache = KvCache(loaded.model.config, rows=count, context=length, dtype=loaded.dtype, device=loaded.device)
    for row in rows:
        cache.acquire(None, 0, row)
    decoder, states = decoder_of(loaded.model), []
    for start, stop in itertools.pairwise(sorted({0, length // 2, length})):
        step = RaggedStep(cache, [Span(row, start, stop) for row in range(count)])
        states.append(step.compute(decoder, rows[:, start:stop].ravel()).unflatten(0, (count, -1)))
    return torch.cat(states, 1)
