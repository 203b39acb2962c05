"""Dialogues from the rollouts of a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from silva.rendering.dialogue import Dialogue
from silva.storage.layout import Layout
from silva.storage.rollouts import rollouts_in
from silva.types import Message, Trajectory


def rollout_files(source: Path) -> list[Path]:
    """The files in a run's folder or a folder of rollouts, by step; none if it is neither."""
    return [*(rollouts_in(Layout(source).rollouts) or rollouts_in(source)).values()]


def said_in(played: Trajectory, where: str) -> Dialogue | None:
    """What was said in an episode, and the tools on offer; None if it failed or holds no turn.

    A reply with malformed calls is its text as sampled, in which they stand.
    """
    if played.failure is not None or not played.turns:
        return None
    return Dialogue(tuple(map(_plain, messages_of(played))), played.observation.tools, where)


def _plain(message: Message) -> Message:
    if message.errors and message.raw:
        message = replace(message, content=message.raw, reasoning=None, tool_calls=())
    return replace(message, raw=None, id="", errors=())


def messages_of(trajectory: Trajectory) -> list[Message]:
    """What was said in its turns, once: the rewritten context of a later turn repeats the task, and earlier
    turns unless it shows none of them. Of the paths of a program's calls it is the last one."""
    found = list[Message]()
    for turn in trajectory.turns:
        shown, start = turn.messages, 0
        if turn.after is not None:  # a program's call whose history is another one
            found = []
        if found and turn.fresh:
            task = trajectory.turns[0].messages[:-1]
            start = len(task) if shown[: len(task)] == task else 0
            said = [i for i, message in enumerate(shown[:-1]) if message.role == "assistant"]
            start = max([start, *(i + 1 for i in said)])
        found += shown[start:]
    return found
