"""Gradients summed in place, against autograd's own sums (the trie's tests do so for whole models too).

And of places that are read often.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from silva.trainer.gradients import read, summed_in_place

TOKENS = torch.tensor([[1, 4, 4, 0, 2, 1], [0, 4, 3, 3, 1, 9]])


class Tied(nn.Module):
    """Token 0 is padding, some tokens come twice, one layer has a bias, and the head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(500, 8, padding_idx=0)
        self.middle = nn.Linear(8, 8)
        self.head = nn.Linear(8, 500, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.middle(self.embedding(tokens))))  # type: ignore[no-any-return]


@pytest.fixture
def model() -> Tied:
    torch.manual_seed(0)
    return Tied().double()


def backward(model: nn.Module, tokens: torch.Tensor) -> None:
    F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten()).backward()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_a_layer_with_a_bias_keeps_its_bits() -> None:
    """Training with the bits of sampling calls it either way."""
    layer, x = nn.Linear(200, 96), torch.randn(33, 200)
    with summed_in_place(layer):
        summed = layer(x)
    assert torch.equal(summed, layer(x))


def test_two_micro_batches_sum_to_what_autograd_sums_them_to(model: Tied) -> None:
    for tokens in TOKENS:
        backward(model, tokens[None])
    expected = gradients(model)
    model.zero_grad()
    with summed_in_place(model):
        for tokens in TOKENS:
            backward(model, tokens[None])
    assert expected.keys() == {"embedding.weight", "middle.weight", "middle.bias"}
    torch.testing.assert_close(gradients(model), expected, rtol=0, atol=1e-14)


def test_no_second_gradient_of_the_vocabulary_is_made(model: Tied) -> None:
    class Sizes(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.made: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            fresh = isinstance(out, torch.Tensor) and out.shape == (500, 8) and out is not args[0]
            if fresh and not out._is_view():
                self.made.append(str(func))
            return out

    with summed_in_place(model):
        backward(model, TOKENS)  # the first one becomes the sum
        with Sizes() as sizes:
            backward(model, TOKENS)
    assert sizes.made == []
    with Sizes() as sizes:
        backward(model, TOKENS)
    assert len(sizes.made) >= 2  # autograd's: of the head, and of the embedding


def test_what_does_not_train_has_no_gradient(model: Tied) -> None:
    model.middle.weight.requires_grad_(False)
    with summed_in_place(model):
        backward(model, TOKENS)
    assert gradients(model).keys() == {"embedding.weight", "middle.bias"}


def test_afterwards_layers_are_as_they_were(model: Tied) -> None:
    special = model.middle.forward = lambda x: x  # type: ignore[method-assign, assignment]
    with pytest.raises(KeyError), summed_in_place(model):
        assert model.middle.forward is special
        assert "forward" in model.head.__dict__
        raise KeyError
    assert model.middle.forward is special
    assert "forward" not in vars(model.head) and "forward" not in vars(model.embedding)
    (gradient,) = torch.autograd.grad(model(TOKENS).sum(), [model.embedding.weight])
    assert gradient.shape == (500, 8)


@pytest.mark.parametrize("shape", [(40, 64), (40,), (40, 4, 16)])
def test_a_read_is_indexing_with_its_gradient(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    places = torch.randint(0, 7, (50,))
    got, expected = read(x, places), x[places]
    assert torch.equal(got, expected)
    into = torch.randn_like(expected)
    (mine,), (theirs,) = (torch.autograd.grad(y, x, into) for y in (got, expected))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-13)
    assert read(x, places[:0]).shape == x[places[:0]].shape


@pytest.mark.parametrize("shape", [(280, 576), (280,)])
def test_places_read_often_have_the_same_gradient_every_time(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, requires_grad=True)
    places = torch.randint(0, 20, (40_000 if len(shape) == 1 else 400,))
    into = torch.randn(len(places), *shape[1:])
    first, *others = (torch.autograd.grad(read(x, places), x, into)[0] for _ in range(30))
    assert all(torch.equal(other, first) for other in others)
