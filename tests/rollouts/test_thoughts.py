"""Thoughts for an expert's actions: what is sampled, scored, committed and trained."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scripted_engine import ScriptedEngine
from tests.rendering.templates import byte_tokenizer

from silva.config.sections import EpisodeLimits
from silva.errors import CapabilityError
from silva.models.tiny import tiny_tokenizer
from silva.ports import derive
from silva.protocols import Work
from silva.rendering.renderer import Renderer
from silva.rollouts.samples import to_samples
from silva.rollouts.settings import ThoughtsRolloutSettings
from silva.rollouts.thoughts import Thoughts
from silva.routes import signed
from silva.types import Completion, Group, Message, Observation, SamplingParams, Step, Task, TokenScores

RENDERER, decode = Renderer(tiny_tokenizer()), tiny_tokenizer().decode
STOP = RENDERER.stop_token_ids[0]
ACTIONS = ("go north", "go east")
TASK = Task("t0", "walk", 7, {"n": 0})


class Walk:
    """Two steps of an expert who thinks aloud; pays 5 for each."""

    def __init__(self, prefill: str = "", fails: int = -1) -> None:
        self.prefill, self.fails, self.heard = prefill, fails, list[Message]()

    async def reset(self) -> Observation:
        return Observation((Message("user", "start"),), prefill=self.prefill)

    async def step(self, message: Message) -> Step:
        if len(self.heard) == self.fails:
            raise ValueError("the step is broken")
        self.heard.append(message)
        done = len(self.heard) == len(ACTIONS)
        return Step(
            Observation((Message("user", f"room {len(self.heard)}"),), prefill=self.prefill),
            rewards={"walk": 5.0}, terminated=done, metrics={"success": 1.0} if done else {},
        )  # fmt: skip

    async def close(self) -> None:
        pass

    def expert_reply(self) -> str:
        return f"<think>scripted</think> <answer>{ACTIONS[len(self.heard)]}</answer>"

    def random_reply(self, seed: int) -> str:
        return "<answer>wait</answer>"


class Worlds:
    def __init__(self, **settings: Any) -> None:
        self.settings, self.made = settings, list[Walk]()

    def tasks(self, split: str) -> Sequence[Task]:
        return [TASK]

    def environment(self, task: Task) -> Walk:
        self.made.append(Walk(**self.settings))
        return self.made[-1]


class Engine(ScriptedEngine):
    """Thinks of a digit that depends on the seed; a token's log-probability is minus that digit over 10.

    Other log-probabilities are those of `other`, so that a test sees which tokens count.
    """

    def __init__(self, end: str = "</think>", other: float = -9.0) -> None:
        def think(tokens: Sequence[int], params: SamplingParams) -> list[int]:
            stop = [STOP] if end == "stop" else []
            return [*RENDERER.encode(f"{params.seed % 10}{end.removesuffix('stop')}"), *stop]

        super().__init__(think)
        self.scored, self.version, self.other = list[tuple[str, str]](), 4, other

    async def score(self, tokens: Sequence[int], start: int) -> TokenScores:
        context, said = decode(tokens[:start]), decode(tokens[start:])
        self.scored.append((context, said))
        thought, _, after = said.partition("</think>")
        action = after.strip().removesuffix(decode([STOP]))
        digit = int(next(c for c in thought.removeprefix("<think>") if c.isdigit()))
        first = said.rindex(action)
        length = len(tokens) - start  # one token a character, except the stop token
        found = [self.other] * length
        found[first : first + len(action)] = [-digit / 10] * len(action)
        return TokenScores(tuple(found), tuple(tokens[start:]), tuple(found), self.version)


def played(engine: Engine | None = None, worlds: Worlds | None = None, **settings: Any) -> list[Group]:
    limits = EpisodeLimits(max_turns=4, max_turn_tokens=200, timeout=60.0)
    made = ThoughtsRolloutSettings(**{"group_size": 4, "limits": limits, **settings})
    return collected(Thoughts(made, engine or Engine(), RENDERER, seed=3), worlds or Worlds())


def collected(rollout: Thoughts, worlds: Worlds) -> list[Group]:
    async def run() -> list[Group]:
        return [g async for g in rollout.run(Work("s1g0", TASK, worlds, 0.8))]

    return asyncio.run(run())


def digits(group: Group) -> list[int]:
    return [round(-10 * math.log(t.raw_reward)) for t in group.trajectories]


def text(segments: Sequence[Any]) -> list[tuple[str, str]]:
    return [(s.source, decode(s.tokens)) for s in segments]


def test_each_state_is_a_group_of_thoughts_for_the_expert_s_action() -> None:
    engine, worlds = Engine(), Worlds()
    first, second = played(engine, worlds)
    assert [g.key for g in (first, second)] == ["s1g0/t0", "s1g0/t1"] and first.task == TASK
    seed = derive(3, "s1g0", 0)
    expected = [derive(derive(seed, 0), "thought", i) % 10 for i in range(4)]
    assert digits(first) == expected and len(set(expected)) > 1
    best = min(expected)
    (walk,) = worlds.made
    assert [m.reasoning for m in walk.heard] == [str(best), str(min(digits(second)))]
    assert [m.content for m in walk.heard] == [f"<answer>{a}</answer>" for a in ACTIONS]
    assert all(f"<think>{best}</think> <answer>go north</answer>" in c for c, _ in engine.scored[4:])


def test_the_reward_is_of_exactly_the_action_s_tokens() -> None:
    """The engine gives all others a log-probability of -9."""
    for group, action in zip(played(), ACTIONS, strict=True):
        for trajectory, digit in zip(group.trajectories, digits(group), strict=True):
            assert trajectory.raw_reward == pytest.approx(math.exp(-digit / 10), abs=1e-12)
            (turn,) = trajectory.turns
            assert decode(turn.reply_tokens) == f"<think>{digit}</think> <answer>{action}</answer>" + decode(
                [STOP]
            )
            assert trajectory.metrics == {"action_prob": trajectory.raw_reward}


def test_loss_falls_on_the_thought_and_on_what_was_given_unless_switched_off() -> None:
    (turn,) = played()[0].trajectories[0].turns
    _, *reply = text(turn.segments)
    digit = decode(turn.reply[1].tokens)[0]
    assert reply == [("expert", "<think>"), ("policy", f"{digit}</think>"),
                     ("expert", " <answer>go north</answer>" + decode([STOP]))]  # fmt: skip
    given = [(s.logprobs, s.versions) for s in turn.reply if s.source == "expert"]
    assert given[0] == ((-9.0,) * 7, (4,) * 7)
    (sample,) = to_samples(played()[:1])[:1]
    trained = sample.loss_weights > 0
    assert decode(sample.tokens[trained]) == decode(turn.reply_tokens)
    assert np.isfinite(sample.logprobs[trained]).all() and (sample.versions[trained] >= 0).all()
    assert set(sample.temperatures[trained]) == {0.8, 1.0}

    (turn,) = played(train_given=False)[0].trajectories[0].turns
    assert [source for source, _ in text(turn.segments)] == [
        "environment",
        "environment",
        "policy",
        "environment",
    ]
    (sample, *_) = to_samples(played(train_given=False))
    assert decode(sample.tokens[sample.loss_weights > 0]) == f"{digit}</think>"


@pytest.mark.parametrize(
    ("end", "kept", "added"),
    [
        ("</think>", "</think>", " "),
        ("</thi", "</thi", "nk> "),
        ("", "", "</think> "),
        ("</think><ans", "</think>", " "),
        ("stop", "", "</think> "),
    ],
)
def test_a_thought_ends_with_its_tag_whatever_was_sampled(end: str, kept: str, added: str) -> None:
    (turn,) = played(Engine(end))[0].trajectories[0].turns
    digit = decode(turn.reply[1].tokens)[0]
    assert text(turn.reply)[1:] == [
        ("policy", f"{digit}{kept}"),
        ("expert", f"{added}<answer>go north</answer>" + decode([STOP])),
    ]


def test_an_action_that_is_shown_is_thought_about_in_another_context_than_it_is_played_in() -> None:
    engine = Engine()
    groups = played(engine, shows_action=True, joint=True, hint="It is {action}. Why?")
    prompts = [decode(tokens) for tokens, _, _ in engine.requests]
    assert all("It is <answer>go north</answer>. Why?" in p for p in prompts[:4])
    assert not any("It is" in context for context, _ in engine.scored), "scored where it is played"
    (turn,) = groups[0].trajectories[0].turns
    assert [source for source, _ in text(turn.segments)] == ["environment", "policy"]
    assert decode(turn.segments[0].tokens) == prompts[0]
    whole = groups[-1].trajectories[0]
    assert [[s.source for s in turn.reply] for turn in whole.turns] == [["expert"], ["expert"]]
    assert turn.messages[0].content == "start" and turn.messages[-1].content == "<answer>go north</answer>"


def test_joint_adds_the_demonstration_with_its_best_thoughts() -> None:
    *states, whole = played(joint=True)
    assert whole.key == "s1g0/demonstration" and len(whole.trajectories) == 1
    (trajectory,) = whole.trajectories
    best = [max(t.raw_reward for t in group.trajectories) for group in states]
    assert [turn.rewards for turn in trajectory.turns] == [{"action_prob": p} for p in best]
    assert trajectory.metrics == {"action_prob": pytest.approx(sum(best) / 2)}
    assert "success" not in trajectory.metrics, "that would be the expert's"


def test_with_commit_own_each_episode_goes_on_with_its_own_thoughts() -> None:
    worlds = Worlds()
    (group,) = played(worlds=worlds, commit="own", group_size=3)
    assert group.key == "s1g0" and [t.id for t in group.trajectories] == [f"s1g0/{i}" for i in range(3)]
    for trajectory, walk in zip(group.trajectories, worlds.made, strict=True):
        thoughts = [int(m.reasoning or "") for m in walk.heard]
        rewards = [math.exp(-digit / 10) for digit in thoughts]
        assert [turn.rewards["action_prob"] for turn in trajectory.turns] == pytest.approx(rewards)
        assert trajectory.raw_reward == pytest.approx(sum(rewards)) and not trajectory.shaped
    assert len({tuple(m.reasoning for m in walk.heard) for walk in worlds.made}) == 3


def test_an_episode_that_breaks_is_tried_again_and_then_reported() -> None:
    worlds = Worlds(fails=1)
    (group,) = played(worlds=worlds, redo=2)
    assert len(worlds.made) == 3 and group.scored == ()
    assert "the step is broken" in (group.trajectories[0].error or "")


def test_what_leaves_no_place_for_a_thought_is_an_error() -> None:
    with pytest.raises(CapabilityError, match="begins replies with '<answer>', so that no thought"):
        played(worlds=Worlds(prefill="<answer>"))
    (group,) = played(limits=EpisodeLimits(max_turns=4, max_turn_tokens=20, timeout=60.0))
    (trajectory,) = group.trajectories
    assert trajectory.failure == "mask" and "have 42 tokens, expected less than the 20" in (
        trajectory.error or ""
    )


def test_a_prefill_that_opens_the_thought_is_not_written_twice() -> None:
    (turn,) = played(worlds=Worlds(prefill="<think>"))[0].trajectories[0].turns
    assert decode(turn.segments[0].tokens).endswith("<think>")
    assert [source for source, _ in text(turn.reply)] == ["policy", "expert"]


def test_thoughts_stand_between_the_marks_of_the_model_s_family() -> None:
    renderer = Renderer(byte_tokenizer("magistral"))

    class Even(ScriptedEngine):
        async def score(self, tokens: Sequence[int], start: int) -> TokenScores:
            even = (-1.0,) * (len(tokens) - start)
            return TokenScores(even, tuple(tokens[start:]), even, 0)

    engine = Even(lambda tokens, params: renderer.encode("hm[/THINK]"))
    settings = ThoughtsRolloutSettings(group_size=1, limits=EpisodeLimits(max_turn_tokens=200))
    worlds = Worlds()
    groups = collected(Thoughts(settings, engine, renderer, seed=3), worlds)
    (turn,) = groups[0].trajectories[0].turns
    assert renderer.decode(turn.reply_tokens[:-1]) == "[THINK]hm[/THINK] <answer>go north</answer>"
    assert [m.reasoning for m in worlds.made[0].heard] == ["hm", "hm"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"commit": "own", "joint": True}, 'joint: got true with commit = "own"'),
        ({"commit": "own", "shows_action": True}, 'shows_action: got true with commit = "own"'),
        ({"hint": "why?"}, "expected {action} in it"),
    ],
)
def test_settings_that_do_not_fit_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ThoughtsRolloutSettings(**keys)


def test_the_longest_answer_is_one_reply_or_a_whole_episode() -> None:
    limits = EpisodeLimits(max_turns=4, max_turn_tokens=50)
    found = [ThoughtsRolloutSettings(limits=limits, **keys).longest_answer
             for keys in ({}, {"joint": True}, {"commit": "own"})]  # fmt: skip
    assert found == [50, 200, 200]


def test_completions_keep_their_own_numbers() -> None:
    """Log-probabilities of the thought are those it was sampled with, not those of the scorer."""

    class Sampled(Engine):
        async def sample(self, tokens, params, *, session=""):
            found = await super().sample(tokens, params, session=session)
            n = len(found.tokens)
            return Completion(found.tokens, (-0.5,) * n, (-0.6,) * n, (0.1,) * n, (4,) * n, "stop_string")

    (turn,) = played(Sampled())[0].trajectories[0].turns
    thought = turn.reply[1]
    assert set(thought.logprobs) == {-0.5} and set(thought.entropies) == {0.1} and thought.temperature == 0.8


class Routed(Engine):
    """The experts of a token are its place in what the engine was given and said."""

    async def sample(self, tokens, params, *, session=""):
        found = await super().sample(tokens, params, session=session)
        places = np.arange(len(tokens) + len(found.tokens), dtype=np.uint16).reshape(-1, 1, 1)
        parts = {"prompt_routes": places[: len(tokens)], "routes": places[len(tokens) :]}
        return replace(found, **parts)


@pytest.mark.parametrize("keys", [{}, {"shows_action": True}, {"shows_action": True, "joint": True}])
def test_routes_are_known_up_to_the_end_of_the_thought(keys: dict[str, Any]) -> None:
    groups = played(Routed(), **keys)
    (sample,) = to_samples(groups[:1])[:1]
    assert sample.routes is not None
    known = signed(sample.routes)[:, 0, 0]
    thought = next(s for s in groups[0].trajectories[0].turns[0].reply if s.source == "policy")
    end = len(groups[0].trajectories[0].turns[0].segments[0].tokens) + len(thought.tokens)
    end += 0 if keys else 7  # of "<think>", which stands in the prompt of both
    assert known[:end].tolist() == [*range(end)] and set(known[end:]) <= {-1}
    for joint in to_samples(groups[-1:]) if "joint" in keys else ():
        assert (signed(joint.routes) == -1).all()  # scored where it is played, and never sampled there
