"""Products with large weights, whoever multiplies, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from silva.models import products, weight_gradient
from silva.models.products import by_onednn, of_inputs, product
from silva.models.row_rules import random_numbers
from silva.models.weight_gradient import add_product
from silva.trainer.gradients import summed_in_place


@pytest.fixture(params=[True, False], ids=["AMD", "others"])
def of_amd(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param and not torch.backends.mkldnn.is_available():
        pytest.skip("torch has no oneDNN here")
    monkeypatch.setattr(products, "made_by_amd", lambda: request.param)
    return bool(request.param)


def test_who_multiplies_goes_by_processor_type_and_size(of_amd: bool) -> None:
    assert by_onednn(torch.zeros(400, 300)) is of_amd
    assert not by_onednn(torch.zeros(400, 200))
    assert not by_onednn(torch.zeros(400, 300, dtype=torch.float64))
    assert not by_onednn(torch.zeros(400, 300, dtype=torch.bfloat16))


@pytest.mark.parametrize("shape", [(1, 300), (7, 300), (2, 65, 300)])
def test_products_are_those_of_float64(of_amd: bool, shape: tuple[int, ...]) -> None:
    x, weight = random_numbers(shape, torch.float32), random_numbers((400, 300), torch.float32, 1)
    bias = random_numbers(400, torch.float32, 2)
    torch.testing.assert_close(product(x, weight, bias), product(x, weight) + bias, rtol=1e-5, atol=2e-5)
    out = product(x, weight)
    torch.testing.assert_close(out.double(), x.double() @ weight.double().T, rtol=1e-5, atol=2e-4)
    torch.testing.assert_close(
        of_inputs(out, weight).double(), out.double() @ weight.double(), rtol=1e-5, atol=5e-3
    )


@pytest.mark.parametrize("trained", [True, False])
def test_gradients_are_those_of_float64(of_amd: bool, trained: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counted(x: torch.Tensor, weight: torch.Tensor, *bias: torch.Tensor) -> torch.Tensor:
        calls.append(len(weight))
        return whole(x, weight, *bias)

    whole = products.onednn
    for module in (products, weight_gradient):
        monkeypatch.setattr(module, "onednn", counted)
    layer = nn.Linear(300, 5000)
    layer.weight.requires_grad_(trained)
    x = random_numbers((3, 50, 300), torch.float32).requires_grad_()
    pull = random_numbers((3, 50, 5000), torch.float32, 1)
    double = nn.Linear(300, 5000).double()
    double.load_state_dict(layer.state_dict())
    wide = x.detach().double().requires_grad_()
    for _ in range(2):  # the second is added to the first
        with summed_in_place(layer):
            (layer(x) * pull).sum().backward()
        (double(wide) * pull.double()).sum().backward()
    assert x.grad is not None and wide.grad is not None and double.weight.grad is not None
    # Forward, the inputs' gradient, and that of the weight in two blocks.
    assert len(calls) == 2 * (2 + 2 * trained) * of_amd
    torch.testing.assert_close(x.grad, wide.grad.float(), rtol=1e-4, atol=1e-3)
    assert layer.bias.grad is not None and double.bias.grad is not None
    torch.testing.assert_close(layer.bias.grad, double.bias.grad.float(), rtol=1e-4, atol=1e-4)
    if trained:
        assert layer.weight.grad is not None
        add_product(layer.weight, pull[0, :0], x.detach()[0, :0])  # no rows add nothing
        torch.testing.assert_close(layer.weight.grad, double.weight.grad.float(), rtol=1e-4, atol=1e-3)
    else:
        assert layer.weight.grad is None
