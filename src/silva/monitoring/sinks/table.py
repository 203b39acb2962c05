"""Rollouts as rows of a table, for trackers that show text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from silva.storage.rollouts import RolloutRow
from silva.types import Message

COLUMNS = ("step", "environment", "task", "status", "reason",
           "reward", "advantage", "tokens", "prompt", "reply")  # fmt: skip
MAX_TEXT = 8_000  # characters of a cell


def table(rows: Iterable[RolloutRow]) -> list[list[Any]]:
    """A row of `COLUMNS` for each rollout; `reward` is raw, `reply` is everything after the prompt."""
    return [_cells(row) for row in rows]


def _cells(row: RolloutRow) -> list[Any]:
    played = row.trajectory
    messages = [message for turn in played.turns for message in turn.messages]
    first = next((i for i, message in enumerate(messages) if message.role == "assistant"), len(messages))
    reason = row.reason or played.error or played.stop_reason
    return [
        row.step, row.environment, row.task, row.status, reason,
        played.raw_reward, row.advantage, played.tokens("policy"),
        _text(messages[:first]), _text([*messages[first:], *played.observation.messages]),
    ]  # fmt: skip


def _text(messages: Sequence[Message]) -> str:
    """Of a text that is too long the beginning and the end: there the answer is."""
    texts = (each.content if each.raw is None else each.raw for each in messages)
    text = "\n\n".join(f"[{each.role}] {words}" for each, words in zip(messages, texts, strict=True))
    left, half = len(text) - MAX_TEXT, MAX_TEXT // 2
    return text if left <= 0 else f"{text[:half]}\n... ({left:,} characters) ...\n{text[-half:]}"
