"""The calls of a program to its model, as the turns of one episode.

    call 1 ──reply──> call 2 ──reply──> call 4     the history goes on from an earlier call: its next turn
       └────────────> call 3                       the same again, or another end of it: a fork
    call 5                                         another history: a sub-agent, a summary, a side call

A history goes on from a call if it repeats that call's messages and its reply. Then it is that call's own
tokens, those that were sampled included, and the new messages after them. Any other history is rendered
anew, but replies that it repeats keep their tokens.

Each path is a row of training: it begins with a `fresh` turn that shows all that came before, and of which
only the reply is trained. So no token carries loss twice, and an episode counts once in a baseline, however
many paths it has. `Turn.after` says where a path forks. The path that was called last comes last.

Not here: HTTP (server/gateway.py), and programs, their time and their rewards (harness.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from silva.config.sections import EpisodeLimits
from silva.errors import ContextOverflow, NoReply, PartLost
from silva.ports import derive
from silva.protocols import Actor, OnTokens, Reply, Request
from silva.rendering.renderer import Renderer
from silva.rendering.sampling import said_reply
from silva.rollouts.state import shown_segment
from silva.types import Completion, CompletionStop, Message, Segment, Step, StopReason, ToolSpec, Turn


@dataclass(eq=False)
class _Answered:
    """A call that was answered.

    Attributes:
        number: in order of asking; `path`: that of the first call of its path.
        before: the call that it goes on from; `continued`: a later one is its next turn.
    """

    number: int
    path: int
    turn: Turn
    before: _Answered | None
    continued: bool = False

    def context(self) -> list[int]:
        """All tokens up to the end of its reply."""
        turns, each = [self.turn], self
        while not each.turn.fresh and each.before is not None:
            each = each.before
            turns.append(each.turn)
        return [token for turn in reversed(turns) for segment in turn.segments for token in segment.tokens]


class CallRecorder:
    """All calls of one episode.

    Attributes:
        limit: why a call was refused, if one was.
        posted: the reward that somebody has posted.
        broken: the actor's error that ends a run, whatever the program makes of it.
        tools: those on offer at the last call.

    Args:
        actor: answers; it must read tokens.
        label: of the environment.
        seed: of the episode. What is sampled depends on it and on the history, not on when a call comes.
        on_idle: told when the program begins to wait for its model (True), and when it goes on.
    """

    def __init__(
        self,
        actor: Actor,
        renderer: Renderer,
        limits: EpisodeLimits,
        *,
        id: str,
        seed: int,
        label: str,
        on_idle: Callable[[bool], None] = lambda idle: None,
    ) -> None:
        self.actor, self.renderer, self.limits = actor, renderer, limits
        self.id, self.seed, self.label, self.on_idle = id, seed, label, on_idle
        self.limit: StopReason | None = None
        self.broken: Exception | None = None
        self.posted: asyncio.Future[Step] = asyncio.get_running_loop().create_future()
        self.tools: tuple[ToolSpec, ...] = ()
        self._answered: list[_Answered] = []
        self._after = defaultdict[str, list[_Answered]](list)  # by the digest of a history and its reply
        self._same = defaultdict[str, list[_Answered]](list)  # by that of the history alone
        self._said = defaultdict[str, list[_Answered]](list)  # by what the reply says
        self._numbers = itertools.count()
        self._begun, self._waiting = 0, 0
        self._asking = Counter[str]()

    @property
    def context(self) -> int:
        return self.limits.max_episode_tokens

    @contextlib.contextmanager
    def idle(self) -> Iterator[None]:
        self._waiting += 1
        if self._waiting == 1:
            self.on_idle(True)
        try:
            yield
        finally:
            self._waiting -= 1
            if self._waiting == 0:
                self.on_idle(False)

    def ask(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> PlacedCall:
        """Where a call stands.

        Raises:
            RenderingError: the chat template refuses the dialogue.
            ContextOverflow: it leaves no room for an answer.
        """
        digests = _digests(messages, tools)
        whole, sampled = self._as_known(messages, digests)
        replies = [i for i, message in enumerate(messages) if message.role == "assistant"]
        known = [i for i in replies if digests[i] in self._after]
        before = _newest(self._after[digests[known[-1]]]) if known else None
        first = replies[-1] + 1 if replies else 0  # of the new messages
        goes_on = bool(known) and known[-1] == first - 1 < len(messages) - 1
        if before is not None and goes_on and not self.renderer.rebuilds_context:
            added = self.renderer.extend(before.turn.reply_tokens, whole[first:])
            tokens = [*before.context(), *added]
        else:
            goes_on, added = False, []
            tokens = self.renderer.context(whole, tools, sampled=sampled)
        if len(tokens) >= self.context:
            self.limit = "context_overflow"
            raise ContextOverflow(
                f"a context of {len(tokens)} tokens leaves no room: rollout.limits.max_episode_tokens = "
                f"{self.context}"
            )
        new = tuple(whole[first:]) if goes_on else ()
        return PlacedCall(self, digests[-1], tuple(whole), new, tuple(tools), tokens, added, before, goes_on)

    def turns(self) -> tuple[Turn, ...]:
        """Path after path, the one that was called last at the end."""
        paths = defaultdict[int, list[_Answered]](list)
        for each in sorted(self._answered, key=lambda each: each.number):
            paths[each.path].append(each)
        ordered = sorted(paths.values(), key=lambda path: path[-1].number)
        return tuple(each.turn for path in ordered for each in path)

    def dialogue(self) -> list[Message]:
        """What the path that was called last says, its last reply included."""
        path = list[Message]()
        for turn in self.turns():
            path = [*([] if turn.fresh else path), *turn.messages]
        return path

    def lost(self, digest: str) -> _Answered | None:
        """The newest answer to this history that nothing goes on from."""
        return next((each for each in reversed(self._same[digest]) if not each.continued), None)

    @contextlib.contextmanager
    def begun(self, call: PlacedCall) -> Iterator[tuple[int, int, bool]]:
        """While a call is answered: its number, its seed, and whether it is the next turn of its path."""
        if self._begun >= self.limits.max_turns:
            self.limit = self.limit or "max_turns"
            raise PartLost(f"the episode is over: rollout.limits.max_turns = {self.limits.max_turns} calls")
        number, before = next(self._numbers), call.before
        self._begun += 1
        seed = derive(self.seed, "call", call.digest, self._asking[call.digest])
        self._asking[call.digest] += 1
        follows = call.goes_on and before is not None and not before.continued
        if follows and before is not None:
            before.continued = True
        try:
            with self.idle():
                yield number, seed, follows
        except BaseException:  # it never was: an equal call gets the same answer
            self._begun -= 1
            self._asking[call.digest] -= 1
            if follows and before is not None:
                before.continued = False
            raise

    def add(self, call: PlacedCall, number: int, follows: bool, reply: Reply, said: Message) -> None:
        """With the reply as the program reads it."""
        id, before, tokens = f"{self.id}/{number}", call.before, call.added if follows else call.tokens
        turn = Turn(
            id=id,
            segments=(shown_segment(tuple(tokens), reply.prompt_routes), *reply.segments),
            messages=(*(call.new if follows else call.messages), replace(reply.message, id=id)),
            fresh=not follows,
            stop_reason=reply.stop_reason,
            after=None if follows else before.turn.id if before is not None else "",
        )
        path = before.path if follows and before is not None else number
        answered = _Answered(number, path, turn, before)
        self.tools = call.tools
        self._answered.append(answered)
        self._same[call.digest].append(answered)
        self._after[_next(call.digest, said)].append(answered)
        self._said[_key(said)].append(answered)

    def _as_known(
        self, messages: Sequence[Message], digests: Sequence[str]
    ) -> tuple[list[Message], dict[str, tuple[int, ...]]]:
        """The messages, replies of this episode with their ids; and by these the tokens."""
        whole, sampled = list(messages), dict[str, tuple[int, ...]]()
        for i, message in enumerate(messages):
            found = self._after.get(digests[i]) or self._said.get(_key(message))
            if message.role == "assistant" and found:
                turn = _newest(found).turn
                whole[i], sampled[turn.id] = replace(message, id=turn.id), turn.reply_tokens
        return whole, sampled


@dataclass(frozen=True, slots=True)
class PlacedCall:
    """One call of a program, and where it stands in its episode.

    Attributes:
        digest: of the history.
        new: messages after those of `before`, if it goes on from there; `added`: their tokens.
        before: the call that has the longest part of this history.
        goes_on: all of the history but `new` is that of `before`.
    """

    calls: CallRecorder
    digest: str
    messages: tuple[Message, ...]
    new: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    tokens: Sequence[int]
    added: Sequence[int]
    before: _Answered | None
    goes_on: bool

    async def answer(
        self, max_tokens: int, stop: Sequence[str], on_tokens: OnTokens | None = None, *, again: bool = False
    ) -> Completion:
        """Sample a reply, which becomes a turn.

        Raises:
            PartLost: there were as many calls as an episode may have.
            SilvaError: of the actor.
        """
        calls = self.calls
        if again and (lost := calls.lost(self.digest)) is not None:
            return _completion(lost.turn.reply, lost.turn.stop_reason)
        with calls.begun(self) as (number, seed, follows):
            room = calls.context - len(self.tokens)
            request = Request(
                label=calls.label,
                environment=None,
                messages=self.messages,
                tools=self.tools,
                prefill="",
                max_tokens=min(max_tokens, calls.limits.max_turn_tokens, room),
                seed=seed,
                session=calls.id,
                render=lambda: self.tokens,
                stop=tuple(stop),
                on_tokens=on_tokens,
            )
            try:
                reply = await calls.actor.reply(request)
            except ContextOverflow:
                calls.limit = "context_overflow"
                raise
            except NoReply:
                raise
            except Exception as error:
                calls.broken = calls.broken or error
                raise
        sampled = _completion(reply.segments, reply.stop_reason)
        said = said_reply(calls.renderer, sampled, self.tokens, stop, self.tools)
        calls.add(self, number, follows, reply, said)
        return sampled


def _completion(reply: Sequence[Segment], stop_reason: CompletionStop) -> Completion:
    """A reply as an engine gave it. Numbers that the engine does not give are 0."""
    (segment,) = reply
    nothing = (0.0,) * len(segment.tokens)
    return Completion(
        segment.tokens,
        segment.logprobs,
        segment.raw_logprobs or nothing,
        segment.entropies or nothing,
        segment.versions,
        stop_reason,
    )


def _newest(found: Sequence[_Answered]) -> _Answered:
    """One that nothing goes on from, if there is one."""
    return next((each for each in reversed(found) if not each.continued), found[-1])


def _digests(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[str]:
    """Of the history up to each message."""
    offered = [[tool.name, tool.description, dict(tool.parameters)] for tool in tools]
    digest, found = _digest("", offered), list[str]()
    for message in messages:
        digest = _next(digest, message)
        found.append(digest)
    return found


def _next(digest: str, message: Message) -> str:
    return _digest(digest, _key(message))


def _digest(before: str, value: object) -> str:
    return hashlib.sha256(f"{before}{json.dumps(value, sort_keys=True)}".encode()).hexdigest()


def _key(message: Message) -> str:
    """What a message says. Clients drop thoughts, strip replies and give calls other ids."""
    reply = message.role == "assistant"
    calls = [[call.name, dict(call.arguments)] for call in message.tool_calls]
    content = message.content.strip() if reply else message.content
    return json.dumps([message.role, content, calls, "" if reply else message.name], sort_keys=True)
