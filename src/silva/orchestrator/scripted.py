"""Scripted play to imitate, and the warm start that it makes.

    tasks ──> episodes of the script ──to_samples──> rows

Scripted episodes that fail give no demonstration. A few failures are only counted. If most episodes fail, the
environment or the limits are wrong, and this says so instead of learning from the rest.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from silva.actors.policy import Policy
from silva.actors.script import Script
from silva.config.sections import ContextSettings, EpisodeLimits, Sampling, WarmStart
from silva.errors import NoSignalError
from silva.evaluation.evaluator import reports_success, success
from silva.orchestrator.interrupt import Interrupt
from silva.orchestrator.probe import WeightSync
from silva.orchestrator.supervised import Supervision
from silva.orchestrator.tasks import TaskStream
from silva.ports import derive
from silva.protocols import Actor
from silva.rendering.renderer import Renderer
from silva.rollouts.context import FULL
from silva.rollouts.episode import play
from silva.rollouts.faults import UNWATCHED, Watch, tally
from silva.rollouts.samples import to_samples
from silva.types import Group, Sample

WINDOW = 20  # steps whose mean loss is reported, and after which the policy is tried
TRIED = 128  # episodes of a trial: its standard error is 4 points
JUDGED_FROM = 16  # scripted episodes; with fewer, the share of failed ones says little


@dataclass
class ScriptedPlay:
    """`Batches` of fresh scripted episodes, `settings.episodes_per_step` each.

    Args:
        stream: where tasks come from.
        context: what the policy will be shown of an episode.

    Attributes:
        played: episodes of the script so far.
        failed: errors of the episodes that gave no demonstration.
        contents: of the tasks that were imitated, each once.
        unsolved: only an expert is expected to solve tasks, and it has not solved any.
    """

    stream: TaskStream
    renderer: Renderer
    settings: WarmStart
    limits: EpisodeLimits
    seed: int
    watch: Watch = UNWATCHED
    context: ContextSettings = FULL
    played: int = 0
    failed: list[str] = field(default_factory=list)
    contents: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        # Tasks of their own, so that every task of the stream is imitated.
        self._trials = TaskStream(self.stream.sources, derive(self.stream.seed, "trials"), step=TRIED)
        self.unsolved = not (self.settings.mistakes or self.settings.noise)
        self._script = Script(self.renderer, self.settings.mistakes, self.settings.noise)

    async def draw(self, step: int) -> list[Sample]:
        """Raises NoSignalError if enough episodes, or those of the last step, have come to too little."""
        count, key = self.settings.episodes_per_step, f"w{step - 1}"
        groups = await self.episodes(self.stream, self._script, count, key)
        self._judge(groups, last=step == self.settings.steps)
        return to_samples(groups)

    def metrics(self) -> dict[str, float]:
        return {}  # what fails ends the run, see `_judge`

    async def learnt(self, sync: WeightSync, step: int) -> bool:
        """Whether the policy succeeds as often as `stop_success` asks; it is tried every `WINDOW` steps."""
        if self.settings.stop_success is None or step % WINDOW:
            return False
        await sync.publish()
        actor = Policy(sync.engine, self.renderer, Sampling())
        groups = await self.episodes(self._trials, actor, TRIED, f"t{step - 1}")
        solved = sum(success(t) for group in groups for t in group.trajectories)
        return solved >= self.settings.stop_success * TRIED

    async def episodes(self, tasks: TaskStream, actor: Actor, count: int, key: str) -> list[Group]:
        draws = [tasks.draw() for _ in range(count)]
        playing = [
            play(task, source.taskset, actor, self.renderer, self.limits, id=f"{key}/{i}",
                 seed=derive(self.seed, key, i), watch=self.watch, context=self.context)
            for i, (source, task) in enumerate(draws)
        ]  # fmt: skip
        ended = await asyncio.gather(*playing)
        return [Group(t.id, task, (t,)) for t, (_, task) in zip(ended, draws, strict=True)]

    def state(self) -> dict[str, Any]:
        return {
            "tasks": self.stream.state(), "trials": self._trials.state(), "played": self.played,
            "failed": [*self.failed], "contents": sorted(self.contents), "unsolved": self.unsolved,
        }  # fmt: skip

    def load(self, state: Any) -> None:
        self.stream.load(state["tasks"])
        self._trials.load(state["trials"])
        self.played, self.failed = state["played"], [*state["failed"]]
        self.contents, self.unsolved = {*state["contents"]}, state["unsolved"]

    def _judge(self, groups: Sequence[Group], *, last: bool) -> None:
        trajectories = [t for group in groups for t in group.trajectories]
        self.played += len(groups)
        self.contents |= {group.task.content() for group in groups}
        self.failed += [t.error or "" for t in trajectories if t.failure is not None]
        self.unsolved &= reports_success(trajectories) and not any(map(success, trajectories))
        if self.played < JUDGED_FROM and not last:
            return
        if 2 * len(self.failed) > self.played:
            raise NoSignalError(
                f"warm start: {len(self.failed)} of {self.played} scripted episodes failed, "
                f"so there is too little to imitate: {tally(self.failed)}"
            )
        if self.unsolved:
            raise NoSignalError(
                f"warm start: the expert solved none of {self.played} tasks, so there is nothing to imitate; "
                "rollout.limits may be too small for it, or the environment does not read its replies: "
                "look at them with `silva eval --policy expert`"
            )


@dataclass(frozen=True)
class WarmStarted:
    """What a warm start came to: its mean loss over the last updates."""

    steps: int
    loss: float


async def warm_start(
    sync: WeightSync,
    play: ScriptedPlay,
    stage: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> WarmStarted:
    """Updates on scripted play: `settings.steps`, or fewer if `settings.stop_success` is met.

    Nothing is saved in between: it is short, and the same seed gives the same weights again.

    Args:
        sync: of a trainer whose optimizer is at its start; its engine is asked only for the success that
            may end the warm start.
        stage: told how far it is.

    Raises:
        Interrupted: after Ctrl-C; the steps so far are lost.
        NoSignalError: most scripted episodes failed, the expert solved no task, or no row can be imitated.
    """
    settings = play.settings
    how, losses, updates = Supervision(settings.steps, settings.optimizer), deque[float](maxlen=WINDOW), 0
    with Interrupt() as interrupt:
        for step in range(1, settings.steps + 1):
            if rows := await play.draw(step):
                losses.append((await how.update(sync.trainer, rows, updates))["loss"])
                updates += 1
            stage("warm start", step, settings.steps)
            interrupt.check()
            if await play.learnt(sync, step):
                break
    if not losses:
        raise NoSignalError(
            f"warm start: {play.played} scripted episodes hold nothing to imitate: every "
            f"reply is empty, or a mistake (warm_start.mistakes = {settings.mistakes:g}, expected less)"
        )
    return WarmStarted(step, sum(losses) / len(losses))
