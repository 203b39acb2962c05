"""A tiny model and samples for it: what the trainer's tests share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from tests.trainer.forests import MODELS

from silva.config.sections import Lora, TinyModel
from silva.models.loading import LoadedModel, load_model
from silva.types import Sample


@pytest.fixture
def tiny() -> Callable[..., LoadedModel]:
    """`tiny("float64", lora=True)`: two layers of width 32; the same weights for the same seed."""

    def make(
        dtype: str = "float32",
        *,
        lora: bool = False,
        seed: int = 0,
        dropout: float = 0.0,
        layers: int = 2,
    ) -> LoadedModel:
        adapters = Lora(rank=4, alpha=8.0, dropout=dropout) if lora else None
        settings = TinyModel(
            layers=layers, width=32, heads=4, kv_heads=2, context=128, dtype=dtype, lora=adapters
        )
        return load_model(settings, seed=seed, device="cpu")

    return make


@pytest.fixture
def make_samples() -> Callable[..., list[Sample]]:
    """`make_samples([9, 4])`: random rows, about half their tokens trained, weights summing to 1."""

    def make(lengths: Sequence[int], *, seed: int = 0, temperature: float = 0.7) -> list[Sample]:
        rng = np.random.default_rng(seed)
        masks = [rng.random(length) < 0.5 for length in lengths]
        for mask in masks:
            mask[0], mask[-1] = False, True
        total = sum(int(mask.sum()) for mask in masks)
        return [
            Sample(
                tokens=rng.integers(0, 256, length),
                loss_weights=np.where(mask, 1 / total, 0.0),
                logprobs=np.where(mask, rng.normal(-5.5, 0.1, length), np.nan),
                temperatures=np.full(length, temperature),
                versions=np.where(mask, 0, -1),
                trajectory=f"t{row}",
                group="g",
                advantages=rng.normal(size=length),
            )
            for row, (length, mask) in enumerate(zip(lengths, masks, strict=True))
        ]

    return make


@pytest.fixture(scope="session")
def naive() -> Callable[[LoadedModel, list[Sample]], tuple[torch.Tensor, torch.Tensor]]:
    """Log-probabilities and entropies row by row, without padding, from the model's own full logits."""

    def values(loaded: LoadedModel, samples: list[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, entropies = [], []
        for sample in samples:
            tokens = torch.from_numpy(sample.tokens)
            logits = loaded.model(input_ids=tokens[None]).logits[0, :-1]
            scaled = logits / torch.from_numpy(sample.temperatures)[1:, None].to(logits.dtype)
            row = torch.log_softmax(scaled, dim=-1)
            chosen = torch.from_numpy(sample.loss_weights[1:] > 0)
            logprobs.append(row.gather(-1, tokens[1:, None])[:, 0][chosen])
            entropies.append(torch.distributions.Categorical(logits=scaled).entropy()[chosen])
        return torch.cat(logprobs), torch.cat(entropies)

    return values


@pytest.fixture(scope="module")
def models() -> dict[str, LoadedModel]:
    """Those of `forests.MODELS`, by name."""
    made = {name: load_model(settings, seed=1, device="cpu") for name, settings in MODELS.items()}
    with torch.no_grad():  # fresh adapters are the identity: no gradient would reach what is under them
        for name, parameter in made["lora"].model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return made
