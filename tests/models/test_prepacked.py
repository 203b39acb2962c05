"""Copies of weights: bits that depend on nothing else, never stale, out of the way in training."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from silva.models import prepacked
from silva.models.prepacked import BFLOAT16, ONEDNN, JoinedLinear, Kernel, PrepackedLinears
from silva.models.processor import multiplies_bfloat16
from silva.models.row_rules import RowRule
from silva.models.same_bits import RowRules, probe

pytestmark = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this torch has no MKL")


@pytest.fixture(autouse=True)
def faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """MKL's, whatever the machine: where packed products are slower, nothing would be packed."""
    monkeypatch.setattr(prepacked, "_faster", lambda groups, rule: True)
    monkeypatch.setattr(prepacked, "made_by_amd", lambda: False)


def rule_of(model: nn.Module) -> RowRule:
    return probe(model, head_dim=64, dtype=torch.float32).linear


def make(bias: bool = False) -> tuple[nn.Sequential, PrepackedLinears]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(576, 192, bias=bias), nn.SiLU(), nn.Linear(192, 10))
    return model, PrepackedLinears(model, rule=rule_of(model))


@pytest.mark.same_bits
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 7, 64, 65, 300])
def test_the_bits_of_the_plain_product(bias: bool, rows: int) -> None:
    model, packed = make(bias)
    x = torch.randn(2, rule_of(model).padded(rows), 576)
    with torch.inference_mode():
        plain = model(x)
        packed.refresh()
        assert packed.nbytes >= 576 * 192 * 4  # only the first layer is large
        assert torch.equal(model(x), plain)


def test_a_changed_weight_takes_the_plain_way_until_it_is_packed_again() -> None:
    model, packed = make(bias=True)
    packed.refresh()
    x = torch.randn(3, 576)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(x).sum().backward()
    optimizer.step()
    with torch.no_grad():
        expected = model(x)
    for _ in range(2):
        with torch.inference_mode():
            torch.testing.assert_close(model(x), expected)
        packed.refresh()
    with torch.no_grad():
        model[0].bias.fill_(7)  # the bias alone
    with torch.inference_mode():
        torch.testing.assert_close(model[0](x), F.linear(x, model[0].weight, torch.full((192,), 7.0)))
    with torch.no_grad():
        model[0].bias.zero_()
        model[0].weight.copy_(torch.zeros(192, 576))
    with torch.inference_mode():
        assert torch.equal(model[0](x), torch.zeros(3, 192))


def test_training_does_not_see_it() -> None:
    model, packed = make()
    packed.refresh()
    x = torch.randn(3, 576)
    model(x).sum().backward()
    assert model[0].weight.grad is not None and model[0].weight.grad.abs().sum() > 0
    packed.drop()
    assert packed.nbytes == 0


def test_those_over_the_same_weights_share_a_copy_of_them_as_they_are_now(onednn: None) -> None:
    layers = [nn.Linear(320, 320) for _ in range(3)]
    sampler, trainer, other = JoinedLinear(*layers[:2]), JoinedLinear(*layers[:2]), JoinedLinear(*layers[1:])
    for group in (sampler, trainer, other):
        group.kernel = ONEDNN
        group.pack()
    assert trainer.packed is sampler.packed and other.packed is not sampler.packed
    before = sampler.packed
    with torch.no_grad():
        layers[1].weight.mul_(2)
    trainer.pack()
    assert trainer.packed is not before and sampler.packed is before
    sampler.pack()
    assert sampler.packed is trainer.packed
    x = torch.randn(8, 320)
    torch.testing.assert_close(sampler(x), sampler.plain(x), rtol=0, atol=1e-5)


def test_other_types_and_small_layers_are_left_alone() -> None:
    for model in (nn.Linear(400, 300).double(), nn.Linear(10, 10)):
        before = model.forward
        PrepackedLinears(model).refresh()
        assert model.forward == before


@pytest.mark.same_bits
def test_shapes_without_the_same_bits_stay_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepacked, "_exact", lambda group, rule: False)
    _, packed = make()
    packed.refresh()
    assert packed.nbytes == 0


@pytest.mark.same_bits  # packed only where its bits are those of the plain product
@pytest.mark.parametrize("faster", [True, False])
def test_only_what_is_faster_is_packed(faster: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(prepacked, "made_by_amd", lambda: False)
    seconds = (2.0, 0.0, 1.0, 0.0) if faster else (1.0, 0.0, 2.0, 0.0)  # plain, between, packed, between
    clock = itertools.accumulate(itertools.cycle(seconds), initial=0.0)
    monkeypatch.setattr(prepacked.time, "perf_counter", lambda: next(clock))
    model = nn.Sequential(nn.Linear(576, 192))
    packed = PrepackedLinears(model, rule=rule_of(model))
    packed.refresh()
    assert (packed.nbytes > 0) == faster


def test_products_with_other_bits_are_found() -> None:
    group = prepacked.JoinedLinear(nn.Linear(576, 192))
    for error, same in ((0.0, True), (1e-6, False)):

        def product(x: torch.Tensor, packed: torch.Tensor, shape: torch.Tensor, bias: Any) -> torch.Tensor:
            return F.linear(x, packed, bias) + error  # noqa: B023

        group.kernel = Kernel("test", True, lambda weight: weight, product)
        assert prepacked._exact(group, RowRule()) is same
        assert group.packed is None


# --- oneDNN, whose products have bits of their own

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


@pytest.fixture
def onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepacked, "made_by_amd", lambda: True)
    monkeypatch.setattr(prepacked, "_faster", lambda groups, rule: pytest.fail("a time was asked"))


@needs_onednn
@pytest.mark.parametrize("bias", [False, True])
def test_a_row_has_the_same_bits_in_any_company(bias: bool, onednn: None) -> None:
    model, packed = make(bias)
    assert packed.kernel is ONEDNN
    x = torch.randn(300, 576)
    with torch.inference_mode():
        together = model[0](x)
        assert packed.nbytes >= 576 * 192 * 4
        torch.testing.assert_close(together, F.linear(x, model[0].weight, model[0].bias))
        for rows in (1, 2, 3, 5, 8, 9, 31, 64, 65, 257):
            assert torch.equal(model[0](x[-rows:]), together[-rows:])


@needs_onednn
def test_a_changed_weight_is_packed_again_at_once(onednn: None) -> None:
    """And after the copies were dropped: when it is packed must not decide on bits."""
    model, packed = make(bias=True)
    x = torch.randn(3, 576)
    with torch.inference_mode():
        before = model[0](x)
        packed.drop()
        assert torch.equal(model[0](x), before)
    with torch.no_grad():
        model[0].weight.mul_(2)
        model[0].bias.mul_(2)
    with torch.inference_mode():
        assert torch.equal(model[0](x), 2 * before)


@needs_onednn
def test_shapes_whose_rows_depend_on_their_company_stay_plain(onednn: None) -> None:
    group = prepacked.JoinedLinear(nn.Linear(576, 192))
    for depends in (False, True):

        def product(x: torch.Tensor, packed: torch.Tensor, shape: torch.Tensor, bias: Any) -> torch.Tensor:
            return F.linear(x, packed, bias).mul_(1 + 1e-6 * (len(x) > 8) * depends)  # noqa: B023

        group.kernel = Kernel("test", False, lambda weight: weight, product)
        assert prepacked._steady(group, rule_of(group.layers[0])) is not depends
        assert group.packed is None


# --- bfloat16

needs_products = pytest.mark.skipif(not multiplies_bfloat16(), reason="this processor has no such products")


@needs_products
@needs_onednn
@pytest.mark.parametrize("rows", [1, 7, 64, 300])
def test_a_bfloat16_weight_is_packed_and_its_products_have_the_bits_of_plain_ones(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepacked, "_faster", lambda groups, rule: True)
    model = nn.Sequential(nn.Linear(576, 192), nn.SiLU(), nn.Linear(192, 10)).bfloat16()
    packed = PrepackedLinears(model)
    assert packed.kernel is BFLOAT16
    x = torch.randn(rows, 576, dtype=torch.bfloat16)
    with torch.inference_mode():
        plain = model(x)
        packed.refresh()
        assert packed.nbytes >= 576 * 192 * 2
        assert torch.equal(model(x), plain)


def test_bfloat16_is_left_alone_where_the_processor_does_not_multiply_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prepacked, "multiplies_bfloat16", lambda: False)
    assert PrepackedLinears(nn.Sequential(nn.Linear(576, 192)).bfloat16()).kernel is None


def test_rules_say_which_kernel_has_bits_of_its_own() -> None:
    assert "linear layers packed by oneDNN: any number of rows" in RowRules(packed="oneDNN").describe()
    assert "packed" not in RowRules().describe()
