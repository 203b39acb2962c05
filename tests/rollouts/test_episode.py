"""One episode: tokens of every turn, rewritten contexts, scripted play."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np

from silva.actors.script import Script
from silva.environments.worlds.calculator import Calculator
from silva.models.tiny import tiny_tokenizer
from silva.rollouts.samples import trajectory_samples
from silva.types import Message, Observation, Step

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


# --- scripted play


def test_an_expert_s_tokens_are_trained_and_its_mistakes_only_played(run, renderer, task) -> None:
    settings = Calculator(tool=False, eval_size=5)
    tasks = settings.taskset()
    problem = tasks.tasks("train")[0]
    expert = run(tasks, actor=Script(renderer), task=problem)
    (row,) = trajectory_samples(expert, "g")
    assert expert.raw_reward == 1.0
    assert tiny_tokenizer().decode(row.tokens[row.loss_weights > 0]) == problem.answer[0] + "<|end|>"
    assert np.isnan(row.logprobs).all() and (row.versions == -1).all()
    wrong = run(tasks, actor=Script(renderer, mistakes=1.0), task=problem)
    assert [s.source for s in wrong.turns[0].segments] == ["environment", "environment"]
    assert trajectory_samples(wrong, "g") == []
