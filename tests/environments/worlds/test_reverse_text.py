"""Exact texts only earn 1; copying, padding and listing do not."""

from __future__ import annotations

import pytest

from silva.environments.worlds.reverse_text import ReverseText
from silva.types import Task

TASK = Task("r", "reverse_text", 0, {"text": "muvo pot"}, "top ovum")


@pytest.mark.parametrize(
    ("reply", "low", "high"),
    [
        ("top ovum", 1, 1),
        (" top ovum\n", 1, 1),
        ("<answer>top ovum</answer>", 1, 1),
        ('"top ovum".', 1, 1),
        ("top ovun", 0.5 * 7 / 8, 0.5 * 7 / 8),  # half the similarity
        ("", 0, 0),
        ("muvo pot", 0.01, 0.3),
        ("top ovum muvo pot", 0.01, 0.49),
        ("Top Ovum", 0.01, 0.49),
    ],
)
def test_only_the_exact_text_earns_one(reply: str, low: float, high: float, replies_to) -> None:
    (step,) = replies_to(ReverseText(partial=True, eval_size=1), TASK, [reply])
    assert low <= step.rewards["correct"] <= high
    assert step.terminated and step.metrics["success"] == float(low == 1)
    assert replies_to(ReverseText(eval_size=1), TASK, [reply])[0].rewards == {"correct": float(low == 1)}


def test_texts_are_made_as_asked_and_never_read_the_same_both_ways(first) -> None:
    tasks = ReverseText(words=2, min_letters=2, max_letters=3, eval_size=60).taskset().tasks("eval")
    for task in tasks:
        words = task.data["text"].split()
        assert len(words) == 2 and all(2 <= len(word) <= 3 for word in words)
        assert task.answer == task.data["text"][::-1] != task.data["text"]
    assert first(ReverseText(style="compact"), TASK) == "muvo pot"
