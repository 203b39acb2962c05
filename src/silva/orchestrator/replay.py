"""Groups of earlier steps that are trained again, see `algorithm.replay`.

    collect ──> trained ──add──> [ oldest ... newest ] ──draw──> trained again, beside those of a later step

What is drawn depends on the seed, the step and what is held, so a resumed run draws the same. The buffer is
in every checkpoint, and so in the best one, as a file of rollouts.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import groupby

from silva.algorithms.settings import ReplaySettings
from silva.ports import derive
from silva.storage.rollouts import RolloutRow, decode_rollouts, encode_rollouts
from silva.types import Group, Task

FILE = "replay.parquet"  # in a checkpoint


class Replay:
    """The buffer of one run."""

    def __init__(self, settings: ReplaySettings, seed: int):
        self.settings, self.seed = settings, seed
        self._held: list[tuple[int, Group]] = []  # with the step that it was played for

    @property
    def size(self) -> int:
        """Groups that are held."""
        return len(self._held)

    def draw(self, step: int, version: int) -> list[Group]:
        """Groups to be trained in this step besides its own: as many as configured, or all that may be.

        Args:
            version: of the policy that is trained.
        """
        oldest = version - self.settings.max_staleness
        fresh = [group for _, group in self._held if _version(group) >= oldest]
        count = min(self.settings.groups, len(fresh))
        drawn = random.Random(derive(self.seed, "replay", step)).sample(range(len(fresh)), count)
        return [fresh[i] for i in sorted(drawn)]

    def staleness(self, groups: Sequence[Group], version: int) -> float:
        """Mean number of versions since the groups were sampled."""
        return sum(version - _version(group) for group in groups) / max(1, len(groups))

    def add(self, step: int, groups: Iterable[Group]) -> None:
        """Keep the groups that a step has trained; the oldest make room."""
        self._held += [(step, group) for group in groups]
        del self._held[: max(0, len(self._held) - self.settings.capacity)]

    def state(self) -> bytes:
        """As a parquet file of rollouts. Of a task only its name and its environment are kept."""
        return encode_rollouts(
            [
                RolloutRow(step, group.task.id, group.task.environment, group.key, trajectory, "trained")
                for step, group in self._held
                for trajectory in group.trajectories
            ]
        )

    def load(self, state: bytes) -> None:
        """Raises RecordError if the file is none of rollouts."""
        self._held = []
        for (step, key), rows in groupby(decode_rollouts(state, FILE), lambda row: (row.step, row.group)):
            first, *others = rows
            task = Task(first.task, first.environment, 0, {})
            group = Group(key, task, tuple(row.trajectory for row in (first, *others)))
            self._held.append((step, group))


def _version(group: Group) -> int:
    """The oldest policy that sampled a token of it."""
    segments = (s for turn in group.turns for s in turn.segments)
    return min((version for s in segments for version in s.versions), default=0)
