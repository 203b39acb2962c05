"""Pairs of reference and answer, right and wrong, with hard negatives beside each right one: maths_pairs.tsv.

The column math_verify says whether math-verify 0.9 alone takes the answer for right, read as
`\\boxed{...}` or as plain text: one of the two is enough for a right answer, both must be mistaken for a
wrong one.
"""

from __future__ import annotations

import asyncio
import csv
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import pytest
from tests.rewards.attempts import attempt

from silva.protocols import Score
from silva.rewards.maths import Math

math_verify = pytest.importorskip("math_verify", reason="needs math-verify: pip install 'silva[math]'")
with Path(__file__).with_name("maths_pairs.tsv").open(encoding="utf-8", newline="") as file:
    PAIRS = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
DOCS = Path(__file__).parents[2] / "docs" / "rewards.md"


async def _graded() -> list[Score]:
    reward = Math(seconds=20).build()
    return await asyncio.gather(
        *(reward.score(attempt(f"<answer>{pair['answer']}</answer>", pair["reference"])) for pair in PAIRS)
    )


@pytest.mark.slow
def test_no_wrong_answer_is_solved_and_nearly_all_right_ones_are() -> None:
    counts: Counter[tuple[str, str, str]] = Counter()
    solved_wrong, missed = [], []
    for pair, score in zip(PAIRS, asyncio.run(_graded()), strict=True):
        kind, verdict, what = pair["kind"], pair["verdict"], f"{pair['answer']!r} for {pair['reference']!r}"
        assert verdict in ("right", "wrong")
        counts[kind, verdict, "pairs"] += 1
        counts[kind, verdict, "silva"] += score.solved
        counts[kind, verdict, "math-verify"] += pair["math_verify"] == "1"
        if score.solved != (verdict == "right"):
            (missed if verdict == "right" else solved_wrong).append(f"{kind}: {what}")
    total: Counter[tuple[str, str]] = Counter()
    for (_, verdict, who), number in counts.items():
        total[verdict, who] += number
    print("\nright, not solved:", *missed, sep="\n  ")
    assert len(PAIRS) >= 600 and not solved_wrong
    assert total["right", "silva"] >= 0.98 * total["right", "pairs"]
    assert total["right", "silva"] > total["right", "math-verify"] and total["wrong", "math-verify"] > 0
    assert _table(counts) in DOCS.read_text(encoding="utf-8"), "docs/rewards.md: expected\n" + _table(counts)


def _table(counts: Counter[tuple[str, str, str]]) -> str:
    lines = [
        "| kind | right | of them solved | by math-verify | wrong | of them solved | by math-verify |",
        "|---|---|---|---|---|---|---|",
    ]
    kinds = sorted({kind for kind, _, _ in counts})
    for name in [*kinds, "all"]:
        numbers = [
            sum(counts[kind, verdict, who] for kind in kinds if name in (kind, "all"))
            for verdict in ("right", "wrong")
            for who in ("pairs", "silva", "math-verify")
        ]
        lines.append(f"| {name} | " + " | ".join(map(str, numbers)) + " |")
    return "\n".join(lines)


@pytest.mark.slow
@pytest.mark.skipif(version("math-verify") != "0.9.0", reason="the column is that of math-verify 0.9.0")
def test_the_column_is_what_math_verify_says() -> None:
    for pair in PAIRS[::60]:
        right = math_verify.parse(f"\\boxed{{{pair['reference']}}}", parsing_timeout=None)
        readings = [
            math_verify.parse(text, parsing_timeout=None)
            for text in (f"\\boxed{{{pair['answer']}}}", pair["answer"])
        ]
        found = [math_verify.verify(right, each, timeout_seconds=None) for each in readings]
        decide = any if pair["verdict"] == "right" else all
        assert decide(found) == (pair["math_verify"] == "1"), pair
