"""What does not fit the limits of a run, known before any episode is played."""

import asyncio

from silva.config.sections import EpisodeLimits, FullContext
from silva.environments.worlds.calculator import Calculator
from silva.models.tiny import tiny_tokenizer
from silva.rendering.renderer import Renderer
from silva.rollouts.openings import TASKS, Opening, misfits, openings


def test_prompts_of_all_training_tasks_are_tried_with_their_experts():
    tasks, renderer = Calculator().taskset(), Renderer(tiny_tokenizer())
    train = tasks.tasks("train")
    begun = [tasks.environment(train[i]) for i in range(0, len(train), len(train) // TASKS)]
    shown = [asyncio.run(episode.reset()) for episode in begun]
    prompts = [len(renderer.context(first.messages, first.tools)) for first in shown]
    room = max(prompts)  # too little for the longest
    experts = [len(renderer.encode_reply(episode.expert_reply())) for episode in begun]
    expected = [  # an episode that cannot begin asks nobody
        Opening("calculator", prompt, expert if prompt < room else 0)
        for prompt, expert in zip(prompts, experts, strict=True)
    ]
    limits = EpisodeLimits(max_turn_tokens=40, max_episode_tokens=room)
    found = asyncio.run(openings({"calculator": tasks}, renderer, limits, FullContext(), seed=0))
    assert found == expected and len(found) == TASKS and min(prompts) < room


def test_what_does_not_fit_is_told_by_environment():
    found = [Opening("a", 90, 0), Opening("a", 100, 0), Opening("a", 130, 0), Opening("b", 10, 41)]
    assert misfits(found, EpisodeLimits(max_episode_tokens=131, max_turn_tokens=41)) == []
    prompt, expert = misfits(found, EpisodeLimits(max_episode_tokens=100, max_turn_tokens=40))
    assert prompt.startswith("a: 2 of 3 first prompts that were tried have 100 to 130 tokens, and ")
    assert expert.startswith("b: the expert's own first reply has up to 41 tokens, more than ")
