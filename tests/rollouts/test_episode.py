"""One episode: limits, faults that stay its own, tokens of every turn, rewritten contexts."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from tests.rendering.templates import byte_tokenizer

from silva.engines.scripted import ScriptedEngine
from silva.environments.calculator import Calculator
from silva.errors import ContextOverflow, EngineError
from silva.models.tiny import tiny_tokenizer
from silva.rendering.renderer import Renderer
from silva.rollouts.actors import Script
from silva.rollouts.episode import play
from silva.rollouts.samples import trajectory_samples
from silva.types import Message, Observation, Step, Trajectory

HERE = "tests/rollouts/test_episode.py"


@pytest.fixture
def run(task, renderer, policy, limits, speaker):
    """`run(world, engine, max_turns=2)` -> the trajectory."""

    def go(world, engine=None, *, task=task, actor=None, renderer=renderer, **values: Any) -> Trajectory:
        actor = actor or policy(engine or speaker("yes", "no"), renderer)
        return asyncio.run(play(task, world, actor, renderer, limits(**values), id="e", seed=1))

    return go


# --- turns and their tokens


def test_an_episode_is_its_dialogue_token_by_token(run, world, talk, speaker) -> None:
    engine = speaker("yes", "no", "bye")
    trajectory = run(world(talk), engine)
    text = tiny_tokenizer().decode([t for turn in trajectory.turns for s in turn.segments for t in s.tokens])
    assert text == (
        "<|user|>hello t0<|end|><|assistant|>yes<|end|><|user|>go on 1<|end|><|assistant|>no<|end|>"
        "<|user|>go on 2<|end|><|assistant|>bye<|end|>"
    )
    assert trajectory.stop_reason == "terminated" and trajectory.failure is None
    assert [[s.source for s in turn.segments] for turn in trajectory.turns] == [["environment", "policy"]] * 3
    assert [turn.fresh for turn in trajectory.turns] == [True, False, False]
    assert [turn.id for turn in trajectory.turns] == ["e/0", "e/1", "e/2"]
    assert [[m.content for m in turn.messages] for turn in trajectory.turns] == [
        ["hello t0", "yes"], ["go on 1", "no"], ["go on 2", "bye"]
    ]  # fmt: skip
    assert trajectory.observation.messages[0].content == "go on 3"
    # Every prompt is the whole context so far.
    prompts = [prompt for prompt, _, _ in engine.requests]
    for earlier, later in pairwise(prompts):
        assert later[: len(earlier)] == earlier
    assert [session for _, _, session in engine.requests] == ["e"] * 3


def test_rewards_are_summed_and_metrics_averaged_over_the_turns_that_report_them(run, world, talk) -> None:
    trajectory = run(world(talk))
    assert trajectory.rewards == {"talk": 3.0} and trajectory.shaped == {"length": -0.75}
    assert (trajectory.raw_reward, trajectory.shaped_reward) == (3.0, 2.25)
    assert trajectory.metrics == {"turn": 2.5}


def test_seeds_differ_by_turn_and_repeat_by_episode(run, world, talk, speaker) -> None:
    seeds = []
    for _ in range(2):
        engine = speaker("yes")
        run(world(talk), engine)
        seeds.append([params.seed for _, params, _ in engine.requests])
    assert seeds[0] == seeds[1] and len(set(seeds[0])) == 3


def test_the_environment_hears_the_reply_as_a_message(run, world, talk, speaker) -> None:
    places = world(talk)
    run(places, speaker("<think>hm</think>yes"))
    heard = places.made[0].heard[0]
    assert (heard.role, heard.content, heard.reasoning, heard.id) == ("assistant", "yes", "hm", "e/0")
    assert places.made[0].closed == 1


def test_a_prefill_is_shown_and_belongs_to_the_answer(run, world, talk, speaker) -> None:
    class Prefilled(talk):
        def say(self, text: str) -> Observation:
            return replace(super().say(text), prefill="<answer>")

    places, engine = world(Prefilled), speaker("7</answer>")
    trajectory = run(places, engine, max_turns=2)
    decode = tiny_tokenizer().decode
    first, second = trajectory.turns
    assert decode(first.segments[0].tokens) == "<|user|>hello t0<|end|><|assistant|><answer>"
    assert decode(first.segments[1].tokens) == "7</answer><|end|>"
    assert decode(second.segments[0].tokens) == "<|user|>go on 1<|end|><|assistant|><answer>"
    assert [m.content for m in places.made[0].heard] == ["<answer>7</answer>"] * 2


# --- limits


def test_max_turns(run, world, talk) -> None:
    trajectory = run(world(talk), max_turns=2)
    assert (trajectory.stop_reason, len(trajectory.turns), trajectory.rewards) == (
        "max_turns",
        2,
        {"talk": 2.0},
    )


WHOLE = "<|user|>hello t0<|end|><|assistant|>yes<|end|><|user|>go on 1<|end|><|assistant|>no<|end|>"


@pytest.mark.parametrize("reason", ["max_turns", "truncated", "max_tokens", "terminated"])
def test_what_would_have_been_answered_next_is_noted_where_a_limit_cuts(run, world, talk, reason) -> None:
    class Cut(talk):
        async def step(self, message: Message) -> Step:
            step = await super().step(message)
            ends = self.taken == 2
            return replace(
                step, terminated=ends and reason == "terminated", truncated=ends and reason == "truncated"
            )

    limits = {"max_turns": {"max_turns": 2}, "max_tokens": {"max_episode_tokens": 11 + 4 + 10 + 3}}
    trajectory = run(world(Cut), **limits.get(reason, {}))
    assert (trajectory.stop_reason, len(trajectory.turns), trajectory.failure) == (reason, 2, None)
    expected = "" if reason == "terminated" else WHOLE + "<|user|>go on 2<|end|><|assistant|>"
    assert tiny_tokenizer().decode(trajectory.next_context) == expected


def test_a_context_that_replaces_the_history_is_what_would_have_been_answered_next(run, world, talk) -> None:
    class Forgets(talk):
        def say(self, text: str) -> Observation:
            return replace(super().say(text), messages=(), context=super().say(text).messages)

    trajectory = run(world(Forgets), max_turns=2)
    assert tiny_tokenizer().decode(trajectory.next_context) == "<|user|>go on 2<|end|><|assistant|>"


@pytest.mark.parametrize("last", [Observation(), Observation((Message("user", 7),))])  # type: ignore[arg-type]
def test_a_cut_without_a_next_state_keeps_its_result(run, world, talk, last) -> None:
    """The world shows nothing more, or something that cannot be rendered and that nobody has to answer."""

    class Ends(talk):
        async def step(self, message: Message) -> Step:
            return replace(await super().step(message), observation=last, truncated=True)

    trajectory = run(world(Ends))
    assert (trajectory.stop_reason, trajectory.failure, trajectory.next_context) == ("truncated", None, ())
    assert trajectory.rewards == {"talk": 1.0}


def test_max_turn_tokens_cut_the_reply_and_the_turn_is_closed_for_it(run, world, talk, speaker) -> None:
    trajectory = run(world(talk), speaker("yes indeed"), max_turn_tokens=4)
    decode = tiny_tokenizer().decode
    assert [turn.stop_reason for turn in trajectory.turns] == ["length"] * 3
    assert decode(trajectory.turns[0].segments[1].tokens) == "yes "
    assert decode(trajectory.turns[1].segments[0].tokens) == "<|end|><|user|>go on 1<|end|><|assistant|>"
    assert trajectory.stop_reason == "terminated"


@pytest.mark.parametrize("most", [12, 13, 16, 17, 26, 27, 28, 30])
def test_max_episode_tokens_bound_the_longest_context(run, world, talk, speaker, most: int) -> None:
    """The first observation has 11 tokens, a reply 4 and an observation between 10."""
    trajectory = run(world(talk), speaker("yes"), max_episode_tokens=most)
    replies = [len(turn.segments[1].tokens) for turn in trajectory.turns]
    answered = sum(len(s.tokens) for turn in trajectory.turns for s in turn.segments)
    assert answered <= most
    assert (trajectory.stop_reason, trajectory.failure) == ("max_tokens", None)
    assert replies[0] == min(4, most - 11)
    assert len(replies) == 1 + (most > 11 + 4 + 10)
    assert trajectory.rewards == {"talk": float(len(replies))}  # what was earned so far is real


@pytest.mark.parametrize("most", [5, 11])
def test_a_prompt_without_room_for_an_answer_is_no_score(run, world, talk, most: int) -> None:
    trajectory = run(world(talk), max_episode_tokens=most)
    assert (trajectory.stop_reason, trajectory.failure, trajectory.turns) == ("max_tokens", "mask", ())
    assert "11 tokens" in trajectory.error and f"max_episode_tokens = {most}" in trajectory.error


def test_a_full_engine_ends_the_episode(run, world, talk, speaker) -> None:
    cut = run(world(talk), speaker("yes", context=13))
    assert (cut.stop_reason, cut.failure, len(cut.turns)) == ("context_overflow", None, 1)
    assert cut.turns[0].stop_reason == "context_overflow" and len(cut.turns[0].segments[1].tokens) == 2
    later = run(world(talk), speaker("yes", context=25))
    assert (later.stop_reason, later.failure, len(later.turns)) == ("context_overflow", "mask", 1)
    assert later.error == "prompt of 25 tokens in a context of 25"


@pytest.mark.parametrize(
    ("where", "stop_reason", "failure"), [("reset", "error", "redo"), ("step", "timeout", "mask")]
)
def test_a_timeout_ends_the_episode(run, world, talk, where: str, stop_reason: str, failure: str) -> None:
    """A reset knows nothing of the policy, so it is tried again; a step answers the policy."""

    class Stuck(talk):
        async def reset(self):
            if where == "reset":
                await asyncio.Event().wait()
            return await super().reset()

        async def step(self, message):
            if where == "step" and self.taken == 1:
                await asyncio.Event().wait()
            return await super().step(message)

    places = world(Stuck)
    trajectory = run(places, timeout=0.05)
    assert (trajectory.stop_reason, trajectory.failure) == (stop_reason, failure)
    assert trajectory.error == f"{where}: no end within rollout.limits.timeout = 0.05 s"
    assert trajectory.limited == (where == "step")
    assert len(trajectory.turns) == (1 if where == "step" else 0) and places.made[0].closed == 1


class Busy(ScriptedEngine):
    """Each answer takes an hour in the queue, by the clock of the event loop."""

    async def sample(self, *arguments: Any, **more: Any):
        loop = asyncio.get_running_loop()
        real = loop.time
        loop.time = lambda: real() + 3600 * len(self.requests)  # type: ignore[method-assign]
        for _ in range(3):  # whatever is due by then happens
            await asyncio.sleep(0)
        return await super().sample(*arguments, **more)


def test_time_in_the_engine_s_queue_is_not_the_episode_s(run, world, talk, renderer) -> None:
    engine = Busy(lambda tokens, params: renderer.encode_reply("yes"))
    trajectory = run(world(talk), engine, timeout=600.0)
    assert (trajectory.stop_reason, trajectory.failure, len(trajectory.turns)) == ("terminated", None, 3)


def test_what_the_environment_took_before_the_engine_counts(run, world, talk, speaker) -> None:
    """400 s of the reset and 400 s of the first step, by the clock of the event loop: more than 600 s."""

    class Slow(talk):
        async def wait(self) -> None:
            loop = asyncio.get_running_loop()
            real, late = loop.time, 400.0
            loop.time = lambda: real() + late  # type: ignore[method-assign]
            for _ in range(3):
                await asyncio.sleep(0)

        async def reset(self):
            await self.wait()
            return await super().reset()

        async def step(self, message):
            await self.wait()
            return await super().step(message)

    trajectory = run(world(Slow), timeout=600.0)
    assert (trajectory.stop_reason, len(trajectory.turns)) == ("timeout", 0)
    assert run(world(Slow), timeout=2000.0).stop_reason == "terminated"


def test_a_close_that_never_returns_does_not_hold_the_run(run, world, talk) -> None:
    class Stuck(talk):
        async def close(self) -> None:
            await asyncio.Event().wait()

    trajectory = run(world(Stuck), timeout=0.05)
    assert (trajectory.stop_reason, trajectory.failure) == ("terminated", None)
    assert trajectory.error.startswith("close: TimeoutError")


# --- faults


def faulty(talk, where: str, what: Any):
    """A world whose `where` raises or returns `what`, in the second turn where it is a step."""

    def act(usual: Any) -> Any:
        if isinstance(what, Exception):
            raise what
        return what(usual) if callable(what) else what

    class Faulty(talk):
        async def reset(self):
            usual = await super().reset()
            return act(usual) if where == "reset" else usual

        async def step(self, message):
            usual = await super().step(message)
            return act(usual) if where == "step" and self.taken == 2 else usual

        async def close(self):
            await super().close()
            if where == "close":
                act(None)

    return Faulty


def rewarded(**changes: Any):
    return lambda step: replace(step, **changes)


@pytest.mark.parametrize(
    ("where", "what", "failure", "words"),
    [
        ("reset", ValueError("no map"), "redo", "reset: ValueError: no map"),
        ("step", KeyError("x"), "redo", "step: KeyError: 'x'"),
        ("step", TimeoutError("of a tool"), "redo", "step: TimeoutError: of a tool"),
        ("reset", "hello", "redo", "reset: TypeError: got str, expected Observation"),
        ("step", None, "redo", "step: TypeError: got NoneType, expected Step"),
        ("step", rewarded(observation="hi"), "redo", "step: TypeError: got str, expected Observation"),
        (
            "step",
            rewarded(rewards=1.0),
            "redo",
            "step: TypeError: rewards of the Step is 1.0, expected named numbers, such as "
            'rewards={"score": 1.0}',
        ),
        (
            "step",
            rewarded(metrics=None),
            "redo",
            'step: TypeError: metrics of the Step is None, expected named numbers, such as metrics={"success',
        ),
        (
            "step",
            rewarded(observation=Observation((Message("user", None),))),
            "redo",
            "observation: TypeError",
        ),
        ("step", rewarded(rewards={"won": math.nan}), "mask", "step: reward 'won' is nan, expected a finite"),
        ("step", rewarded(shaped={"bonus": -math.inf}), "mask", "step: reward 'bonus' is -inf"),
        (
            "step",
            rewarded(rewards={"won": "1"}),
            "mask",
            "step: reward 'won' is '1', expected a finite number",
        ),
        ("step", rewarded(rewards={"won": None}), "mask", "step: reward 'won' is None"),
        ("step", rewarded(metrics={"success": math.nan}), "mask", "step: metric 'success' is nan"),
        ("step", rewarded(metrics={"success": "yes"}), "mask", "step: metric 'success' is 'yes'"),
    ],
)
def test_a_fault_of_the_environment_is_part_of_the_result(
    run, world, talk, where: str, what: Any, failure: str, words: str
) -> None:
    places = world(faulty(talk, where, what))
    trajectory = run(places)
    assert (trajectory.stop_reason, trajectory.failure) == ("error", failure)
    assert trajectory.error.startswith(words), trajectory.error
    assert places.made[0].closed == 1
    # Turns before the fault are there to be read, but no group counts them.
    usual = 0 if where == "reset" else 2 if words.startswith("observation") else 1
    assert len(trajectory.turns) == usual


def test_numbers_of_other_libraries_are_numbers(run, world, talk) -> None:
    values = {"a": np.float32(0.5), "b": np.int64(2), "c": True}
    trajectory = run(world(faulty(talk, "step", rewarded(rewards=values))))
    assert trajectory.failure is None
    assert trajectory.rewards == {"talk": 2.0, "a": 0.5, "b": 2.0, "c": 1.0}
    assert {type(value) for value in trajectory.rewards.values()} == {float}


def test_an_environment_that_cannot_be_made_gives_no_result(run, world) -> None:
    def refuse(task):
        raise FileNotFoundError("words.txt")

    trajectory = run(world(refuse))
    line = refuse.__code__.co_firstlineno + 1
    assert trajectory.failure == "redo" and trajectory.error == (
        f"construction: FileNotFoundError: words.txt ({HERE}:{line})"
    )


def test_an_error_in_close_leaves_the_result(run, world, talk) -> None:
    trajectory = run(world(faulty(talk, "close", RuntimeError("busy"))))
    assert (trajectory.stop_reason, trajectory.failure) == ("terminated", None)
    assert trajectory.error.startswith(f"close: RuntimeError: busy ({HERE}:") and trajectory.raw_reward == 3.0


def test_a_fault_of_the_engine_is_not_the_environment_s(run, world, talk) -> None:
    class Broken:
        def __init__(self, error: Exception) -> None:
            self.error = error

        async def sample(self, *_: Any, **__: Any):
            raise self.error

    places = world(talk)
    for error in (EngineError("gone"), TimeoutError("of its own")):
        with pytest.raises(type(error), match=str(error)):
            run(places, Broken(error))
    masked = run(places, Broken(ContextOverflow("too long")))
    assert (masked.stop_reason, masked.failure, masked.error) == ("context_overflow", "mask", "too long")
    assert [one.closed for one in places.made] == [1] * 3


def test_cancelling_an_episode_closes_its_environment(task, world, talk, renderer, policy, limits) -> None:
    class Silent:
        async def sample(self, *_: Any, **__: Any):
            await asyncio.Event().wait()

    places = world(talk)

    async def go() -> None:
        playing = asyncio.ensure_future(
            play(task, places, policy(Silent()), renderer, limits(), id="e", seed=1)
        )
        await asyncio.sleep(0.01)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing

    asyncio.run(go())
    assert places.made[0].closed == 1


# --- contexts that are written anew


def call(expression: str) -> str:
    arguments = json.dumps({"name": "calculator", "arguments": {"expression": expression}})
    return f"<tool_call>\n{arguments}\n</tool_call>"


def sampled_of(trajectory: Trajectory) -> list[tuple[int, ...]]:
    return [s.tokens for turn in trajectory.turns for s in turn.segments if s.source == "policy"]


def test_hidden_observations_rewrite_the_context_and_no_token_is_trained_twice(run, speaker) -> None:
    settings = Calculator(chain=2, hide_observations=True, operators="+", eval_size=5)
    tasks = settings.taskset()
    problem = tasks.tasks("train")[0]
    first, second = (call["arguments"]["expression"] for (call,) in problem.data["calls"])
    said = [call(first), problem.answer[0], call(second), problem.answer[1]]
    trajectory = run(tasks, speaker(*said), task=problem)
    assert (trajectory.stop_reason, trajectory.raw_reward) == ("terminated", 1.0)
    assert [turn.fresh for turn in trajectory.turns] == [True, False, False, True]
    decode = tiny_tokenizer().decode
    rewritten = decode(trajectory.turns[3].segments[0].tokens)
    # The old result is "..." now; the replies before it stand as they were sampled, the new result is shown.
    replies = [decode(tokens) for tokens in sampled_of(trajectory)]
    positions = [rewritten.index(reply) for reply in replies[:3]]
    assert positions == sorted(positions)
    assert rewritten.count("...") == 1 and positions[0] < rewritten.index("...") < positions[1]
    # The result of the first call stays where it was said as an answer: only the observation is hidden.
    assert rewritten.count(f"{problem.answer[0]}<|end|>") == 1
    assert rewritten.index(problem.answer[1]) > positions[2]
    ids = list(trajectory.turns[3].segments[0].tokens)
    for tokens in sampled_of(trajectory)[:3]:
        assert any(ids[i : i + len(tokens)] == list(tokens) for i in range(len(ids)))
    rows = trajectory_samples(trajectory, "g")
    assert [row.turn_ids for row in rows] == [("e/0", "e/1", "e/2"), ("e/3",)]
    trained = [tuple(row.tokens[row.loss_weights > 0]) for row in rows]
    assert sum(trained, ()) == sum(sampled_of(trajectory), ())


def test_an_edited_reply_is_rendered_anew_and_carries_no_loss(run, world, talk, speaker) -> None:
    """Reply 1 comes back word by word, reply 2 with other words; "yess" shows what is not re-tokenised."""

    class Editor(talk):
        async def step(self, message: Message) -> Step:
            step = await super().step(message)
            if self.taken < 2:
                return step
            edited = replace(self.heard[1], content="NO")
            context = (Message("user", "again"), self.heard[0], Message("user", "so"), edited,
                       Message("user", "last"))  # fmt: skip
            return replace(step, observation=Observation(context=context))

    trajectory = run(world(Editor), speaker("yes", "no", "bye"), max_turn_tokens=50)
    assert [turn.fresh for turn in trajectory.turns] == [True, False, True]
    decode = tiny_tokenizer().decode
    assert decode(trajectory.turns[2].segments[0].tokens) == (
        "<|user|>again<|end|><|assistant|>yes<|end|><|user|>so<|end|><|assistant|>NO<|end|>"
        "<|user|>last<|end|><|assistant|>"
    )
    rows = trajectory_samples(trajectory, "g")
    assert [decode(row.tokens[row.loss_weights > 0]) for row in rows] == ["yes<|end|>no<|end|>", "bye<|end|>"]


def test_kept_replies_keep_their_ids_even_where_text_would_give_others(
    task, world, talk, renderer, policy, limits
) -> None:
    """The policy splits characters in its own way: half of an é, which no text has."""
    odd = (*renderer.encode("é")[:1], *renderer.encode("x"), renderer.stop_token_ids[0])

    class Reminder(talk):
        async def step(self, message: Message) -> Step:
            step = await super().step(message)
            said = [m for reply in self.heard for m in (Message("user", "so"), reply)]
            return replace(step, observation=Observation(context=(*said, Message("user", "well?"))))

    actor = policy(ScriptedEngine(lambda tokens, params: odd))
    trajectory = asyncio.run(play(task, world(Reminder), actor, renderer, limits(), id="e", seed=1))
    shown = trajectory.turns[2].segments[0].tokens
    found = sum(shown[i : i + len(odd)] == odd for i in range(len(shown)))
    assert found == 2 and [turn.fresh for turn in trajectory.turns] == [True] * 3
    assert renderer.encode(tiny_tokenizer().decode(odd[:2])) != list(odd[:2])


def test_a_template_that_rewrites_history_starts_every_turn_anew(run, world, talk) -> None:
    """DeepSeek's distillations cut old thoughts away; `keep` overrules that."""
    tokenizer = byte_tokenizer("r1")
    for history, fresh in (("template", [True] * 3), ("keep", [True, False, False])):
        renderer = Renderer(tokenizer, history=history)
        engine = ScriptedEngine(
            lambda tokens, params, renderer=renderer: renderer.encode_reply("hm</think>yes")
        )
        trajectory = run(world(talk), engine, renderer=renderer)
        assert [turn.fresh for turn in trajectory.turns] == fresh
        last = tokenizer.decode(engine.requests[-1][0])
        assert last.count("yes") == 2 and last.count("hm") == (0 if history == "template" else 2)
        rows = trajectory_samples(trajectory, "g")
        trained = [tokenizer.decode(row.tokens[row.loss_weights > 0]) for row in rows]
        assert "".join(trained) == "hm</think>yes<|eot_id|>" * 3 and len(rows) == sum(fresh)


# --- scripted play


def test_an_expert_s_tokens_are_trained_and_its_mistakes_only_played(run, renderer, task) -> None:
    settings = Calculator(tool=False, eval_size=5)
    tasks = settings.taskset()
    problem = tasks.tasks("train")[0]
    expert = run(tasks, actor=Script(renderer), task=problem)
    (row,) = trajectory_samples(expert, "g")
    assert (expert.raw_reward, row.component) == (1.0, "ce")
    assert tiny_tokenizer().decode(row.tokens[row.loss_weights > 0]) == problem.answer[0] + "<|end|>"
    assert np.isnan(row.logprobs).all() and (row.versions == -1).all()
    wrong = run(tasks, actor=Script(renderer, mistakes=1.0), task=problem)
    assert [s.source for s in wrong.turns[0].segments] == ["environment", "environment"]
    assert trajectory_samples(wrong, "g") == []
