"""Attempts for tests of rewards."""

from __future__ import annotations

import asyncio
from typing import Any

from silva.protocols import Attempt, Reward, Score
from silva.types import Message


def attempt(reply: str, answer: Any = None, *, question: str = "What is it?", **columns: Any) -> Attempt:
    messages = (Message("user", question), Message("assistant", reply))
    return Attempt(messages, answer, columns)


def grade(reward: Reward, reply: str, answer: Any = None, **columns: Any) -> Score:
    return asyncio.run(reward.score(attempt(reply, answer, **columns)))
