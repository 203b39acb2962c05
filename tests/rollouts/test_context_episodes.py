"""Episodes whose context is rewritten: what is shown, which rows they give, what becomes of long ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from scripted_engine import ScriptedEngine
from tests.rendering.templates import TEMPLATES, byte_tokenizer

from silva.actors.script import Script
from silva.config.sections import ContextSettings, FullContext, HideObservations, LastTurns, SingleTurn
from silva.environments.worlds.calculator import Calculator
from silva.models.tiny import tiny_tokenizer
from silva.models.trie import build
from silva.protocols import Reply, Request
from silva.rendering.renderer import Renderer
from silva.rollouts.samples import trajectory_samples
from silva.types import Message, Observation, Segment, Step, Trajectory

DECODE = tiny_tokenizer().decode
SAID = ["<think>hm</think>yes", "no", "<think>ah</think>so", "well"]
TASK = "<|user|>hello t0<|end|>"  # 10 tokens, the opening of the reply 1 more
A0, A1, A2 = (f"<|assistant|>{text}<|end|>" for text in SAID[:3])
B0, B2 = "<|assistant|>yes<|end|>", "<|assistant|>so<|end|>"  # stripped
O1, O2, O3 = (f"<|user|>go on {i}<|end|>" for i in (1, 2, 3))
HID = "<|user|>...<|end|>"
DROP = FullContext(overflow="drop_oldest")
ROOM = 21  # for the longest reply


@pytest.fixture
def talks(run, world, talk, renderer) -> Callable[..., tuple[Trajectory, ScriptedEngine]]:
    """`talks(context, ...)`: an episode of four turns, in which `SAID` is said whatever is shown."""

    def go(
        context: ContextSettings, *, renderer: Renderer = renderer, make: Any = None,
        says: Sequence[str] = SAID, **values: Any,
    ):  # fmt: skip
        said = iter(says)
        engine = ScriptedEngine(lambda tokens, params: renderer.encode_reply(next(said)))
        places = world(make or (lambda task: talk(task, turns=4)))
        return run(places, engine, context=context, renderer=renderer, **values), engine

    return go


def shown(engine: ScriptedEngine) -> list[str]:
    """The contexts, without the opening of the reply."""
    return [DECODE(tokens).removesuffix("<|assistant|>") for tokens, _, _ in engine.requests]


MODES: list[tuple[ContextSettings, list[str]]] = [
    (FullContext(), [TASK, TASK + A0 + O1, TASK + A0 + O1 + A1 + O2, TASK + A0 + O1 + A1 + O2 + A2 + O3]),
    (
        FullContext(strip_thoughts=True),
        [TASK, TASK + B0 + O1, TASK + B0 + O1 + A1 + O2, TASK + B0 + O1 + A1 + O2 + B2 + O3],
    ),
    (LastTurns(turns=1), [TASK, TASK + A0 + O1, TASK + O1 + A1 + O2, TASK + O2 + A2 + O3]),
    (LastTurns(turns=0), [TASK, TASK + O1, TASK + O2, TASK + O3]),
    (
        HideObservations(),
        [TASK, TASK + A0 + O1, TASK + A0 + HID + A1 + O2, TASK + A0 + HID + A1 + HID + A2 + O3],
    ),
    (
        SingleTurn(turns=1),
        [
            TASK,
            "<|user|>hello t0\n\nEarlier turns:\n\nYou: yes\n\nNow:\n\ngo on 1<|end|>",
            "<|user|>hello t0\n\nEarlier turns:\n\ngo on 1\n\nYou: no\n\nNow:\n\ngo on 2<|end|>",
            "<|user|>hello t0\n\nEarlier turns:\n\ngo on 2\n\nYou: so\n\nNow:\n\ngo on 3<|end|>",
        ],
    ),
]


@pytest.mark.parametrize(("context", "expected"), MODES, ids=lambda value: getattr(value, "type", ""))
def test_what_the_engine_is_shown_in_each_turn(talks, context: ContextSettings, expected: list[str]) -> None:
    assert shown(talks(context)[1]) == expected


FRESH = {  # where a context is not what was shown before with the reply and the observation
    "full": [True, False, False, False],
    "last_turns": [True, False, True, True],
    "hide_observations": [True, False, True, True],
    "single_turn": [True, True, True, True],
}


@pytest.mark.parametrize("context", [FullContext(), LastTurns(turns=1), HideObservations(), SingleTurn()])
def test_a_row_is_what_the_engine_saw_and_no_token_is_trained_twice(talks, context: ContextSettings) -> None:
    trajectory, engine = talks(context)
    assert [turn.fresh for turn in trajectory.turns] == FRESH[context.type]
    rows = trajectory_samples(trajectory, "g")
    assert len(rows) == sum(FRESH[context.type])
    seen, trained = iter(engine.requests), ""
    for row in rows:
        for (_, stop), id in zip(row.turn_spans, row.turn_ids, strict=True):
            said = trajectory.turns[int(id[-1])].segments[-1].tokens
            assert tuple(row.tokens[:stop]) == next(seen)[0] + said
        trained += DECODE(row.tokens[row.loss_weights > 0])
    assert trained == "".join(f"{text}<|end|>" for text in SAID)
    # A fresh turn holds what was shown, then the reply; the thoughts that it came with stay in the record.
    last = trajectory.turns[-1].messages
    assert len(last) == {"full": 2, "last_turns": 5, "hide_observations": 8, "single_turn": 2}[context.type]
    assert trajectory.turns[2].messages[-1].reasoning == "ah"


def test_stripped_thoughts_start_a_row_only_where_there_was_one(talks) -> None:
    trajectory, _ = talks(FullContext(strip_thoughts=True))
    assert [turn.fresh for turn in trajectory.turns] == [True, True, False, True]
    rows = trajectory_samples(trajectory, "g")
    assert [row.turn_ids for row in rows] == [("e/0",), ("e/1", "e/2"), ("e/3",)]
    # The second row shares the task with the first and all up to the third reply with the third.
    lengths = [len(row) for row in rows]
    assert len(build([row.tokens for row in rows], least=1)) == sum(lengths) - 11 - len(
        tiny_tokenizer().encode(TASK + B0 + O1 + A1 + O2 + "<|assistant|>")
    )


def test_kept_replies_keep_their_ids_even_where_text_would_give_others(run, world, talk, renderer) -> None:
    """The policy splits characters in its own way: half of an é, which no text has."""
    odd = (*renderer.encode("é")[:1], *renderer.encode("x"), renderer.stop_token_ids[0])
    for context, kept in ((LastTurns(turns=2), 2), (HideObservations(), 3), (SingleTurn(), 0)):
        engine = ScriptedEngine(lambda tokens, params: odd)
        run(world(lambda task: talk(task, turns=4)), engine, context=context)
        tokens = engine.requests[-1][0]
        assert sum(tokens[i : i + len(odd)] == odd for i in range(len(tokens))) == kept


def test_a_template_that_cuts_thoughts_itself_agrees(talks) -> None:
    """DeepSeek's distillations do. Stripping shows the same there, and where earlier turns are kept too."""
    tokenizer, says, found = byte_tokenizer("r1"), ["hm</think>yes"] * 4, []
    for history, strips in (("template", False), ("template", True), ("keep", True), ("keep", False)):
        renderer = Renderer(tokenizer, history=history)
        trajectory, engine = talks(FullContext(strip_thoughts=strips), renderer=renderer, says=says)
        assert all(turn.fresh for turn in trajectory.turns[1:]) == (history == "template" or strips)
        found.append("".join(tokenizer.decode(engine.requests[-1][0]).split()))  # without line breaks
    assert found[0] == found[1] == found[2] and found[0].count("yes") == 3 and "hm" not in found[0]
    assert found[3].count("hm") == 3


# --- environments that rewrite the context too


def test_the_environment_says_what_the_dialogue_is_and_the_mode_what_of_it_is_shown(talks, talk) -> None:
    """After the second turn the environment sums up; the mode applies to what comes after the summary."""

    class Sums(talk):
        async def step(self, message: Message) -> Step:
            step = await super().step(message)
            if self.taken != 2:
                return step
            context = (Message("user", "sum"), self.heard[1], *step.observation.messages)
            return replace(step, observation=Observation(context=context))

    def make(task):
        return Sums(task, turns=4)

    summed = "<|user|>sum<|end|>"
    full, engine = talks(FullContext(), make=make)
    assert shown(engine)[2:] == [summed + A1 + O2, summed + A1 + O2 + A2 + O3]
    assert [turn.fresh for turn in full.turns] == [True, False, True, False]
    one, engine = talks(LastTurns(turns=1), make=make)
    assert shown(engine)[1:] == [TASK + A0 + O1, summed + A1 + O2, summed + O2 + A2 + O3]
    assert [turn.fresh for turn in one.turns] == [True, False, True, True]
    _, engine = talks(HideObservations(), make=make)
    assert shown(engine)[2:] == [summed + A1 + O2, summed + A1 + HID + A2 + O3]
    _, engine = talks(LastTurns(turns=0), make=make)
    assert shown(engine)[2:] == [summed + O2, summed + O3]
    # The turn that was dropped before is none of the new dialogue.
    _, engine = talks(DROP, make=make, max_episode_tokens=41 + ROOM, max_turn_tokens=ROOM)
    assert shown(engine)[1:3] == [TASK + O1, summed + A1 + O2]


def test_what_an_environment_took_out_is_not_shown_by_any_mode(talks, talk) -> None:
    class Forgets(talk):
        def say(self, text: str) -> Observation:
            return Observation(context=super().say(text).messages)

    for context in (FullContext(), LastTurns(), HideObservations(), SingleTurn(), DROP):
        _, engine = talks(context, make=lambda task: Forgets(task, turns=4))
        assert shown(engine) == [TASK, O1, O2, O3]


def test_an_edit_that_is_taken_back_shows_the_tokens_as_sampled(run, world, talk, renderer) -> None:
    odd = (*renderer.encode("é")[:1], *renderer.encode("x"), renderer.stop_token_ids[0])

    class Wavers(talk):
        async def step(self, message: Message) -> Step:
            step = await super().step(message)
            first = replace(self.heard[0], content="EDITED") if self.taken == 1 else self.heard[0]
            context = (Message("user", "so"), first, *step.observation.messages)
            return replace(step, observation=Observation(context=context))

    engine = ScriptedEngine(lambda tokens, params: odd)
    run(world(Wavers), engine)
    contexts = [tokens for tokens, _, _ in engine.requests]
    assert "EDITED" in DECODE(contexts[1]) and "EDITED" not in DECODE(contexts[2])
    start = len(renderer.context([Message("user", "so")]))
    assert contexts[2][start : start + len(odd)] == odd


# --- too long


# The task has 10 tokens, the replies 22, 4 and 21 with their opening, an observation 9, the last opening 1.
WHOLE = [TASK, TASK + A0 + O1, TASK + A0 + O1 + A1 + O2, TASK + A0 + O1 + A1 + O2 + A2 + O3]  # 11, 42, 55, 85


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (85 + ROOM, WHOLE),
        (84 + ROOM, [*WHOLE[:3], TASK + O1 + A1 + O2 + A2 + O3]),  # 63
        (62 + ROOM, [*WHOLE[:3], TASK + O2 + A2 + O3]),  # 50
        (54 + ROOM, [*WHOLE[:2], TASK + O1 + A1 + O2, TASK + O2 + A2 + O3]),
        (49 + ROOM, [*WHOLE[:2], TASK + O1 + A1 + O2, TASK + O3]),
        (41 + ROOM, [TASK, TASK + O1, TASK + O1 + A1 + O2, TASK + O3]),  # what went stays away: 33 for 20
    ],
)
def test_the_oldest_turns_go_when_a_reply_has_no_room(talks, most: int, expected: list[str]) -> None:
    trajectory, engine = talks(DROP, max_episode_tokens=most, max_turn_tokens=ROOM)
    assert shown(engine) == expected
    assert (trajectory.stop_reason, trajectory.failure) == ("terminated", None)
    longer = [TASK, *(old + added for old, added in zip(expected, (A0 + O1, A1 + O2, A2 + O3), strict=False))]
    assert [turn.fresh for turn in trajectory.turns] == [
        i == 0 or new != old for i, (new, old) in enumerate(zip(expected, longer, strict=True))
    ]
    for tokens, params, _ in engine.requests:
        assert params.max_tokens == ROOM and len(tokens) <= most - ROOM


def test_an_episode_ends_if_dropping_is_not_enough(talks) -> None:
    """The task and the newest observation have 20 tokens; the first reply gets what is left of 23."""
    trajectory, engine = talks(DROP, max_episode_tokens=23, max_turn_tokens=13, says=["yes"] * 4)
    assert (trajectory.stop_reason, len(trajectory.turns), trajectory.failure) == ("terminated", 4, None)
    assert shown(engine) == [TASK, TASK + O1, TASK + O2, TASK + O3]
    assert [params.max_tokens for _, params, _ in engine.requests] == [12, 3, 3, 3]
    cut, engine = talks(DROP, max_episode_tokens=20, max_turn_tokens=13, says=["yes"] * 4)
    assert (cut.stop_reason, len(cut.turns), cut.failure, cut.raw_reward) == ("max_tokens", 1, None, 1.0)
    assert DECODE(cut.next_context) == TASK + O1 + "<|assistant|>"


@pytest.mark.parametrize(
    "context",
    [
        LastTurns(turns=2, overflow="drop_oldest"),
        SingleTurn(overflow="drop_oldest"),
        HideObservations(overflow="drop_oldest"),
        FullContext(overflow="drop_oldest", strip_thoughts=True),
    ],
)
def test_every_mode_drops_what_it_shows_of_the_oldest_turns(talks, context: ContextSettings) -> None:
    whole, engine = talks(context)
    longest = [len(tokens) for tokens, _, _ in engine.requests]
    room = longest[-1] - 1
    dropped, engine = talks(context, max_episode_tokens=room + ROOM, max_turn_tokens=ROOM)
    contexts = [tokens for tokens, _, _ in engine.requests]
    assert len(dropped.turns) == 4 and len(contexts[-1]) <= room
    assert DECODE(contexts[-1]).count("go on 3") == 1 and "hello t0" in DECODE(contexts[-1])
    assert dropped.raw_reward == whole.raw_reward == 4.0


def test_what_would_have_been_answered_next_is_what_would_have_been_shown(talks) -> None:
    """The value of a state in which an episode is cut off belongs to what the policy would see."""
    for context in (LastTurns(turns=1), DROP):
        cut, _ = talks(context, max_turns=3, max_episode_tokens=62 + ROOM, max_turn_tokens=ROOM)
        assert cut.stop_reason == "max_turns"
        assert DECODE(cut.next_context) == TASK + O2 + A2 + O3 + "<|assistant|>"


class Chat:
    """Says "yes" with 4 tokens; counts one token of context for each character."""

    reads_tokens: ClassVar[bool] = False

    def __init__(self) -> None:
        self.requests: list[Request] = []

    async def reply(self, request: Request) -> Reply:
        self.requests.append(request)
        count = sum(len(message.content) for message in request.messages)
        return Reply((Segment("policy", (), reported=4),), Message("assistant", "yes"), "stop_token", count)


@pytest.mark.parametrize(
    ("context", "most", "left", "expected"),
    [
        # After the second turn 18 + 4 tokens for 21 characters, 28 with the observation. Of 25: 20 tokens.
        (LastTurns(turns=1), 30, 10, ["hello t0", "hello t0 yes go on 1", "hello t0 go on 1 yes go on 2"]),
        (HideObservations(), 30, 11, ["hello t0", "hello t0 yes go on 1", "hello t0 yes ... yes go on 2"]),
        (DROP, 41, 20, ["hello t0", "hello t0 yes go on 1", "hello t0 go on 1 yes go on 2"]),
        (DROP, 39, 20, ["hello t0", "hello t0 yes go on 1", "hello t0 go on 2"]),
    ],
)
def test_actors_that_play_through_messages_see_the_same(
    run, world, talk, context: ContextSettings, most: int, left: int, expected: list[str]
) -> None:
    """Tokens of a rewritten context are not known before its answer: estimated by characters."""
    chat, limits = Chat(), {"max_episode_tokens": most, "max_turn_tokens": 20}
    trajectory = run(world(talk), actor=chat, renderer=None, context=context, **limits)
    assert [" ".join(m.content for m in request.messages) for request in chat.requests] == expected
    assert [turn.fresh for turn in trajectory.turns] == [True, False, True]
    assert chat.requests[-1].max_tokens == left


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*TEMPLATES} - {"r1"}))  # the script leaves its thoughts open
@pytest.mark.parametrize("context", [LastTurns(turns=1), HideObservations(), SingleTurn(turns=1)])
def test_every_chat_template_takes_it(run, name: str, context: ContextSettings) -> None:
    """A dialogue with tools under each family: some refuse two user messages in a row."""
    tokenizer = byte_tokenizer(name)
    renderer, tasks = Renderer(tokenizer), Calculator(chain=2, operators="+", eval_size=5).taskset()
    problem = tasks.tasks("train")[0]
    trajectory = run(tasks, actor=Script(renderer), renderer=renderer, task=problem, context=context)
    assert (trajectory.stop_reason, trajectory.failure, trajectory.raw_reward) == ("terminated", None, 1.0)
    last = tokenizer.decode([t for s in trajectory.turns[-1].segments[:-1] for t in s.tokens])
    assert [turn.fresh for turn in trajectory.turns][2:] != [False, False]
    assert problem.data["questions"][0] in tokenizer.decode(trajectory.turns[0].segments[0].tokens)
    assert last.count(problem.answer[1]) == 1
