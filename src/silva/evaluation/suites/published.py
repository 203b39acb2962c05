"""Suites whose rows come from a folder of the user's or from the hub: ARPO's thirteen, SimpleQA, LongBench v2
and BrowseComp-Plus.

Prompts and rubrics are in our own words. Their sources are named beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from silva.evaluation.suites.suite import Suite

BOXED = r"Solve the problem step by step. Put the final answer in \boxed{}."
TAGGED = (
    "Answer the question. Give the final answer, as short as it can be, between <answer> and </answer> at "
    "the end of your reply."
)
# What was correct to the graders of SimpleQA (openai/simple-evals, MIT).
SHORT_FACT = """\
The answer is correct if it contains all that is important in a reference, as far as the question asks for \
it, and nothing that contradicts the reference. Only the meaning counts: case, punctuation, grammar, order \
and slips in the spelling of a name do not matter, and neither do doubts that are voiced beside the right \
answer. What the question already says (a unit, a surname, the kind of thing) may be missing. A number \
must be right to the last significant digit of the reference: for 120k, 124k is right, while 113k is wrong \
and "around 100k" is no answer. It is wrong if a statement in it contradicts the reference, even if it \
hedges, if it offers several candidates, or if it says that it does not know."""
# HLE's (centerforaisafety/hle, MIT), which BrowseComp, BrowseComp-Plus and, in Chinese, xbench use as well.
EXACT = """\
Take the one exact, final answer from `answer`; if there is none, it is wrong. It is correct if it matches \
a reference, or is within a small margin of it where it is a number. It is wrong if there is any \
inconsistency, ambiguity or difference in meaning. Judge only whether the two match: do not solve the \
problem yourself and do not argue for another answer."""
# ARPO's judge (RUC-NLPIR/ARPO, MIT) and that of WebWalker ask for the same.
WHOLE_MEANING = """\
The answer is correct if it agrees fully with the meaning and the key information of a reference. Wording, \
language and additional true details do not matter. It is wrong if key information is missing or \
contradicted."""

MATHS: Mapping[str, Any] = {
    "metric": "mathematical equality",
    "reward": {"type": "math"},
    "instructions": BOXED,
    "keys": {"expert": r"\boxed{{answer}}"},
    "tools": ("python",),
    "calls": {"python": 5, "search": 10},
}
SEARCHED: Mapping[str, Any] = {
    "instructions": TAGGED,
    "keys": {"expert": "<answer>{answer}</answer>"},
    "tools": ("search", "python"),
    "calls": {"python": 5, "search": 10},
}
HOPS: Mapping[str, Any] = {
    **SEARCHED,
    "metric": "token F1",
    "reward": {"type": "token_f1"},
    "hub": "RUC-NLPIR/FlashRAG_datasets",  # of ARPO's group, with several right answers a question
    "columns": ("question", "golden_answers"),
}


def judged(rubric: str) -> dict[str, Any]:
    return {**SEARCHED, "metric": "judge", "reward": {"type": "judge", "rubric": rubric}}


PUBLISHED: Mapping[str, Suite] = {
    "aime24": Suite(
        title="AIME 2024", citation="MAA, American Invitational Mathematics Examination 2024",
        licence="problems (c) MAA", rows=30, columns=("problem", "answer"), split="train",
        hub="HuggingFaceH4/aime_2024", url="https://huggingface.co/datasets/HuggingFaceH4/aime_2024",
        files=("aime24", "aime_2024"), **MATHS,
    ),
    "aime25": Suite(
        title="AIME 2025", citation="MAA, American Invitational Mathematics Examination 2025",
        licence="problems (c) MAA", rows=30, columns=("problem", "answer"),
        hub="math-ai/aime25", url="https://huggingface.co/datasets/math-ai/aime25",
        files=("aime25", "aime_2025"), **MATHS,
    ),
    "math500": Suite(
        title="MATH-500", citation="Lightman et al. 2023, arXiv:2305.20050", licence="MIT", rows=500,
        columns=("problem", "answer"), hub="HuggingFaceH4/MATH-500",
        url="https://huggingface.co/datasets/HuggingFaceH4/MATH-500", files=("math500", "MATH-500"), **MATHS,
    ),
    "gsm8k": Suite(
        title="GSM8K", citation="Cobbe et al. 2021, arXiv:2110.14168", licence="MIT", rows=1319,
        columns=("question", "answer after ####"), hub="openai/gsm8k", subset="main",
        url="https://github.com/openai/grade-school-math", files=("gsm8k",), **MATHS,
    ),
    "math": Suite(
        title="MATH", citation="Hendrycks et al. 2021, arXiv:2103.03874",
        licence="MIT; the problems are disputed", rows=5000, columns=("problem", r"last \boxed of solution"),
        hub="DigitalLearningGmbH/MATH-lighteval",
        url="https://huggingface.co/datasets/DigitalLearningGmbH/MATH-lighteval",
        files=("math", "MATH", "math_test"), **MATHS,
    ),
    "webwalkerqa": Suite(
        title="WebWalkerQA", citation="Wu et al. 2025, arXiv:2501.07572", licence="Apache-2.0", rows=680,
        columns=("question", "answer"), hub="callanwu/WebWalkerQA", split="main",
        url="https://huggingface.co/datasets/callanwu/WebWalkerQA",
        files=("webwalkerqa", "webwalker", "WebWalkerQA"), **judged(WHOLE_MEANING),
    ),
    "hotpotqa": Suite(
        title="HotpotQA", citation="Yang et al. 2018, arXiv:1809.09600", licence="CC BY-SA 4.0", rows=7405,
        subset="hotpotqa", split="dev", url="https://hotpotqa.github.io",
        files=("hotpotqa", "hotpot_dev_distractor_v1", "hotpot_dev_fullwiki_v1"), **HOPS,
    ),
    "2wiki": Suite(
        title="2WikiMultihopQA", citation="Ho et al. 2020, arXiv:2011.01060", licence="Apache-2.0",
        rows=12576, subset="2wikimultihopqa", split="dev",
        url="https://github.com/Alab-NII/2wikimultihop", files=("2wiki", "2wikimultihopqa"), **HOPS,
    ),
    "musique": Suite(
        title="MuSiQue", citation="Trivedi et al. 2022, arXiv:2108.00573", licence="CC BY 4.0", rows=2417,
        subset="musique", split="dev", url="https://github.com/StonyBrookNLP/musique",
        files=("musique",), **HOPS,
    ),
    "bamboogle": Suite(
        title="Bamboogle", citation="Press et al. 2023, arXiv:2210.03350", licence="MIT", rows=125,
        subset="bamboogle", url="https://github.com/ofirpress/self-ask", files=("bamboogle",), **HOPS,
    ),
    "gaia": Suite(
        title="GAIA", citation="Mialon et al. 2023, arXiv:2311.12983", licence="must not be published again",
        gate="accept its conditions there and log in: huggingface-cli login", rows=127,
        columns=("Question", "Final answer"), hub="gaia-benchmark/GAIA", subset="2023_all",
        split="validation", url="https://huggingface.co/datasets/gaia-benchmark/GAIA",
        files=("gaia", "GAIA"),
        **{
            **SEARCHED,
            "metric": "exact match",
            "reward": {"type": "exact_match", "rules": "gaia"},
            "keys": {**SEARCHED["keys"], "without": ["file_name"]},
        },
    ),
    "hle": Suite(
        title="Humanity's Last Exam, without images", citation="Phan et al. 2025, arXiv:2501.14249",
        licence="MIT; must not be published again",
        gate="accept its conditions there and log in: huggingface-cli login", rows=2158,
        columns=("question", "answer"), hub="cais/hle", url="https://huggingface.co/datasets/cais/hle",
        files=("hle", "HLE"),
        **{**judged(EXACT), "keys": {**SEARCHED["keys"], "without": ["image"]}},
    ),
    "xbench": Suite(
        title="xbench-DeepSearch", citation="Chen et al. 2025, arXiv:2506.13651", licence="MIT", rows=100,
        columns=("prompt", "answer, decrypted with canary"), hub="xbench/DeepSearch", split="train",
        url="https://github.com/xbench-ai/xbench-evals", files=("xbench", "DeepSearch-2505", "DeepSearch"),
        **{**judged(EXACT), "keys": {**SEARCHED["keys"], "canary": "canary"}},
    ),
    "simpleqa": Suite(
        title="SimpleQA", citation="Wei et al. 2024, arXiv:2411.04368", licence="MIT", rows=4326,
        columns=("problem", "answer"), hub="basicv8vc/SimpleQA", url="https://github.com/openai/simple-evals",
        files=("simpleqa", "SimpleQA", "simple_qa"), **judged(SHORT_FACT),
    ),
    "longbench_v2": Suite(
        title="LongBench v2, the text searched in parts", citation="Bai et al. 2024, arXiv:2412.15204",
        licence="Apache-2.0", metric="letter", rows=503,
        columns=("question, choice_A ... choice_D, context", "answer"), hub="zai-org/LongBench-v2",
        split="train", url="https://huggingface.co/datasets/zai-org/LongBench-v2",
        files=("longbench_v2", "LongBench-v2"), tools=("search", "scroll_down", "scroll_up"),
        type="longbench_v2", place=("path", "path"), tokens=65_536,
    ),
    "browsecomp_plus": Suite(
        title="BrowseComp-Plus", citation="Chen et al. 2025, arXiv:2508.06600", licence="MIT", rows=830,
        gate="its rows are encrypted against contamination: run the decryption of its repository",
        columns=("query", "answer"), url="https://github.com/texttron/BrowseComp-Plus",
        files=("browsecomp_plus", "browsecomp_plus_decrypted"), metric="judge",
        reward={"type": "judge", "rubric": EXACT}, tools=("search", "expand", "scroll_up", "scroll_down"),
        type="browsecomp_plus_search", place=("questions", "questions"),
        beside={"corpus": ("browsecomp_plus_corpus",)},  # otherwise the documents in the rows
        # Act-PRM's limits, in words: 1,024 tokens of a part, 204 of a preview.
        keys={"part_words": 750, "preview_words": 150, "max_tool_calls": 50, "eval_size": 0},
        tokens=65_536,
    ),
}  # fmt: skip
