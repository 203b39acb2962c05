"""How many operations (FLOP) a model's passes take on paper, and how many this machine makes in a second.

    of a token        2 for each parameter that it is multiplied with: not embeddings, and of experts those
                      that it goes to (Kaplan et al. 2020, arXiv:2001.08361, section 2.1)
    of a pair         4 * layers * heads * size of a head, for each token that a token attends to, itself too
    of a prediction   2 for each parameter of the head

A backward pass takes as much again for the gradients of what comes in, and for those of the parameters that
are trained: all, or only adapters. What is made twice (checkpointing, a walk over a large trie) counts once.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from silva.models.adapters import EXPERTS
from silva.models.attention import head_dim
from silva.models.products import product
from silva.models.trie import Trie

PEAKS = {  # dense bfloat16, by the makers' data sheets; the first name that is part of the device's counts
    "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "GH200": 989e12, "H200 NVL": 835e12,
    "H200": 989e12, "H20": 148e12, "H800": 989e12, "GB200": 2500e12, "B200": 2250e12, "A100": 312e12,
    "A800": 312e12, "A10G": 70e12, "L40S": 362e12, "L40": 181e12, "L4": 121e12, "RTX 3090": 71e12,
    "RTX 4090": 165e12, "RTX 5090": 209e12, "MI300X": 1307e12,
}  # fmt: skip
SIDE = 1024  # of the square matrices that are multiplied to measure
ENOUGH = 0.05  # seconds of it


@dataclass(frozen=True)
class Parameters:
    """That a token is multiplied with, and those of them that are trained."""

    all: float
    trained: float

    @property
    def forward(self) -> float:
        return 2 * self.all

    @property
    def training(self) -> float:
        """Forward and backward."""
        return 4 * self.all + 2 * self.trained


@dataclass(frozen=True)
class Flop:
    """Of one model. `pair`: of a forward pass."""

    body: Parameters
    head: Parameters
    pair: float

    def forward(self, tokens: float, pairs: float, predicted: float) -> float:
        """Of one pass: over so many tokens, which attend to so many in sum; the head sees `predicted`."""
        return self.body.forward * tokens + self.pair * pairs + self.head.forward * predicted

    def training(self, tokens: float, pairs: float, predicted: float) -> float:
        """The same forward and backward."""
        return self.body.training * tokens + 3 * self.pair * pairs + self.head.training * predicted


def flop_of(model: PreTrainedModel) -> Flop:
    """Of a model that is whole on this rank; nothing if it does not say how many experts a token goes to."""
    config = model.config.get_text_config()
    inputs: Any = model.get_input_embeddings()
    outputs = {id(p) for p in model.get_output_embeddings().parameters()}
    sizes = {"body": [0.0, 0.0], "head": [0.0, 0.0]}
    experts = [p.shape[0] for n, p in model.named_parameters() if p.ndim == 3 and EXPERTS in n.split(".")]
    if experts and not hasattr(config, "num_experts_per_tok"):
        return Flop(Parameters(0, 0), Parameters(0, 0), 0)
    active = config.num_experts_per_tok / experts[0] if experts else 1.0
    for name, parameter in model.named_parameters():
        of_head = id(parameter) in outputs
        if parameter.ndim < 2 or (parameter is inputs.weight and not of_head):
            continue
        count = parameter.numel() * (active if EXPERTS in name.split(".") else 1.0)
        found = sizes["head" if of_head else "body"]
        found[0] += count
        found[1] += count * parameter.requires_grad
    pair = 4.0 * config.num_hidden_layers * config.num_attention_heads * head_dim(config)
    return Flop(Parameters(*sizes["body"]), Parameters(*sizes["head"]), pair)


def pairs(trie: Trie) -> float:
    """How many tokens the tokens of a trie attend to, in sum."""
    return float(trie.positions.sum() + len(trie))


def peak(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP a second of one device: by its data sheet, otherwise measured once, as always on CPU."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    if " MIG " in name or "Laptop" in name:  # a part of that device, or a slower one
        name = ""
    return next((rate for part, rate in PEAKS.items() if part in name), None) or measured(device, dtype)


@functools.cache
@torch.no_grad()
def measured(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP a second of the product of two large square matrices, by what training multiplies with."""
    x = torch.full((SIDE, SIDE), 0.5, dtype=dtype, device=device)
    weight = nn.Parameter(torch.full_like(x, 0.5), requires_grad=False)
    began, best = time.perf_counter(), float("inf")
    while best == float("inf") or time.perf_counter() - began < ENOUGH:
        start = time.perf_counter()
        product(x, weight)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * SIDE**3 / best
