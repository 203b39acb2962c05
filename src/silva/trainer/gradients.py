"""Where autograd's own way costs memory or the last bits.

Of weights: autograd makes a new tensor of every weight's gradient in every micro-batch and then adds it to
the sum. Of the embedding and the head that is the size of the vocabulary twice, the largest tensors of a
small model's step. Here gradients are added to what is there while the backward pass runs.

Of what is read at the same place several times: threads add to it in the order in which they come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from silva.models.products import by_onednn, of_inputs, product
from silva.models.weight_gradient import add_product

Way = Callable[..., torch.Tensor]


@contextmanager
def summed_in_place(model: nn.Module) -> Iterator[None]:
    """Linear layers and embeddings of `model` add to `weight.grad` themselves; on CPU. Linear layers, those
    that are not trained too, multiply as products.py says.

    The forward pass and its `backward` both belong within. `torch.autograd.grad` finds no gradient of these
    weights. Layers of other types, subclasses among them, and those with a `forward` of their own keep to it.
    """
    ways: dict[type[nn.Module], Way] = {nn.Linear: _linear, nn.Embedding: _embedding}
    modules = [m for m in model.modules() if type(m) in ways and "forward" not in m.__dict__ and _plain(m)]
    try:
        for module in modules:
            module.forward = partial(ways[type(module)], module)  # type: ignore[method-assign]
        yield
    finally:
        for module in modules:
            module.__dict__.pop("forward", None)


def read(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """`x[places]`, x [N, ...] and places [M], with a gradient that has the same bits every time.

    Where a place is read more than once, indexing (on CPU) and `index_select` (on GPU) sum its gradients in
    no fixed order (`torch.use_deterministic_algorithms` lists such functions); an embedding does.
    """
    return F.embedding(places, x.flatten(1) if x.dim() > 1 else x[:, None]).view(len(places), *x.shape[1:])


def _plain(module: Any) -> bool:
    weight = module.weight
    if type(weight) is not nn.Parameter or weight.device.type != "cpu":
        return False
    if not weight.requires_grad:
        return type(module) is nn.Linear and by_onednn(weight)
    return not isinstance(module, nn.Embedding) or not (
        module.sparse or module.scale_grad_by_freq or module.max_norm
    )


def _linear(module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return _Linear.apply(x, module.weight, module.bias)  # type: ignore[no-any-return, no-untyped-call]


def _embedding(module: nn.Embedding, tokens: torch.Tensor) -> torch.Tensor:
    return _Embedding.apply(tokens, module.weight, module.padding_idx)  # type: ignore[no-any-return, no-untyped-call]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(*[x] * weight.requires_grad)
        ctx.weight = weight  # saved, it would come back from a checkpoint as a tensor of its own
        return product(x, weight, bias)  # in one, as `F.linear` does: added later, the last bits are others

    @staticmethod
    def backward(ctx: Any, out: torch.Tensor) -> tuple[torch.Tensor | None, None, torch.Tensor | None]:  # type: ignore[override]
        weight = ctx.weight
        if weight.requires_grad:
            (x,) = ctx.saved_tensors
            add_product(weight, out.flatten(0, -2), x.flatten(0, -2))
        of_bias = out.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return (of_inputs(out, weight) if ctx.needs_input_grad[0] else None), None, of_bias


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, weight: torch.Tensor, padding: int | None) -> torch.Tensor:
        ctx.save_for_backward(tokens)
        ctx.weight, ctx.padding = weight, padding
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, out: torch.Tensor) -> tuple[None, None, None]:  # type: ignore[override]
        (tokens,), weight = ctx.saved_tensors, ctx.weight
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight, dtype=weight.grad_dtype)
        tokens, rows = tokens.flatten(), out.flatten(0, -2).to(weight.grad_dtype)
        if ctx.padding is not None:  # whose vector torch does not train
            real = tokens != ctx.padding
            tokens, rows = tokens[real], rows[real]
        weight.grad.index_add_(0, tokens, rows)
        return None, None, None
