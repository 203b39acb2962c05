"""Which forests of rollouts the report draws, and as what: a bounded sample of the run's parquet files.

    task ─┬─ turn ─┬─ turn ── turn      a node is a turn; what trajectories share is one node
          │        └─ turn ── turn      the last node of a trajectory is a leaf
          └─ turn ── turn

A forest is all that one piece of work became: independent episodes, episodes that branch, or, of an expert's
states, the thoughts for each (`<work>/t0`, `<work>/t1`, ...), where the best thought leads to the next state.
Of each step that is shown the work with the most branches is taken, of equals that whose rewards vary most.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, pvariance
from typing import Any

from silva.errors import RecordError
from silva.monitoring.report_rollouts import cut, spread
from silva.storage.rollouts import RolloutRow, read_columns, read_rollouts, rollouts_in, state_of, work_of
from silva.types import Message, Turn

FORESTS = 12  # drawn, at most
NODES = 600  # of one; further trajectories are left out and counted
MAX_TEXT = 4_000  # characters of one message
MAX_CHARACTERS = 3_000_000  # of all of them together
_FLAT = ("step", "group", "status", "parent", "reward_raw")


@dataclass
class _Node:
    turn: Turn
    parent: int  # -1: the task
    depth: int
    leaves: list[RolloutRow] = field(default_factory=list)  # trajectories that go through it
    ends: list[RolloutRow] = field(default_factory=list)  # those that end with it


def sample_forests(folder: Path, problems: list[str]) -> list[dict[str, Any]]:
    """The forests in order of step, each `{"step", "work", "environment", "task", "leaves", "left_out",
    "nodes"}`.

    Files that cannot be read are named in `problems`, unless they are there already.
    """
    works: dict[int, dict[str, list[int]]] = {}
    flat: dict[int, list[dict[str, Any]]] = {}
    files = rollouts_in(folder)
    for step, path in files.items():
        try:
            flat[step] = read_columns(path, _FLAT)
        except RecordError:  # the list of rollouts names it
            continue
        for index, row in enumerate(flat[step]):
            if row["status"] != "eval" and row["group"]:
                works.setdefault(step, {}).setdefault(work_of(row["group"]), []).append(index)
    budget, found = [MAX_CHARACTERS], []
    for step in spread(sorted(works), FORESTS):
        work, rows = max(works[step].items(), key=lambda item: _interest([flat[step][i] for i in item[1]]))
        try:
            read = read_rollouts(files[step], rows)
        except RecordError as error:
            problems.append(str(error))
            continue
        if forest := forest_of(work, read, budget):
            found.append(forest)
    return found


def forest_of(work: str, rows: Sequence[RolloutRow], budget: list[int]) -> dict[str, Any] | None:
    """The nodes of the trajectories of one piece of work, parents first; None if nothing was played.

    Args:
        budget: characters that all texts may still have; what is used is taken off.
    """
    nodes: list[_Node] = []
    places: dict[str | None, int] = {None: -1}  # of turns, by id; None: the task
    drawn, left_out = 0, 0
    for row, above in _attached(rows):
        turns = row.trajectory.turns
        if above not in places or len(nodes) + sum(turn.id not in places for turn in turns) > NODES:
            left_out += 1
            continue
        at = places[above]
        for turn in _parents_first(turns):
            if turn.after is not None:
                at = places.get(turn.after, places[above])
            if turn.id not in places:
                places[turn.id] = len(nodes)
                nodes.append(_Node(turn, at, nodes[at].depth + 1 if at >= 0 else 0))
            at = places[turn.id]
            nodes[at].leaves.append(row)
        if turns:
            nodes[places[turns[-1].id]].ends.append(row)
            drawn += 1
    if not nodes:
        return None
    first = rows[0]
    return {
        "step": first.step, "work": work, "environment": first.environment, "task": first.task,
        "leaves": drawn, "left_out": left_out, "nodes": [_shown(node, budget) for node in nodes],
    }  # fmt: skip


def _parents_first(turns: Sequence[Turn]) -> list[Turn]:
    """Of the calls of a program each path after the turn that it forks from."""
    found, waiting = list[Turn](), list[list[Turn]]()
    for turn in turns:
        waiting += [[turn]] if turn.after is not None or not waiting else []
        if waiting[-1][-1] is not turn:
            waiting[-1].append(turn)
    while waiting:
        known = {turn.id for turn in found} | {"", None}
        path = next((path for path in waiting if path[0].after in known), waiting[0])
        waiting.remove(path)
        found += path
    return found


def _interest(rows: Sequence[Mapping[str, Any]]) -> tuple[int, int, float]:
    """Branches, then states with thoughts, then how much rewards vary."""
    branches = sum(row["parent"] is not None for row in rows)
    states = len({row["group"] for row in rows})
    rewards = [row["reward_raw"] for row in rows if row["reward_raw"] is not None]
    return branches, states, pvariance(rewards) if len(rewards) > 1 else 0.0


def _attached(rows: Sequence[RolloutRow]) -> list[tuple[RolloutRow, str | None]]:
    """Each trajectory with the turn before its first one: for thoughts the best of the state before."""
    states: dict[int, list[RolloutRow]] = defaultdict(list)
    plain = []
    for row in rows:
        if (state := state_of(row.group)) is None:
            plain.append(row)
        else:
            states[state].append(row)
    if not states:  # roots first: what a branch shares with its parent is there already
        return [(row, None) for row in sorted(plain, key=lambda row: row.trajectory.parent is not None)]
    found: list[tuple[RolloutRow, str | None]] = []
    above = None
    for number in sorted(states):
        found += [(row, above) for row in states[number]]
        best = max(states[number], key=lambda row: row.trajectory.raw_reward)
        above = best.trajectory.turns[-1].id if best.trajectory.turns else None
    return found


def _shown(node: _Node, budget: list[int]) -> dict[str, Any]:
    turn, usable = node.turn, [row for row in node.leaves if row.trajectory.failure is None]
    entropies = [h for segment in turn.reply if segment.source == "policy" for h in segment.entropies]
    advantages = [row.advantage for row in usable if row.advantage is not None]
    sampled = [segment.count for segment in turn.reply if segment.source == "policy"]
    versions = [v for segment in turn.reply if segment.source == "policy" for v in segment.versions]
    trained = [row.version for row in node.leaves if row.version is not None]
    return {
        "parent": node.parent,
        "depth": node.depth,
        "entropy": fmean(entropies) if entropies else None,
        "advantage": fmean(advantages) if advantages else None,
        "reward": fmean(row.trajectory.raw_reward for row in usable) if usable else None,
        "staleness": max(trained) - min(versions) if trained and versions else None,
        "leaves": len(node.leaves),
        "tokens": sum(sampled),
        "ends": [_end(row) for row in node.ends],
        "messages": [_message(message, budget) for message in _new(turn)],
    }


def _end(row: RolloutRow) -> dict[str, Any]:
    trajectory = row.trajectory
    return {
        "trajectory": trajectory.id,
        "reward": None if trajectory.failure else trajectory.raw_reward,
        "stop_reason": trajectory.stop_reason,
        "status": row.status,
        "error": trajectory.error or "",
    }


def _new(turn: Turn) -> Sequence[Message]:
    """What was shown since the reply before, and the reply: a rewritten context holds earlier turns too."""
    said = [i for i, message in enumerate(turn.messages[:-1]) if message.role == "assistant"]
    return turn.messages[said[-1] + 1 if said else 0 :]


def _message(message: Message, budget: list[int]) -> dict[str, Any]:
    calls = "\n".join(f"{call.name}({dict(call.arguments)})" for call in message.tool_calls)
    text = "\n".join(part for part in (message.content, calls) if part)
    shown = {"role": message.role, "content": _cut(text, budget)}
    return shown | ({"reasoning": _cut(message.reasoning, budget)} if message.reasoning else {})


def _cut(text: str, budget: list[int]) -> str:
    shown, budget[0] = cut(text, MAX_TEXT, budget[0])
    return shown
