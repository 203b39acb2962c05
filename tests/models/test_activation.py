"""Activations do not depend on the batch, and training keeps torch's own."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from silva.compute import set_threads
from silva.models.activation import steady_activations


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    set_threads(3)
    yield
    torch.set_num_threads(before)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * 3


@pytest.mark.parametrize("plain", [nn.SiLU(), nn.GELU(), nn.GELU(approximate="tanh"), nn.Tanh()], ids=str)
@pytest.mark.parametrize("width", [144, 256])  # 144 is no multiple of two vectors of AVX-512
def test_rows_have_the_same_bits_in_any_number(plain: nn.Module, width: int, three_threads: None) -> None:
    """113 rows of 256 are 28,928 numbers: torch shares GELU among threads from 20,480 on, not from 32,768."""
    steady = copy.copy(plain)
    steady_activations(steady)
    x = numbers(700, width)
    with torch.inference_mode():
        full = steady(x)
        for rows in (1, 3, 17, 113, 128, 129, 511, 699):
            assert torch.equal(steady(x[:rows]), full[:rows])
            assert torch.equal(steady(x[None, -rows:]), full[None, -rows:])
        torch.testing.assert_close(full, plain(x), rtol=1e-6, atol=1e-6)


def test_with_gradients_it_is_torch_s_own(three_threads: None) -> None:
    steady = nn.SiLU()
    steady_activations(steady)
    x = numbers(700, 144).requires_grad_()
    out = steady(x)
    assert torch.equal(out, nn.SiLU()(x))
    (gradient,) = torch.autograd.grad(out.sum(), x)
    sigmoid = torch.sigmoid(x.detach().double())
    expected = sigmoid * (1 + x.detach().double() * (1 - sigmoid))
    torch.testing.assert_close(gradient.double(), expected, rtol=0, atol=1e-5)
