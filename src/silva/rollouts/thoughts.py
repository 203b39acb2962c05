"""Thoughts for an expert's actions: Act-PRM (Zhang and Ho, "On Learning to Think with Action Process Reward
Models", 2026).

    state ─┬─ <think> thought 1 </think> action      the action is the expert's; a thought's reward is how
           ├─ <think> thought 2 </think> action      likely it makes it: exp(mean log p of exactly its tokens)
           └─ <think> thought 3 </think> action
                        └─ the best one is played, and leads to the next state

The environment plays itself (`Scripted`): a demonstration is an episode of its expert, live or from a file
(environment `demonstrations`). The scorer is the policy of the moment.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from silva.actors.policy import Policy, policy_segment
from silva.actors.script import Script
from silva.errors import CapabilityError, ContextOverflow, NoReply
from silva.ports import derive
from silva.protocols import Reply, Request, Work
from silva.rollouts.episode import tries
from silva.rollouts.settings import ThoughtsRolloutSettings
from silva.rollouts.strategy import Strategy
from silva.routes import unknown
from silva.types import Completion, Group, Message, Segment, Trajectory, Turn

REWARD = "action_prob"


@dataclass(frozen=True, slots=True)
class Thought:
    """One thought for one state.

    Attributes:
        turn: what is trained of it, in a context of its own.
        played: the segments of the reply that is played if it is the best.
        message: the same as a message.
        probability: of the action: exp of the mean log-probability of its tokens, from 0 to 1.
    """

    turn: Turn
    played: tuple[Segment, ...]
    message: Message
    probability: float


@dataclass(frozen=True, slots=True)
class _State:
    """What the thoughts of one turn have in common.

    Attributes:
        request: what the policy is asked, and where the action is scored.
        opening: the tokens after which it thinks.
        before: tokens that open a thought in the reply that is played.
        gap: white space between a thought and the action.
        action: tokens of the expert's action.
        room: tokens that a thought may have.
    """

    request: Request
    opening: Sequence[int]
    before: Sequence[int]
    gap: str
    action: Sequence[int]
    room: int


class Thinker:
    """An actor for one episode: thinks for itself and does what the expert does.

    Attributes:
        steps: the thoughts of each turn so far, in the order they were asked for.
    """

    reads_tokens: ClassVar[bool] = True

    def __init__(self, settings: ThoughtsRolloutSettings, policy: Policy, count: int, id: str) -> None:
        self.settings, self.policy, self.count, self.id = settings, policy, count, id
        self.engine, self.renderer = policy.engine, policy.renderer
        self.steps: list[tuple[Thought, ...]] = []

    async def reply(self, request: Request) -> Reply:
        """The best of `count` thoughts, with the expert's action; of equal ones the first.

        Raises:
            CapabilityError: the environment has no expert, or begins replies where no thought can stand.
            NoReply: the expert does nothing.
            ContextOverflow: thought and action have no room.
        """
        state = await self._state(request)
        thoughts = tuple(await asyncio.gather(*(self._think(state, i) for i in range(self.count))))
        self.steps.append(thoughts)
        best = max(thoughts, key=lambda thought: thought.probability)
        routes = None if self.settings.shows_action else best.turn.segments[0].routes
        return Reply(best.played, best.message, "stop_token", prompt_routes=routes)

    async def _state(self, request: Request) -> _State:
        expert = await Script(self.renderer).reply(request)
        opened = self.renderer.opens_thought(request.tokens)
        if request.prefill.strip() and not opened:
            raise CapabilityError(
                f'rollout.type = "thoughts": environment {request.label!r} begins replies with '
                f"{request.prefill!r}, so that no thought can stand before the action"
            )
        said = expert.message.raw or ""
        marks, encode = self.renderer.marks, self.renderer.encode
        _, thinks, after = said.rpartition(marks.close)
        text = after.removeprefix(marks.answer).strip()
        if not text:
            raise NoReply(f"the expert's reply {said!r} holds no action")
        gap = after[: len(after) - len(after.lstrip())] if thinks else ""
        opens = self.renderer.encode_marks(marks.open)
        before, action = [] if opened else opens, encode(text)
        opening = [*request.tokens, *before]
        if self.settings.shows_action:
            hint = Message("user", self.settings.hint.replace("{action}", text))
            messages = [*request.messages, hint]
            opening = self.renderer.context(messages, request.tools, prefill=request.prefill)
            opening += [] if self.renderer.opens_thought(opening) else opens
        taken = len(before) + len(self.renderer.encode_marks(marks.close + gap)) + len(action) + 1
        if taken >= request.max_tokens:
            raise ContextOverflow(
                f"the expert's action and the tags of a thought have {taken} tokens, expected less than the "
                f"{request.max_tokens} of a reply, so that a thought has room"
            )
        return _State(request, opening, before, gap, action, request.max_tokens - taken)

    async def _think(self, state: _State, number: int) -> Thought:
        """Sample a thought, and score the action after it."""
        request, opening = state.request, state.opening
        seed = derive(request.seed, "thought", number)
        stops = (self.renderer.marks.close,)
        sampled = await self.policy.sample(opening, stops, state.room, seed=seed, session=request.session)
        kept, missing = self._ended(sampled)
        closing = self.renderer.encode_marks(missing + state.gap)
        stop = self.renderer.stop_token_ids[0]
        said = [*state.before, *sampled.tokens[:kept], *closing, *state.action, stop]
        scores = await self.engine.score([*request.tokens, *said], len(request.tokens))

        def given(begin: int, end: int) -> Segment:
            """Tokens of the reply that were not sampled here, with what the policy makes of them."""
            tokens, logprobs = tuple(said[begin:end]), scores.logprobs[begin:end]
            routes = None if sampled.routes is None else unknown(len(tokens), sampled.routes)
            if not self.settings.train_given:
                return Segment("environment", tokens, routes=routes)
            versions = (scores.version,) * len(tokens)
            return Segment("expert", tokens, logprobs, versions=versions, routes=routes)

        thought = policy_segment(sampled, kept, self.policy.sampling.temperature)
        first, last = len(state.before), len(state.before) + kept
        context = opening if self.settings.shows_action else request.tokens
        routes = sampled.prompt_routes
        of_context, of_opening = (None, None) if routes is None else np.split(routes, [len(context)])
        shown = Segment("environment", tuple(context), routes=of_context)
        if self.settings.shows_action:  # it was sampled in another context than the one it is played in
            played, trained = [given(0, len(said))], [shown, thought]
        else:
            parts = (replace(given(0, first), routes=of_opening), thought, given(last, len(said)))
            played = [part for part in parts if part.tokens]
            trained = [shown, *played]
        message = self.renderer.parse(
            said, prompt=request.tokens, prefill=request.prefill, tools=request.tools
        )
        logprobs = scores.logprobs[len(said) - 1 - len(state.action) : -1]
        reward = {REWARD: math.exp(math.fsum(logprobs) / len(logprobs))}
        turn = Turn(
            f"{self.id}/t{len(self.steps)}/{number}", tuple(trained), (*request.messages, message),
            rewards=reward, metrics=reward, fresh=True, stop_reason=sampled.stop_reason,
        )  # fmt: skip
        return Thought(turn, tuple(played), message, reward[REWARD])

    def _ended(self, sampled: Completion) -> tuple[int, str]:
        """How many sampled tokens are of the thought and its closing tag, and what is missing of the tag.

        A token that goes on past the tag is not kept, as it holds the beginning of what the policy would do.
        """
        tokens, kept, close = sampled.tokens, len(sampled.tokens), self.renderer.marks.close
        while kept and tokens[kept - 1] in self.renderer.stop_token_ids:
            kept -= 1
        while kept and self.renderer.decode(tokens[:kept]).partition(close)[2]:
            kept -= 1
        text = self.renderer.decode(tokens[:kept])
        return kept, next(close[n:] for n in range(len(close), -1, -1) if text.endswith(close[:n]))


class Thoughts(Strategy[ThoughtsRolloutSettings]):
    """The strategy `thoughts`."""

    async def run(self, work: Work) -> AsyncIterator[Group]:
        """Yields a group for each state, of one-turn trajectories, and with `joint` one for the whole
        demonstration; with `commit = "own"` one group of whole episodes."""
        size = self.settings.group_size
        if self.settings.commit == "own":
            played = await asyncio.gather(*(self._episode(work, f"{work.id}/{i}", 1) for i in range(size)))
            yield Group(work.id, work.task, tuple(_rewarded(*each) for each in played))
            return
        episode, thinker = await self._episode(work, work.id, size)
        if episode.failure == "redo" or not thinker.steps:
            yield Group(work.id, work.task, (replace(episode, id=f"{work.id}/0"),))
            return
        for number, thoughts in enumerate(thinker.steps):
            leaves = tuple(_leaf(thought, work.id) for thought in thoughts)
            yield Group(f"{work.id}/t{number}", work.task, leaves)
        if self.settings.joint and episode.failure is None:
            whole = replace(_rewarded(episode, thinker), id=f"{work.id}/demonstration")
            yield Group(whole.id, work.task, (whole,))

    async def _episode(self, work: Work, id: str, count: int) -> tuple[Trajectory, Thinker]:
        """An episode of the expert with thoughts, and all of them."""
        policy = self.policy(work)
        thinker: Thinker

        async def attempt(number: int) -> Trajectory:
            nonlocal thinker
            thinker = Thinker(self.settings, policy, count, id)
            return await self.play(work, thinker, id, derive(self.seed, id, number))

        return await tries(self.settings.redo, attempt), thinker


def _leaf(thought: Thought, episode: str) -> Trajectory:
    turn = thought.turn
    return Trajectory(turn.id, (turn,), "terminated", turn.rewards, {}, turn.metrics, episode=episode)


def _rewarded(episode: Trajectory, thinker: Thinker) -> Trajectory:
    """With the probabilities of its actions as rewards: what the environment pays, the expert has earned."""
    best = [max(thought.probability for thought in thoughts) for thoughts in thinker.steps]
    turns = tuple(
        replace(turn, rewards={REWARD: p}, shaped={}, metrics={REWARD: p})
        for turn, p in zip(episode.turns, best, strict=False)  # a reply whose step failed is no turn
    )
    total = sum(best[: len(turns)])
    mean = {REWARD: total / len(turns)} if turns else {}
    return replace(episode, turns=turns, rewards={REWARD: total}, shaped={}, metrics=mean)
