"""Which rollouts the report shows, and as what: a bounded sample of the run's parquet files.

Flat columns of all files are read first (small); then, for the chosen rows only, the dialogues. A
rollout is "good" or "bad" by its raw reward: above or below the middle of the range that its
environment's scored rollouts span in this run.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from silva.errors import RecordError
from silva.storage.layout import Layout
from silva.storage.rollouts import read_columns, read_rollouts, rollouts_in
from silva.types import Message, Segment, Trajectory, Turn

Decode = Callable[[Sequence[int]], str]
Key = tuple[Path, int]  # file, row in it

QUOTAS = {"best": 60, "worst": 60, "failed": 40, "dropped": 30, "eval": 50}  # rollouts shown, at most
PER_STEP = 3  # of one kind
MAX_TEXT = 20_000  # characters of one message
MAX_CHARACTERS = 8_000_000  # of all dialogues together
MAX_TOKENS = 100_000  # of all token views together

_FLAT = ("step", "environment", "task", "group", "trajectory", "parent", "status", "reason", "stop_reason",
         "failure", "error", "reward_raw", "reward_shaped", "rewards", "shaped", "metrics", "advantage",
         "turn_count", "tokens", "response_tokens")  # fmt: skip
_SHORT = ("step", "environment", "status", "failure", "reward_raw")
_MESSAGE = ("role", "content", "reasoning", "tool_calls", "name", "errors")


def sample_rollouts(run: Layout, decode: Decode | None, problems: list[str]) -> dict[str, Any]:
    """`{"total", "shown", "counts", "rows"}`: rows in order of step, each with its dialogue. Of an evaluation
    all are shown.

    Files that cannot be read are named in `problems`.
    """
    flat: dict[Key, dict[str, Any]] = {}
    evaluation = run.episodes.exists()
    for path in [run.episodes] if evaluation else rollouts_in(run.rollouts).values():
        try:
            rows = read_columns(path, _SHORT)
        except RecordError as error:
            problems.append(str(error))
            continue
        flat |= {(path, index): row for index, row in enumerate(rows)}
    verdicts = _verdicts(flat)
    counts = Counter(row["status"] for row in flat.values()) + Counter(verdicts.values())
    chosen = [*flat] if evaluation else _choose(flat)
    shown = details(chosen, decode, problems)
    judged = {row["environment"] for row in shown.values() if evaluation and "success" in row["metrics"]}
    for key, row in shown.items():
        row["verdict"] = verdicts.get(key, "")
        if evaluation and not row["has_result"]:
            row["verdict"] = "failed"
        elif row["environment"] in judged:  # as an evaluation counts it
            whole = row.get("failure") is None and row["metrics"].get("success", 0.0) >= 1
            row["verdict"] = "solved" if whole else "unsolved"
    return {"total": len(flat), "shown": len(shown), "counts": dict(counts), "rows": list(shown.values())}


def _verdicts(flat: Mapping[Key, Mapping[str, Any]]) -> dict[Key, str]:
    scored = {key: row for key, row in flat.items() if row["status"] != "failed" and row["failure"] is None}
    rewards: dict[str, list[float]] = defaultdict(list)
    for row in scored.values():
        rewards[row["environment"]].append(row["reward_raw"])
    ends = {name: (min(values), max(values)) for name, values in rewards.items()}
    middle = {name: 0.0 if low == high else (low + high) / 2 for name, (low, high) in ends.items()}
    return {
        key: "good" if row["reward_raw"] > middle[row["environment"]] else "bad"
        for key, row in scored.items()
    }


def _choose(flat: Mapping[Key, Mapping[str, Any]]) -> list[Key]:
    """A few of each kind from steps spread evenly over the run; always the same ones."""
    kinds: dict[str, dict[int, list[Key]]] = {name: defaultdict(list) for name in QUOTAS}
    for key, row in flat.items():
        for name in ("best", "worst") if row["status"] == "trained" else (row["status"],):
            kinds[name][row["step"]].append(key)
    chosen: set[Key] = set()
    for name, by_step in kinds.items():
        candidates: list[Key] = []
        steps = spread(sorted(by_step), QUOTAS[name])
        for step in steps:
            keys = sorted(by_step[step], key=lambda key: flat[key]["reward_raw"], reverse=name == "best")
            each = min(PER_STEP, -(-QUOTAS[name] // len(steps)))
            candidates += spread(keys, each) if name in ("eval", "dropped") else keys[:each]
        chosen |= set(spread(candidates, QUOTAS[name]))
    return [key for key in flat if key in chosen]


def spread(items: Sequence[Any], count: int) -> list[Any]:
    """`count` of `items` at equal distances, the first and the last among them."""
    if len(items) <= count:
        return list(items)
    if count == 1:
        return [items[-1]]
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def cut(text: str, most: int, left: int) -> tuple[str, int]:
    """The text, or as much of it as `most` and what is `left` of a budget allow; and what is left then."""
    limit = max(0, min(most, left))
    if len(text) <= limit:
        return text, left - len(text)
    return text[:limit] + f" … ({len(text) - limit:,} more characters)", left - limit


def details(chosen: Iterable[Key], decode: Decode | None, problems: list[str]) -> dict[Key, dict[str, Any]]:
    """The chosen rows, each with its dialogue; files that cannot be read are named in `problems`."""
    by_file: dict[Path, list[int]] = defaultdict(list)
    for path, index in chosen:
        by_file[path].append(index)
    budget = _Budget(decode, sum(len(indices) for indices in by_file.values()))
    found: dict[Key, dict[str, Any]] = {}
    for path, indices in by_file.items():
        try:
            values = read_columns(path, _FLAT, indices)
            rows = read_rollouts(path, indices, tokens=decode is not None)
        except RecordError as error:
            problems.append(str(error))
            continue
        for index, flat, row in zip(indices, values, rows, strict=True):
            found[path, index] = budget.rollout(flat, row.trajectory)
    return found


class _Budget:
    """Turns rows into what the page shows. Each may use its share of the limits and what others left."""

    def __init__(self, decode: Decode | None, rows: int) -> None:
        self._decode = decode
        self._characters = self._tokens = 0
        self._share = MAX_CHARACTERS // max(rows, 1), MAX_TOKENS // max(rows, 1)
        self._texts: dict[int, str] = {}

    def rollout(self, flat: Mapping[str, Any], trajectory: Trajectory) -> dict[str, Any]:
        self._characters += self._share[0]
        self._tokens += self._share[1]
        shown = {name: flat[name] for name in _FLAT if flat[name] is not None}
        for name in ("rewards", "shaped", "metrics"):
            shown[name] = getattr(trajectory, name)
        shown["has_result"] = trajectory.has_result
        shown["turns"] = [self._turn(turn) for turn in trajectory.turns]
        last = trajectory.observation
        shown["last"] = [self._message(m) for m in last.context or last.messages]
        return shown

    def _turn(self, turn: Turn) -> dict[str, Any]:
        shown: dict[str, Any] = {
            "fresh": turn.fresh,
            "stop_reason": turn.stop_reason,
            "rewards": turn.rewards,
            "shaped": turn.shaped,
            "messages": [self._message(message) for message in turn.messages],
        }
        if self._decode is not None:
            shown["tokens"] = self._token_view(turn.segments)
            shown["read"] = self._cut(self._decode(turn.segments[0].tokens))
            shown["said"] = self._cut(self._decode(turn.reply_tokens))
        return shown

    def _message(self, message: Message) -> dict[str, Any]:
        shown = {name: getattr(message, name) for name in _MESSAGE if getattr(message, name)}
        shown["content"] = self._cut(message.content)
        if message.reasoning:
            shown["reasoning"] = self._cut(message.reasoning)
        if message.tool_calls:
            shown["tool_calls"] = [[c.name, self._cut(json.dumps(c.arguments, ensure_ascii=False))]
                                   for c in message.tool_calls]  # fmt: skip
        return shown

    def _cut(self, text: str) -> str:
        shown, self._characters = cut(text, MAX_TEXT, self._characters)
        return shown

    def _token_view(self, segments: Sequence[Segment]) -> list[tuple[str, float, float | None]] | None:
        """(text, log-probability sampled with, entropy) of each sampled token; None beyond the limit."""
        policy = [segment for segment in segments if segment.source == "policy"]
        count = sum(len(segment.tokens) for segment in policy)
        if count > self._tokens:
            return None
        self._tokens -= count
        return [
            (self._text(token), round(logprob, 4), None if entropy is None else round(entropy, 4))
            for segment in policy
            for token, logprob, entropy in zip(
                segment.tokens,
                segment.logprobs,
                segment.entropies or [None] * len(segment.tokens),
                strict=True,
            )
        ]

    def _text(self, token: int) -> str:
        if token not in self._texts:
            assert self._decode is not None
            self._texts[token] = self._decode([token])
        return self._texts[token]
