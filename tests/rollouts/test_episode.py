"""One episode: tokens of every turn, rewritten contexts, scripted play."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
from scripted_engine import ScriptedEngine
from tests.rendering.templates import byte_tokenizer

from silva.actors.script import Script
from silva.config.sections import HideObservations
from silva.environments.worlds.calculator import Calculator
from silva.models.tiny import tiny_tokenizer
from silva.rendering.renderer import Renderer
from silva.rollouts.episode import play
from silva.rollouts.samples import trajectory_samples
from silva.types import Message, Observation, Step, Trajectory

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


# --- contexts that are replaced


def call(expression: str) -> str:
    arguments = json.dumps({"name": "calculator", "arguments": {"expression": expression}})
    return f"<tool_call>\n{arguments}\n</tool_call>"


def sampled_of(trajectory: Trajectory) -> list[tuple[int, ...]]:
    return [s.tokens for turn in trajectory.turns for s in turn.segments if s.source == "policy"]


def test_hidden_observations_rewrite_the_context_and_no_token_is_trained_twice(run, speaker) -> None:
    settings = Calculator(chain=2, operators="+", eval_size=5)
    tasks = settings.taskset()
    problem = tasks.tasks("train")[0]
    first, second = (call["arguments"]["expression"] for (call,) in problem.data["calls"])
    said = [call(first), problem.answer[0], call(second), problem.answer[1]]
    hides = HideObservations(roles=("tool",))
    trajectory = run(tasks, speaker(*said), task=problem, context=hides)
    assert (trajectory.stop_reason, trajectory.raw_reward) == ("terminated", 1.0)
    assert [turn.fresh for turn in trajectory.turns] == [True, False, True, False]
    decode = tiny_tokenizer().decode
    rewritten = decode(trajectory.turns[2].segments[0].tokens)
    # The old result is "..." now; the replies around it stand as they were sampled.
    replies = [decode(tokens) for tokens in sampled_of(trajectory)]
    positions = [rewritten.index(reply) for reply in replies[:2]]
    assert positions == sorted(positions)
    assert rewritten.count("...") == 1 and positions[0] < rewritten.index("...") < positions[1]
    # The result of the first call stays where it was said as an answer: only the observation is hidden.
    assert rewritten.count(f"{problem.answer[0]}<|end|>") == 1
    assert rewritten.index(problem.data["questions"][1]) > positions[1]
    ids = list(trajectory.turns[2].segments[0].tokens)
    for tokens in sampled_of(trajectory)[:2]:
        assert any(ids[i : i + len(tokens)] == list(tokens) for i in range(len(ids)))
    rows = trajectory_samples(trajectory, "g")
    assert [row.turn_ids for row in rows] == [("e/0", "e/1"), ("e/2", "e/3")]
    trained = [tuple(row.tokens[row.loss_weights > 0]) for row in rows]
    assert sum(trained, ()) == sum(sampled_of(trajectory), ())


def test_an_edited_reply_is_rendered_again_and_carries_no_loss(run, world, talk, speaker) -> None:
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


def test_a_template_that_rewrites_history_starts_every_turn_again(run, world, talk) -> None:
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
