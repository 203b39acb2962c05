"""What an episode has become so far, as plain data that forks share.

    started ──> render ──> answered ──> render ──> answered ──> ...

A context is rewritten where the environment replaces it, and where the settings show less than the dialogue
(context.py), in this order: what the environment shows is the dialogue that the settings apply to. Either way
the turn that follows is `fresh`: replies that are shown as they were given keep their tokens, all else is
rendered again, and nothing of it carries loss a second time.

Not here: who is asked, limits, faults (episode.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from silva.config.sections import ContextSettings
from silva.protocols import Reply
from silva.rendering.renderer import Renderer
from silva.rollouts.context import FULL, TurnsSoFar, shows_all
from silva.types import Failure, Message, Observation, Segment, Step, StopReason, ToolSpec, Trajectory, Turn


@dataclass(frozen=True, slots=True)
class End:
    """How an episode ended."""

    stop_reason: StopReason
    failure: Failure | None = None
    error: str | None = None
    next_context: tuple[int, ...] = ()  # what the policy would have answered next, if a limit cut it off


@dataclass(slots=True)
class State:
    """An episode after its start or after a turn.

    A turn makes a new state. Only `render` changes one: it adds the tokens of the observation, which are the
    same for all forks.

    Attributes:
        history: the dialogue, the observation included, as the environment has it.
        dropped: so many of its oldest turns are gone, as there was no room for them.
        messages: the whole context: what is shown of the history.
        context: the same as tokens; until `shown` is rendered, the tokens of the last request. A tuple of
            numbers: garbage collections would look through a list again and again.
        shown: tokens of the observation, or of the whole context if `fresh`; None: not rendered.
        reported: tokens of the context as the actor counts them, if it gives none.
        prefills: the given beginning of each turn's answer.
    """

    turns: tuple[Turn, ...] = ()
    observation: Observation = field(default_factory=Observation)
    tools: tuple[ToolSpec, ...] = ()
    history: tuple[Message, ...] = ()
    dropped: int = 0
    messages: tuple[Message, ...] = ()
    context: tuple[int, ...] = ()
    shown: tuple[int, ...] | None = None
    fresh: bool = True
    reported: int = 0
    prefills: tuple[str, ...] = ()


def started(observation: Observation) -> State:
    messages = tuple(new_messages(observation))
    return State(observation=observation, history=messages, messages=messages, tools=observation.tools)


def render(state: State, renderer: Renderer) -> None:
    """Add the tokens of the observation: new ones after the last answer, or a context of its own.

    Raises:
        RenderingError: the chat template refuses the dialogue.
    """
    observation, last = state.observation, state.turns[-1] if state.turns else None
    unknown = last is None or last.reply[-1].reported is not None  # no tokens that could be extended
    if unknown or observation.context is not None or renderer.rebuilds_context:
        sampled = _sampled(state, renderer)
        tokens = renderer.context(state.messages, state.tools, sampled=sampled, prefill=observation.prefill)
        state.shown = state.context = tuple(tokens)
        state.fresh = True
    else:
        assert last is not None
        said = last.reply_tokens
        tokens = renderer.extend(said, observation.messages, prefill=observation.prefill)
        state.shown = tuple(tokens)
        state.context, state.fresh = (*state.context, *said, *tokens), False


def answered(
    state: State, reply: Reply, message: Message, step: Step, settings: ContextSettings = FULL
) -> State:
    """With one more turn, and what the environment showed in return.

    Args:
        message: that of the reply, with its id.
        settings: what is shown of the dialogue.
    """
    before, after = state.observation, step.observation
    asked, count, fresh = reply.prompt_tokens or 0, None, state.fresh
    if state.shown is None:
        fresh = not state.turns or before.context is not None
        count = max(0, asked - (0 if fresh else state.reported))  # an API may leave out earlier thoughts
    turn = Turn(
        id=message.id,
        segments=(shown_segment(state.shown or (), reply.prompt_routes, count), *reply.segments),
        messages=(*new_messages(before), message),
        rewards=_floats(step.rewards),
        shaped=_floats(step.shaped),
        metrics=_floats(step.metrics),
        fresh=fresh,
        stop_reason=reply.stop_reason,
    )
    added = (message, *after.messages)
    new = State(
        turns=(*state.turns, turn),
        observation=after,
        tools=after.tools or state.tools,
        history=(*state.history, *added) if after.context is None else tuple(after.context),
        dropped=state.dropped if after.context is None else 0,
        messages=(*state.messages, *added),
        context=state.context,
        reported=asked + sum(segment.count for segment in reply.segments),
        prefills=(*state.prefills, before.prefill),
    )
    if step.terminated:  # nobody answers it
        return new
    if after.context is None and not new.dropped and shows_all(settings):
        return new
    messages = _dialogue(new).shown(settings, new.dropped)
    return new if after.context is None and messages == new.messages else _rewritten(new, messages)


def shown_segment(tokens: tuple[int, ...], routes: np.ndarray | None, reported: int | None = None) -> Segment:
    """What was shown last of a context with these routes."""
    own = None if routes is None else routes[len(routes) - len(tokens) :].copy()
    return Segment("environment", tokens, reported=reported, routes=own)


def shorter(state: State, settings: ContextSettings) -> State | None:
    """With one turn less in its context; None if the task and the newest observation are all that is left."""
    dialogue = _dialogue(state)
    dropped = dialogue.drop_oldest(settings, state.dropped)
    if dropped is None:
        return None
    return _rewritten(replace(state, dropped=dropped), dialogue.shown(settings, dropped))


def new_messages(observation: Observation) -> Sequence[Message]:
    return observation.messages if observation.context is None else observation.context


def result(
    state: State, end: End, *, id: str, episode: str, parent: str | None = None, fork_turn: int | None = None
) -> Trajectory:
    """The trajectory of an episode that ended so: rewards are sums over its turns, metrics means."""
    return Trajectory(
        id=id,
        turns=state.turns,
        stop_reason=end.stop_reason,
        rewards=_sum(turn.rewards for turn in state.turns),
        shaped=_sum(turn.shaped for turn in state.turns),
        metrics=_mean(turn.metrics for turn in state.turns),
        observation=replace(state.observation, tools=state.tools),
        next_context=end.next_context,
        failure=end.failure,
        error=end.error,
        parent=parent,
        fork_turn=fork_turn,
        episode=episode,
    )


def regraded(trajectory: Trajectory, step: Step) -> Trajectory:
    """The episode with another result of its last step."""
    last = replace(
        trajectory.turns[-1],
        rewards=_floats(step.rewards), shaped=_floats(step.shaped), metrics=_floats(step.metrics),
    )  # fmt: skip
    turns = (*trajectory.turns[:-1], last)
    return replace(
        trajectory,
        turns=turns,
        rewards=_sum(turn.rewards for turn in turns),
        shaped=_sum(turn.shaped for turn in turns),
        metrics=_mean(turn.metrics for turn in turns),
    )


def _dialogue(state: State) -> TurnsSoFar:
    return TurnsSoFar.of(state.history, {turn.id for turn in state.turns})


def _rewritten(state: State, messages: tuple[Message, ...]) -> State:
    """With another context: the observation says so.

    Tokens that an actor reported are not known of it: estimated by the share of characters.
    """
    before, after = (sum(len(m.content) for m in shown) for shown in (state.messages, messages))
    return replace(
        state,
        observation=replace(state.observation, messages=(), context=messages),
        messages=messages,
        shown=None,
        reported=round(state.reported * after / before) if before else state.reported,
    )


def _sampled(state: State, renderer: Renderer) -> Mapping[str, Sequence[int]]:
    """By message id, the tokens of answers that stand as they were sampled."""
    if renderer.rebuilds_context:
        return {}
    shown = {message.id: message for message in state.messages}
    return {
        turn.id: (*renderer.encode(prefill), *turn.reply_tokens)
        for turn, prefill in zip(state.turns, state.prefills, strict=True)
        if shown.get(turn.id) == turn.messages[-1] and turn.reply[-1].reported is None
    }


def _floats(numbers: Mapping[str, float]) -> dict[str, float]:
    return {name: float(value) for name, value in numbers.items()}


def _sum(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0.0) + float(value)
    return total


def _mean(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Of each metric, over the turns that report it."""
    parts = list(parts)
    counts = Counter(name for part in parts for name in part)
    return {name: value / counts[name] for name, value in _sum(parts).items()}
