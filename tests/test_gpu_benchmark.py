"""The program that measures GPUs runs as a toy where there is none."""

import sys

import gpu
import pytest
import torch


@pytest.mark.slow
def test_the_toy_runs_and_its_numerics_hold(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu", "--quick", "--pairs", "1"])
    limits = torch._dynamo.config
    monkeypatch.setattr(limits, "fail_on_recompile_limit_hit", limits.fail_on_recompile_limit_hit)  # put back
    assert gpu.main() == 0
    shown = capsys.readouterr()
    for part in ("numerics", "toy: nothing shared", "toy: training", "toy: decoding, 4 requests"):
        assert f"| {part}" in shown.out, part
    assert "left out" not in shown.err
