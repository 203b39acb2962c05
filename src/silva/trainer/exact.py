"""Training with the bits of sampling: a token's log-probability is the one that the sampler recorded.

    sampler   SteadyModel: decoder over a cache, attention in blocks ──> logits ──> log_normaliser ──> draw
    trainer   SteadyModel: decoder over a trie,  attention in blocks ──> logits ──> log_normaliser ──> loss

Both call the same functions on the same parameters, so here is only what a trie needs in place of a cache,
and what cannot have these bits. Gradients are the ordinary ones, up to rounding.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

import silva
from silva.errors import CapabilityError
from silva.models.activation import steady_activations
from silva.models.head import log_normaliser, logits_of
from silva.models.loading import LoadedModel
from silva.models.steady import SteadyModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from silva.models.attention import Packed
    from silva.trainer.settings import LocalTrainerSettings


def exact_model(loaded: LoadedModel, settings: LocalTrainerSettings, *, prepack: bool = True) -> LoadedModel:
    """The model whose passes in training have the bits of sampling.

    Args:
        prepack: as the engine that samples.

    Raises:
        CapabilityError: the bits of sampling cannot be had, and why.
    """
    dropout = [m for m in loaded.model.modules() if isinstance(m, BaseTunerLayer) and _drops(m)]
    experts = any(parameter.ndim > 2 for parameter in loaded.model.parameters())
    reasons = {
        "a GPU's products have other bits with every shape": loaded.device.type != "cpu",
        f"trainer.ranks = {settings.ranks} divide the model and its sums": settings.ranks > 1,
        "model.lora.dropout drops in training what sampling has": bool(dropout),
        "trainer.gradient_checkpointing computes layers in its own way": settings.gradient_checkpointing,
        "trainer.replay_routing replays what an exact pass chooses by itself": settings.replay_routing,
        "the experts of the model multiply the tokens that are sent to them, however few": experts,
        "torch was imported before silva (import silva first)": silva.TORCH_CAME_FIRST,
    }
    _refuse(next((why for why, holds in reasons.items() if holds), ""))
    steady = SteadyModel.of(loaded, prepack=prepack)
    steady_activations(steady.loaded.model, always=True)
    rules = steady.rules
    assert rules is not None
    if not rules.hold:
        _refuse("here the last bits of a product depend on how many rows it has (`silva doctor`)")
    if rules.one_thread:
        _refuse(
            f"with {torch.get_num_threads()} threads the last bits of a product depend on how many rows it "
            "has; set placement.threads = 1"
        )
    return dataclasses.replace(loaded, exact=steady)


def called(loaded: LoadedModel) -> PreTrainedModel:
    """The modules that passes in training call."""
    return loaded.model if loaded.exact is None else loaded.exact.loaded.model


def _refuse(why: str) -> None:
    if why:
        raise CapabilityError(f"trainer.exact = true: {why}; expected trainer.exact = false, or without that")


def _drops(layer: BaseTunerLayer) -> bool:
    rates: Any = layer.lora_dropout
    return any(isinstance(module, nn.Dropout) and module.p > 0 for module in rates.modules())


class ExactStep:
    """Tokens of a trie for a `Decoder`, filled up to `size`; attention sees the real ones alone."""

    def __init__(self, positions: torch.Tensor, size: int, attention: Packed) -> None:
        self._count, self._filled, self._attention = len(positions), size - len(positions), attention
        self.positions = F.pad(positions, (0, self._filled))

    def attend_rows(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """query, scaled already, [size, heads, d], key and value [size, kv_heads, d] -> [size, heads, d]."""
        query, key, value = (x[: self._count].transpose(0, 1)[None] for x in (query, key, value))
        return F.pad(self._attention.attend(layer, query, key, value, 1.0)[0], (0, 0, 0, 0, 0, self._filled))

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """query [1, heads, size, d], key and value [1, kv_heads, size, d] -> [1, size, heads, d]."""
        query, key, value = (part[0].transpose(0, 1) for part in (query * scaling, key, value))
        return self.attend_rows(layer, query, key, value)[None]


def last_states(
    loaded: LoadedModel, tokens: torch.Tensor, positions: torch.Tensor, attention: Packed
) -> torch.Tensor:
    """[1, N] and [1, N] -> [N, H], the last hidden states of tokens that attend by `attention`."""
    if (steady := loaded.exact) is None:
        return loaded.model.get_decoder()(
            input_ids=tokens, position_ids=positions, use_cache=False, packed=attention
        ).last_hidden_state[0]
    assert steady.rules is not None
    count = tokens.shape[1]
    size = steady.rules.linear.padded(count)
    step = ExactStep(positions[0], size, attention)
    return steady.decoder(F.pad(tokens[0], (0, size - count)), step)[:count]


def exact_logits(steady: SteadyModel, hidden: torch.Tensor) -> torch.Tensor:
    """[N, H] -> [N, V]"""
    assert steady.rules is not None
    filled = F.pad(hidden, (0, 0, 0, steady.rules.linear.padded(len(hidden)) - len(hidden)))
    return logits_of(steady.loaded.model, filled)[: len(hidden)]


class ExactLogprobs(torch.autograd.Function):
    """Logits over temperatures [N, V] and targets [N, K] -> log-probabilities [N, K] and entropies [N]."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normaliser, weights, sums = log_normaliser(logits)
        weights.mul_(logits)
        weights.masked_fill_(weights.isnan(), 0)  # 0 times the logit of an impossible token
        means = weights.sum(1) / sums.sum(1)
        entropies = (normaliser - means).clamp_min_(0)
        ctx.save_for_backward(logits, targets, entropies)
        ctx.set_materialize_grads(False)
        return logits.gather(1, targets) - normaliser[:, None], entropies

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, logprobs: torch.Tensor | None, entropies: torch.Tensor | None
    ) -> tuple[torch.Tensor, None]:
        logits, targets, entropy = ctx.saved_tensors
        # By the largest logit first: less a normaliser of 30 float32 has no digits of 1 - p left below 1e-6.
        logs = logits.log_softmax(1)
        into = logs.exp_() if entropies is None else logs.exp()
        if entropies is not None:  # dH = -p (log p + H)
            factor = logs.add_(entropy[:, None]).mul_(entropies[:, None])
            into.mul_(factor.neg_() if logprobs is None else factor.add_(logprobs.sum(1, True)).neg_())
        elif logprobs is not None:
            into.mul_(logprobs.sum(1, True).neg_())
        if logprobs is not None:
            into.scatter_add_(1, targets, logprobs)
        return into, None
