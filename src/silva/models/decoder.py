"""The forward pass of one packed step, in few operations for families built like Llama.

A layer of transformers takes some seventy torch operations, which for a few tokens last as long as the
products between them. Here it takes thirty: projections of one input are one product (prepacked.py),
residuals are added in place, the rotation of queries and keys is one. The numbers are those of transformers
up to rounding, and the bits of a token depend on its own history alone (blocked_attention.py).

Sampling computes with it, and so does training that has the bits of sampling (trainer/exact.py): where
gradients are on, what is saved for them is never written over, and the numbers are the same.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from silva.models.activation import LANES, SERIAL
from silva.models.attention import head_dim
from silva.models.prepacked import JoinedLinear

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_FIXED_ROTATIONS = ("default", "linear", "llama3", "yarn")  # that do not change with the longest position


class DecoderStep(Protocol):
    """New tokens and their attention: `RaggedStep` and `DecodeStep` over a cache, `ExactStep` over a trie."""

    positions: torch.Tensor

    def attend_rows(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor: ...


class Decoder(Protocol):
    recordable: bool
    """Whether it works as part of a CUDA graph: nothing that it launches depends on numbers on the GPU."""
    linears: tuple[JoinedLinear, ...]
    """The linear layers that it does not call as modules; those of one input are one."""

    def __call__(self, tokens_N: torch.Tensor, step: DecoderStep) -> torch.Tensor:
        """[N] int64 -> [N, D], the last hidden states; `step` keeps keys and values."""


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

    def __call__(self, tokens_N: torch.Tensor, step: DecoderStep) -> torch.Tensor:
        output = self._decoder(
            input_ids=tokens_N[None], position_ids=step.positions[None], use_cache=False, packed=step
        )
        return output.last_hidden_state[0]


class LlamaDecoder:
    """RMSNorm, rotated grouped-query attention, RMSNorm, SiLU-gated MLP; queries and keys may have norms."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._decoder: Any = model.get_decoder()
        self.recordable = self._decoder.rotary_emb.rope_type in _FIXED_ROTATIONS
        heads, kv_heads = model.config.num_attention_heads, model.config.num_key_value_heads
        shape = heads, kv_heads, head_dim(model.config)
        self._layers = [_Layer(layer, shape) for layer in self._decoder.layers]
        self._norm = _Norm(self._decoder.norm)
        first: Any = self._decoder.layers[0].self_attn
        scales = torch.tensor([first.scaling] * heads + [1.0] * kv_heads, dtype=torch.float64)[:, None]
        self._scales = scales.to(first.q_proj.weight)  # of queries and keys: the rotation scales queries too
        self.linears = tuple(linear for layer in self._layers for linear in layer.linears)

    def __call__(self, tokens_N: torch.Tensor, step: DecoderStep) -> torch.Tensor:
        x = self._decoder.embed_tokens(tokens_N)
        rotation = self._decoder.rotary_emb(x[None], step.positions[None])
        cos, sin = (part[0, :, None] * self._scales for part in rotation)
        half = sin.shape[-1] // 2
        sin[..., :half].neg_()
        for layer in self._layers:
            x = layer(x, cos, sin, step)
        return self._norm(x)


class _Layer:
    def __init__(self, layer: Any, shape: tuple[int, int, int]) -> None:
        self.heads, self.kv_heads, self.head_dim = shape
        attention, mlp = layer.self_attn, layer.mlp
        self.norms = _Norm(layer.input_layernorm), _Norm(layer.post_attention_layernorm)
        self.qkv = JoinedLinear(attention.q_proj, attention.k_proj, attention.v_proj)
        own = hasattr(attention, "q_norm")
        self.head_norms = (_Norm(attention.q_norm), _Norm(attention.k_norm)) if own else None
        self.index = attention.layer_idx
        self.out = JoinedLinear(attention.o_proj)
        self.gate_up = JoinedLinear(mlp.gate_proj, mlp.up_proj)
        self.down = JoinedLinear(mlp.down_proj)
        self.linears = self.qkv, self.out, self.gate_up, self.down

    def __call__(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, step: DecoderStep
    ) -> torch.Tensor:
        """x [N, D] -> [N, D]; cos, and sin with the sign of the rotation: [N, heads + kv_heads, d]."""
        heads, kv_heads = self.heads, self.kv_heads
        qkv = self.qkv(self.norms[0](x)).view(len(x), -1, self.head_dim)
        qk, value = qkv.split_with_sizes((heads + kv_heads, kv_heads), 1)
        if self.head_norms:
            query, key = qk.split_with_sizes((heads, kv_heads), 1)
            qk = torch.cat((self.head_norms[0](query), self.head_norms[1](key)), 1)
        left, right = qk.chunk(2, -1)
        rotated = torch.cat((right, left), -1).mul_(sin).add_(qk * cos)
        query, key = rotated.split_with_sizes((heads, kv_heads), 1)
        x = self.out(step.attend_rows(self.index, query, key, value).flatten(1)).add_(x)
        return self.down(_gated(self.gate_up(self.norms[1](x)))).add_(x)


class _Norm:
    """RMSNorm over the last dimension, in float32 or wider. A number that is a tensor already saves torch
    making one of it, which takes longer than what is done with it here."""

    def __init__(self, norm: Any) -> None:
        self._module, weight = norm, norm.weight
        self._epsilon, self._share = (
            torch.tensor(number, dtype=torch.promote_types(weight.dtype, torch.float32), device=weight.device)
            for number in (norm.variance_epsilon, 1 / len(weight))
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            return _Normed.apply(x, self._module.weight, self)  # type: ignore[no-any-return, no-untyped-call]
        return self.compute(x)[0]

    def compute(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The result, x in the type that is computed in, and what each row is multiplied by [..., 1]."""
        wide = x.to(self._epsilon.dtype)
        squares = torch.linalg.vector_norm(wide, 2, -1, True).square_()
        scale = squares.mul_(self._share).add_(self._epsilon).rsqrt_()
        return wide.mul(scale).to(x.dtype).mul_(self._module.weight), wide, scale


class _Normed(torch.autograd.Function):
    """`_Norm` with its gradient: of y = w x / r with r^2 = mean(x^2) + epsilon, it is, for g = w dy and
    u = x / r, dx = (g - u mean(g u)) / r and dw = sum(u dy)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, norm: _Norm) -> torch.Tensor:
        normed, wide, scale = norm.compute(x)
        ctx.save_for_backward(wide, scale, weight)
        ctx.dtype = x.dtype
        return normed

    @staticmethod
    def backward(ctx: Any, out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        wide, scale, weight = ctx.saved_tensors
        out, unit = out.to(wide.dtype), wide * scale
        of_weight = (out * unit).flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        into = out * weight
        into = into.sub_(unit.mul_((into * unit).mean(-1, True))).mul_(scale)
        return into.to(ctx.dtype), of_weight, None


def _gated(gate_up: torch.Tensor) -> torch.Tensor:
    """[N, 2 width] -> [N, width], silu(gate) * up; overwrites the gates where no gradient is wanted."""
    if torch.is_grad_enabled():
        return _Gated.apply(gate_up)  # type: ignore[no-any-return, no-untyped-call]
    gate, up = gate_up.chunk(2, -1)
    return _silu_(gate) * up


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate_up)
        return _gated(gate_up.clone())

    @staticmethod
    def backward(ctx: Any, out: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (gate_up,) = ctx.saved_tensors
        (gate, up), into = gate_up.chunk(2, -1), torch.empty_like(gate_up)
        into_gate, into_up = into.chunk(2, -1)
        torch.mul(out, F.silu(gate), out=into_up)
        into_gate.copy_(torch.ops.aten.silu_backward(out * up, gate))
        return into


def _silu_(x: torch.Tensor) -> torch.Tensor:
    """In place, [N, width]. On CPU the last elements of a thread's share would have other bits where it does
    not end with a whole vector (activation.py): there, few rows at a time, which torch does not share out."""
    whole = x.shape[1] % _whole_shares(torch.get_num_threads()) == 0
    if x.device.type != "cpu" or x.numel() < SERIAL or whole:
        return F.silu(x, inplace=True)
    for rows in x.split(max(1, (SERIAL - 1) // x.shape[1])):
        F.silu(rows, inplace=True)
    return x


@functools.cache
def _whole_shares(threads: int) -> int:
    """A width in whole vectors for each of the threads, however few of them torch takes."""
    return LANES * math.lcm(*range(1, threads + 1))
