"""Arrays of routes: cut, joined, written as text, counted."""

from __future__ import annotations

import math

import numpy as np
import pytest

from silva.routes import after, balance, dtype_of, joined, of_text, signed, to_text

SOME = np.array([[[0, 3], [2, 1]], [[1, 0], [3, 2]]], np.uint8)  # [2, layers, k]


def test_a_token_has_the_experts_of_the_one_before_it() -> None:
    assert signed(after(SOME)).tolist() == [[[-1, -1], [-1, -1]], *SOME.tolist()]
    last = np.array([[[255, 0]]], np.uint8)  # of 256 experts, as vLLM writes them
    assert after(last).dtype == np.uint16 and signed(after(last)).tolist() == [[[-1, -1]], [[255, 0]]]
    assert (dtype_of(255), dtype_of(256)) == (np.uint8, np.uint16)


def test_what_is_not_known_is_said_so_in_the_widest_type() -> None:
    wide = np.array([[[300, 1], [0, 2]]], np.uint16)
    found = joined([(2, after(SOME[:1])), (1, None), (1, wide)])
    assert found is not None and found.dtype == np.uint16
    nothing = [[-1, -1], [-1, -1]]
    assert signed(found).tolist() == [nothing, SOME[0].tolist(), nothing, wide[0].tolist()]
    assert joined([(3, None), (0, None)]) is None


def test_text_is_base64_of_numpy_s_format() -> None:
    """Written down from `numpy.save` and `base64`, the form in which vLLM 0.32 answers."""
    head = "k05VTVBZAQB2AHsnZGVzY3InOiAnfHUxJywgJ2ZvcnRyYW5fb3JkZXInOiBGYWxzZSwgJ3NoYXBlJzogKDIsIDIsIDIpLCB9"
    assert to_text(SOME).startswith(head) and np.array_equal(of_text(to_text(SOME)), SOME)
    assert of_text(to_text(SOME.astype(np.int32))).dtype == np.uint16
    for wrong in ("?", "AAAA", to_text(SOME[0]), to_text(SOME.astype(float))):
        with pytest.raises(ValueError, match=r"base64|magic|routes of shape"):
            of_text(wrong)


def test_the_balance_is_the_mean_over_layers_of_experts() -> None:
    layers = np.array([[[0, 1], [0, 1], [0, 0]], [[0, 2], [2, 3], [0, 0]]], np.uint8)  # the last one is dense
    unknown = np.full((1, 3, 2), 255, np.uint8)
    busiest, entropy = balance([layers, unknown])
    # Shares: 1/2, 1/4, 1/4 in the first layer, four times 1/4 in the second.
    assert busiest == pytest.approx((0.5 + 0.25) / 2)
    assert entropy == pytest.approx((1.5 * math.log(2) + 2 * math.log(2)) / 2)
