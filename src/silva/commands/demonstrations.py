"""`silva demonstrations`: what a run's best rollouts said, as rows to imitate.

    group ──> its trajectory with the highest raw reward, if that is enough ──> one row of JSON

Thoughts for an expert's states (rollouts/thoughts.py) give `prompt` and `answer`, which the environment
`dataset` imitates; episodes give `messages`, for the environment `demonstrations`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from silva.commands.command import Given
from silva.data.recorded import messages_of
from silva.errors import ConfigError
from silva.monitoring.printable import put
from silva.ports import FILES
from silva.rendering.dialogue import reply_text
from silva.storage.layout import Layout
from silva.storage.rollouts import RolloutRow, read_rollouts, rollouts_in, state_of
from silva.thoughts import OPEN
from silva.types import Message, Trajectory

DEFAULT = "demonstrations.jsonl"


@dataclass(frozen=True)
class Written:
    """`groups`: of which the rows are the best; `reward`: mean of the rows; `thoughts`: rows with one."""

    path: Path
    rows: int
    groups: int
    reward: float
    thoughts: int

    def __str__(self) -> str:
        return (
            f"{self.path}: {self.rows} demonstrations from {self.groups} groups, mean reward "
            f"{self.reward:.3f}, {self.thoughts} with thoughts"
        )


def run(given: Given) -> int:
    folder = given.first("run; expected its folder")
    if len(given.rest) > 1:
        raise ConfigError(
            f"silva demonstrations: got {' '.join(given.rest[1:])!r}, expected one folder of a run"
        )
    least = given.options.get("--min-reward")
    try:
        number = None if least is None else float(least)
    except ValueError:
        raise ConfigError(f"--min-reward: got {least!r}, expected a number") from None
    output = Path(given.options["--output"]) if "--output" in given else None
    put(write_demonstrations(Path(folder), output, number))
    return 0


def write_demonstrations(run: Path, output: Path | None = None, min_reward: float | None = None) -> Written:
    """Write the best trajectory of each group that was played in training, and say what was written.

    Args:
        min_reward: the least raw reward of a row; None: any.

    Raises:
        ConfigError: the folder has no rollouts of training, or none is good enough.
    """
    files = rollouts_in(Layout(run).rollouts)
    if not files:
        raise ConfigError(f"{run}: expected the folder of a run with rollouts (monitoring.rollouts = true)")
    played = [best for path in files.values() for best in _best(read_rollouts(path, tokens=False))]
    states = [best for best in played if state_of(best.group) is not None]
    rows = dict[str, dict[str, Any]]()
    for best in states or played:  # beside states, whole episodes would say the same again
        if min_reward is None or best.trajectory.raw_reward >= min_reward:
            said = _state(best.trajectory) if states else _dialogue(best.trajectory)
            about = {"reward": best.trajectory.raw_reward, "task": best.task, "step": best.step}
            rows.setdefault(json.dumps(said), {**said, **about})  # equal ones once
    groups = len(states or played)
    if not rows:
        least = "" if min_reward is None else f" with a raw reward of {min_reward:g} or more"
        raise ConfigError(f"{run}: got {groups} groups of training and no rollout{least}")
    path = output or run / DEFAULT
    FILES.write_atomic(path, "".join(json.dumps(row) + "\n" for row in rows.values()).encode())
    found = list(rows.values())
    thoughts = sum(OPEN in json.dumps([row.get("answer"), row.get("messages")]) for row in found)
    return Written(path, len(found), groups, fmean(row["reward"] for row in found), thoughts)


def _best(rows: Sequence[RolloutRow]) -> Iterator[RolloutRow]:
    groups: dict[str, list[RolloutRow]] = defaultdict(list)
    for row in rows:
        if row.status in ("trained", "dropped") and row.trajectory.failure is None and row.trajectory.turns:
            groups[row.group].append(row)
    for played in groups.values():
        yield max(played, key=lambda row: row.trajectory.raw_reward)


def _state(trajectory: Trajectory) -> dict[str, Any]:
    *prompt, reply = trajectory.turns[0].messages
    return {"prompt": [_plain(message) for message in prompt], "answer": _text(reply)}


def _dialogue(trajectory: Trajectory) -> dict[str, Any]:
    return {"messages": [_plain(message) for message in messages_of(trajectory)]}


def _plain(message: Message) -> Mapping[str, str]:
    return {
        "role": message.role,
        "content": _text(message) if message.role == "assistant" else message.content,
    }


def _text(message: Message) -> str:
    """What was said: as sampled if that is known and holds all of it, else put together."""
    if message.raw is not None and (message.reasoning is None or OPEN in message.raw):
        return message.raw
    return reply_text(message)
