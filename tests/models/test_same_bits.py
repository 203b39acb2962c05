"""Which rule is found for a BLAS that is made up. Whether this one keeps to its rule: test_bits.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from silva.config.sections import Lora, TinyModel
from silva.models import row_rules, same_bits
from silva.models.loading import load_model
from silva.models.row_rules import ANY, RowRule, first_rule, probed
from silva.models.same_bits import RowRules

COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 17, 31, 33, 64, 65, 130)


def product(kernel: Callable[[int], int]) -> row_rules.Product:
    """Rows of a BLAS whose kernel for so many rows is `kernel`: each gives its own number."""
    return lambda rows: torch.full((rows, 3), float(kernel(rows)))


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        (lambda rows: 0, ANY),
        (lambda rows: int(rows < 2), RowRule(2)),
        (lambda rows: int(rows < 4), RowRule(4)),
        (lambda rows: rows % 4, RowRule(4, 4)),
        (lambda rows: int(rows < 12), RowRule(16)),
        (lambda rows: rows % 8 + (rows < 16), RowRule(16, 16)),
        (lambda rows: rows, None),
    ],
)
def test_the_rule_of_a_blas(kernel: Callable[[int], int], expected: RowRule | None) -> None:
    assert first_rule([[probed(product(kernel), COUNTS)]]) == expected


def test_rows_that_differ_within_a_product_are_no_rule() -> None:
    last_differs = lambda rows: torch.arange(rows).eq(rows - 1).float()[:, None]  # noqa: E731
    assert first_rule([[probed(last_differs, COUNTS)]]) is None


def test_a_rule_serves_every_product() -> None:
    four, even = probed(product(lambda rows: int(rows < 4)), COUNTS), probed(product(lambda n: n % 8), COUNTS)
    assert first_rule([[four], [even]]) == RowRule(8, 8)
    # One family: another batch must give the same row, not only one row of its own.
    assert first_rule([[probed(product(lambda n: 1), COUNTS), probed(product(lambda n: 2), COUNTS)]]) is None


def test_how_many_rows_are_computed() -> None:
    assert [RowRule(4).padded(n) for n in (1, 4, 5)] == [4, 4, 5]
    assert [RowRule(8, 4).padded(n) for n in (1, 8, 9)] == [8, 8, 12]


def test_experts_cannot_be_filled_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.weights = nn.Linear(16, 16), nn.Parameter(torch.zeros(4, 16, 16))

    monkeypatch.setattr(row_rules, "CANDIDATES", (RowRule(64, 64),))
    rules = same_bits.probe(Experts(), head_dim=16, dtype=torch.float32)
    assert not rules.hold


def test_adapters_that_need_more_rows_fill_themselves_up(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = TinyModel(layers=1, width=32, heads=2, kv_heads=1, lora=Lora(rank=4, targets=("q_proj",)))
    loaded = load_model(settings, seed=0)
    down = loaded.model.get_submodule("model.layers.0.self_attn.q_proj.lora_A.default")
    x, rows, forward = torch.randn(3, 32), [], nn.Linear.forward

    def spy(module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        rows.append(len(x))
        return forward(module, x)

    monkeypatch.setattr(nn.Linear, "forward", spy)
    same_bits.fill_up(loaded.model, {(32, 4): RowRule(16)})
    with torch.inference_mode():
        found = down(x)
    torch.testing.assert_close(found, forward(down, x))
    assert rows == [16]


@pytest.mark.parametrize(
    ("holding", "expected"), [({1, 3}, (True, False)), ({1}, (True, True)), (set(), (False, False))]
)
def test_one_thread_is_tried_where_several_give_no_rule(
    monkeypatch: pytest.MonkeyPatch, holding: set[int], expected: tuple[bool, bool]
) -> None:
    found = lambda *_: RowRules(hold=torch.get_num_threads() in holding)  # noqa: E731
    monkeypatch.setattr(same_bits, "_probe", found)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        rules = same_bits.probe(nn.Module(), head_dim=16, dtype=torch.float32)
        assert (rules.hold, rules.one_thread, torch.get_num_threads()) == (*expected, 3)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("odd", "expected"), [((), 64), ((64,), 128), ((192,), 128), ((64, 128), 256)])
@pytest.mark.parametrize("share", [1, 200])
def test_scores_that_depend_on_how_many_keys_there_are_need_more_of_them(
    monkeypatch: pytest.MonkeyPatch, odd: tuple[int, ...], expected: int, share: int
) -> None:
    """A product of queries of 24 numbers and `odd` keys has other last bits in one score of `share`.

    All others are exact, since no machine has to have equal bits of its own.
    """
    plain = torch.bmm

    def coarse(x: torch.Tensor) -> torch.Tensor:
        return (x * 1024).round() / 1024  # sums of their products are exact in any order

    def bmm(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scores = plain(coarse(x), coarse(y))
        if y.shape[1] != 24 or y.shape[2] not in odd:
            return scores
        chosen = (scores * 1e6).long() % share == 0
        return torch.where(chosen, scores * (1 + 2**-40), scores)

    monkeypatch.setattr(torch, "bmm", bmm)
    assert same_bits._lanes.__wrapped__(24, torch.float64, 4, 1, 1) == expected
