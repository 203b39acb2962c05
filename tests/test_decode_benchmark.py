"""The benchmark of the engine refuses names that it does not know before it starts anything."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "decode.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--peers", "vllm", "vLLM"), "argument --peers: invalid choice: 'vLLM' (choose from 'generate', "),
        (("--only", "9 x"), "argument --only: no case contains '9 x' (names: '1 x 64 + 64, one prompt', "),
        (("--quick", "--only", "32"), "no case contains '32' (names: '8 x 64 + 8, one prompt')"),
    ],
)  # fmt: skip
def test_an_unknown_name_is_refused_at_once(arguments: tuple[str, ...], words: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2 and words in done.stderr
    assert "starting" not in done.stderr and done.stdout == ""


def test_help_lists_the_names() -> None:
    shown = " ".join(run("--help").stdout.split())
    assert "{generate,continuous,vllm,llama.cpp}" in shown and "'32 x 448 + 64, one prompt'" in shown
