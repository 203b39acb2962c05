"""The forward pass of one packed step in sampling, in few operations for families built like Llama.

A layer of transformers takes some seventy torch operations, which for a few tokens last as long as the
products between them. Here it takes thirty: projections of one input are one product (prepacked.py),
residuals are added in place, the rotation of queries and keys is one. The numbers are those of transformers
up to rounding, and the bits of a token depend on its own history alone (ragged_step.py).
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from silva.engines.local.kv_cache import KvCache
from silva.engines.local.prepacked import JoinedLinear
from silva.models.activation import SERIAL

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_FIXED_ROTATIONS = ("default", "linear", "llama3", "yarn")  # that do not change with the longest position


class Step(Protocol):
    """New tokens of rows of the cache and their attention: `RaggedStep`, or `decode_graph.DecodeStep`."""

    cache: KvCache
    positions: torch.Tensor

    def attend_rows(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor: ...


class Decoder(Protocol):
    recordable: bool
    """Whether it works as part of a CUDA graph: nothing that it launches depends on numbers on the GPU."""
    linears: tuple[JoinedLinear, ...]
    """The linear layers that it does not call as modules; those of one input are one."""

    def __call__(self, tokens_N: torch.Tensor, step: Step) -> torch.Tensor:
        """[N] int64 -> [N, D], the last hidden states; keys and values go into the cache of `step`."""


def decoder_of(model: PreTrainedModel) -> Decoder:
    """The short way for families that have one, transformers for all others."""
    config: Any = model.config
    if config.model_type in FAMILIES and config.hidden_act == "silu":
        return LlamaDecoder(model)
    return AnyDecoder(model)


class AnyDecoder:
    """Through transformers, whose attention hands `packed` on (attention.py)."""

    recordable = False
    linears: tuple[JoinedLinear, ...] = ()

    def __init__(self, model: PreTrainedModel) -> None:
        self._decoder = model.get_decoder()

    def __call__(self, tokens_N: torch.Tensor, step: Step) -> torch.Tensor:
        output = self._decoder(
            input_ids=tokens_N[None], position_ids=step.positions[None], use_cache=False, packed=step
        )
        return output.last_hidden_state[0]


class LlamaDecoder:
    """RMSNorm, rotated grouped-query attention, RMSNorm, SiLU-gated MLP; queries and keys may have norms."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._decoder: Any = model.get_decoder()
        self.recordable = self._decoder.rotary_emb.rope_type in _FIXED_ROTATIONS
        self._layers = [_Layer(layer) for layer in self._decoder.layers]
        self.linears = tuple(linear for layer in self._layers for linear in layer.linears)

    def __call__(self, tokens_N: torch.Tensor, step: Step) -> torch.Tensor:
        x = self._decoder.embed_tokens(tokens_N)
        cos, sin = (part[0, :, None] for part in self._decoder.rotary_emb(x[None], step.positions[None]))
        half = sin.shape[-1] // 2
        sin = torch.cat((-sin[..., :half], sin[..., half:]), -1)
        for layer in self._layers:
            layer(x, cos, sin, step)
        return _norm(x, self._decoder.norm)


class _Layer:
    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.norms = layer.input_layernorm, layer.post_attention_layernorm
        self.qkv = JoinedLinear(attention.q_proj, attention.k_proj, attention.v_proj)
        self.head_norms = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else None
        self.index, self.scaling = attention.layer_idx, attention.scaling
        self.out = JoinedLinear(attention.o_proj)
        self.gate_up = JoinedLinear(mlp.gate_proj, mlp.up_proj)
        self.down = JoinedLinear(mlp.down_proj)
        self.linears = self.qkv, self.out, self.gate_up, self.down

    def __call__(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, step: Step) -> None:
        """Adds to x [N, D]; cos and (with the sign of the rotation) sin: [N, 1, d]."""
        tokens, (heads, kv_heads) = x.shape[0], (step.cache.heads, step.cache.kv_heads)
        qkv = self.qkv(_norm(x, self.norms[0])).view(tokens, -1, step.cache.head_dim)
        qk, value = qkv.split_with_sizes((heads + kv_heads, kv_heads), 1)
        if self.head_norms:
            query, key = qk.split_with_sizes((heads, kv_heads), 1)
            qk = torch.cat((_norm(query, self.head_norms[0]), _norm(key, self.head_norms[1])), 1)
        left, right = qk.chunk(2, -1)
        rotated = torch.cat((right, left), -1).mul_(sin).add_(qk * cos)
        query, key = rotated.split_with_sizes((heads, kv_heads), 1)
        x += self.out(step.attend_rows(self.index, query, key, value, self.scaling).flatten(1))
        gate, up = self.gate_up(_norm(x, self.norms[1])).chunk(2, -1)
        x += self.down(_silu_(gate) * up)


def _norm(x: torch.Tensor, norm: Any) -> torch.Tensor:
    """RMSNorm over the last dimension, in float32 or wider."""
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    squares = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()
    scale = squares.div_(x.shape[-1]).add_(norm.variance_epsilon).rsqrt_()
    return (wide * scale).to(x.dtype).mul_(norm.weight)


def _silu_(x: torch.Tensor) -> torch.Tensor:
    """In place, [N, width]. On CPU whole rows at a time, too few for torch to share among threads: an element
    at the end of a share would get other bits (activation.py)."""
    if x.device.type != "cpu" or x.numel() < SERIAL:
        return F.silu(x, inplace=True)
    for rows in x.split(max(1, (SERIAL - 1) // x.shape[1])):
        F.silu(rows, inplace=True)
    return x
