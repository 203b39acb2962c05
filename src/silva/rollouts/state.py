"""What an episode has become so far, as plain data that forks share.

    started ──> render ──> answered ──> render ──> answered ──> ...

Not here: who is asked, limits, faults (episode.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from silva.protocols import Reply
from silva.rendering.renderer import Renderer
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
        messages: the whole context, the observation included.
        context: the same as tokens; until `shown` is rendered, the tokens of the last request.
        shown: tokens of the observation, or of the whole context if `fresh`; None: not rendered.
        reported: tokens of the context as the actor counts them, if it gives none.
        prefills: the given beginning of each turn's answer.
        edited: ids of answers that the environment has changed. They are rendered again from then on.
    """

    turns: tuple[Turn, ...] = ()
    observation: Observation = field(default_factory=Observation)
    tools: tuple[ToolSpec, ...] = ()
    messages: tuple[Message, ...] = ()
    context: Sequence[int] = ()
    shown: tuple[int, ...] | None = None
    fresh: bool = True
    reported: int = 0
    prefills: tuple[str, ...] = ()
    edited: frozenset[str] = frozenset()


def started(observation: Observation) -> State:
    return State(observation=observation, messages=tuple(new_messages(observation)), tools=observation.tools)


def render(state: State, renderer: Renderer) -> None:
    """Add the tokens of the observation: new ones after the last answer, or a context of its own.

    Raises:
        RenderingError: the chat template refuses the dialogue.
    """
    observation, last = state.observation, state.turns[-1].segments[-1] if state.turns else None
    unknown = last is None or last.reported is not None  # no tokens that could be extended
    if unknown or observation.context is not None or renderer.rebuilds_context:
        sampled = _sampled(state, renderer)
        tokens = renderer.context(state.messages, state.tools, sampled=sampled, prefill=observation.prefill)
        state.context, state.fresh = tokens, True
    else:
        assert last is not None
        tokens = renderer.extend(last.tokens, observation.messages, prefill=observation.prefill)
        state.context, state.fresh = [*state.context, *last.tokens, *tokens], False
    state.shown = tuple(tokens)


def answered(state: State, reply: Reply, message: Message, step: Step) -> State:
    """With one more turn, and what the environment showed in return.

    Args:
        message: that of the reply, with its id.
    """
    before, after = state.observation, step.observation
    asked, count, fresh = reply.prompt_tokens or 0, None, state.fresh
    if state.shown is None:
        fresh = not state.turns or before.context is not None
        count = max(0, asked - (0 if fresh else state.reported))  # an API may leave out earlier thoughts
    turn = Turn(
        id=message.id,
        segments=(Segment("environment", state.shown or (), reported=count), reply.segment),
        messages=(*new_messages(before), message),
        rewards=step.rewards,
        shaped=step.shaped,
        metrics=step.metrics,
        fresh=fresh,
        stop_reason=reply.stop_reason,
    )
    turns, edited = (*state.turns, turn), state.edited
    if after.context is None:
        messages = (*state.messages, message, *after.messages)
    else:
        messages = tuple(after.context)
        said = {turn.id: turn.messages[-1] for turn in turns}
        edited |= {m.id for m in messages if m.id in said and said[m.id] != m}
    return State(
        turns=turns,
        observation=after,
        tools=after.tools or state.tools,
        messages=messages,
        context=state.context,
        reported=asked + reply.segment.count,
        prefills=(*state.prefills, before.prefill),
        edited=edited,
    )


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
        observation=state.observation,
        next_context=end.next_context,
        failure=end.failure,
        error=end.error,
        parent=parent,
        fork_turn=fork_turn,
        episode=episode,
    )


def _sampled(state: State, renderer: Renderer) -> Mapping[str, Sequence[int]]:
    """By message id, the tokens of answers that stand as they were sampled."""
    if renderer.rebuilds_context:
        return {}
    return {
        turn.id: (*renderer.encode(prefill), *turn.segments[-1].tokens)
        for turn, prefill in zip(state.turns, state.prefills, strict=True)
        if turn.id not in state.edited and turn.segments[-1].reported is None
    }


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
