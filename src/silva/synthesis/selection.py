"""Which episodes become rows, and what these hold.

    episodes, by task, the highest reward first ──> reasons to leave one out, in a fixed order ──> rows

An episode that is left out is counted once, for the first reason that holds; whether it is a duplicate or too
many, the rows before it decide. The same episodes, settings and evaluation sets give the same bytes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from silva import __version__
from silva.config.field_types import plain
from silva.config.sections import Synth
from silva.data.recorded import said_in
from silva.data.written import LOST, CannotHold, row_of
from silva.evaluation.evaluator import reports_success, success
from silva.rendering.dialogue import Dialogue, reply_text
from silva.storage.rollouts import RolloutRow
from silva.synthesis.duplicates import EvaluationSets, NearDuplicates
from silva.synthesis.texts import foreign, repetition
from silva.types import Trajectory
from silva.wire.requests import Prices, Usage


@dataclass(frozen=True)
class Teacher:
    """Who played. `prices`: of a paid service; `samples`: False for scripted play."""

    name: str
    seed: int
    samples: bool = True
    prices: Prices | None = None


@dataclass(frozen=True)
class Candidate:
    """An episode, and its row.

    said: None if it failed.
    values: the row; None if no row can hold it.
    lost: what the row does not hold, of `LOST`.
    """

    episode: RolloutRow
    said: Dialogue | None
    values: dict[str, Any] | None
    lost: frozenset[str] = frozenset()

    @classmethod
    def of(cls, episode: RolloutRow, settings: Synth, teacher: Teacher) -> Candidate:
        said = said_in(episode.trajectory, episode.trajectory.id)
        if said is None:
            return cls(episode, None, None)
        try:
            values, lost = row_of(said, "messages", {})
        except CannotHold:
            return cls(episode, said, None)
        values["provenance"] = provenance(episode, settings, teacher)
        return cls(episode, said, values, frozenset(lost))

    @property
    def task(self) -> tuple[str, str]:
        return self.episode.environment, self.episode.task

    @property
    def prose(self) -> list[str]:
        """What each reply says in words, thoughts included, calls not."""
        replies = [message for message in self._messages if message.role == "assistant"]
        return [f"{message.reasoning or ''}\n{message.content}" for message in replies]

    @property
    def characters(self) -> int:
        """Of all replies, calls and thoughts included."""
        return sum(len(reply_text(message)) for message in self._messages if message.role == "assistant")

    @property
    def texts(self) -> list[str]:
        """All that was said, system messages apart."""
        return [reply_text(message) for message in self._messages if message.role != "system"]

    @property
    def text(self) -> str:
        return "\n".join(self.texts)

    @property
    def content(self) -> str:
        return self.said.content if self.said else ""

    @property
    def _messages(self) -> Sequence[Any]:
        return self.said.messages if self.said else ()


class Selection:
    """Rows so far, and what was left out.

    rows: the candidates that are kept.
    left_out: by reason, the reasons in their order.
    contaminated: episodes left out because of each evaluation set.
    """

    def __init__(self, settings: Synth, sets: EvaluationSets, knows_success: Iterable[str] = ()) -> None:
        self.settings, self.sets = settings, sets
        self.rows = list[Candidate]()
        self.contaminated = dict.fromkeys(sets.texts, 0)
        self._knows_success = frozenset(knows_success)
        self._of_task, self._seen = Counter[tuple[str, str]](), set[str]()
        self._near = NearDuplicates(settings.near_duplicates) if settings.near_duplicates else None
        most = settings.max_chars
        self._reasons: dict[str, Callable[[Candidate], bool]] = {
            "failed": lambda c: c.said is None,
            "unsolved": lambda c: settings.only_solved and self._unsolved(c.episode),
            "reward": lambda c: (
                settings.min_reward is not None and c.episode.trajectory.raw_reward < settings.min_reward
            ),
            "cut off": lambda c: any(turn.cut for turn in c.episode.trajectory.turns),
            "malformed calls": lambda c: any(
                message.errors for turn in c.episode.trajectory.turns for message in turn.messages
            ),
            "not writable": lambda c: c.values is None,
            "length": lambda c: (
                c.characters < settings.min_chars or (most is not None and c.characters > most)
            ),
            "language": lambda c: (
                bool(settings.languages) and any(foreign(text, settings.languages) for text in c.prose)
            ),
            "repetition": lambda c: (
                settings.max_repetition < 1
                and any(repetition(text) > settings.max_repetition for text in c.prose)
            ),
            "contaminated": self._is_contaminated,
            "duplicate": lambda c: c.content in self._seen,
            "near duplicate": lambda c: self._near is not None and self._near.find(c.text) is not None,
            "not the best": lambda c: 0 < settings.best <= self._of_task[c.task],
            "surplus": lambda c: settings.max_rows is not None and len(self.rows) >= settings.max_rows,
        }
        self.left_out = dict.fromkeys(self._reasons, 0)

    def add(self, candidate: Candidate) -> str:
        """Why it is left out; "" if it is a row now."""
        for reason, holds in self._reasons.items():
            if holds(candidate):
                self.left_out[reason] += 1
                return reason
        self.rows.append(candidate)
        self._of_task[candidate.task] += 1
        self._seen.add(candidate.content)
        if self._near is not None:
            self._near.add(candidate.text)
        return ""

    def lines(self) -> bytes:
        """The rows as JSON Lines; ASCII, as texts may hold half a surrogate."""
        return "".join(json.dumps(row.values) + "\n" for row in self.rows).encode()

    @property
    def lost(self) -> dict[str, int]:
        """In how many rows something has no place, in words."""
        return dict(sorted(Counter(LOST.get(each, each) for row in self.rows for each in row.lost).items()))

    def _unsolved(self, episode: RolloutRow) -> bool:
        return episode.environment in self._knows_success and not success(episode.trajectory)

    def _is_contaminated(self, candidate: Candidate) -> bool:
        found = self.sets.found_in(candidate.texts) if self.contaminated else set()
        for name in found:
            self.contaminated[name] += 1
        return bool(found)


def select(
    episodes: Sequence[RolloutRow], settings: Synth, sets: EvaluationSets, teacher: Teacher
) -> Selection:
    """Rows by task, in the order of the episodes; of one task those with the highest reward first.

    Raises:
        CapabilityError: `near_duplicates` is set, and the package that finds them is missing.
    """
    by_task = dict[tuple[str, str], list[RolloutRow]]()
    played = dict[str, list[Trajectory]]()
    for episode in episodes:
        by_task.setdefault((episode.environment, episode.task), []).append(episode)
        played.setdefault(episode.environment, []).append(episode.trajectory)
    knows = [label for label, trajectories in played.items() if reports_success(trajectories)]
    selection = Selection(settings, sets, knows)
    for those in by_task.values():
        for episode in sorted(those, key=lambda each: -each.trajectory.raw_reward):
            selection.add(Candidate.of(episode, settings, teacher))
    return selection


def provenance(episode: RolloutRow, settings: Synth, teacher: Teacher) -> dict[str, Any]:
    """Where a row is from: task, sample and seed name its episode, which can be played again."""
    played = episode.trajectory
    return {
        "environment": episode.environment,
        "task": episode.task,
        "sample": int(played.id.rpartition("/")[2]),
        "seed": teacher.seed,
        "model": teacher.name,
        **({"sampling": plain(settings.sampling)} if teacher.samples else {}),
        "reward": played.raw_reward,
        **({"cost": teacher.prices.of(usage(played))} if teacher.prices else {}),
        "version": __version__,
    }


def usage(played: Trajectory) -> Usage:
    """Tokens of the requests of an episode: every turn sends its whole context again."""
    context = asked = answered = 0
    for turn in played.turns:
        context = turn.segments[0].count + (0 if turn.fresh else context)
        said = sum(segment.count for segment in turn.reply)
        asked, answered, context = asked + context, answered + said, context + said
    return Usage(asked, answered)
