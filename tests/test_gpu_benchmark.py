"""The program that measures GPUs runs as a toy where there is none."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_toy_runs_and_its_numerics_hold() -> None:
    command = [sys.executable, ROOT / "benchmarks" / "gpu.py", "--device", "cpu", "--quick", "--pairs", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for part in ("numerics", "toy: nothing shared", "toy: training", "toy: decoding, 4 requests"):
        assert f"| {part}" in done.stdout, part
    assert "left out" not in done.stderr
