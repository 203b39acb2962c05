"""What every environment and task set does. A new one is in `ENVIRONMENTS`, or adds itself to `MADE`."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import inspect
import json
import math
import random
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from pydantic import ValidationError
from tests.contracts.doubles import Slow
from tests.environment_cases import OWN, small
from tests.worlds import Parity, ParityEpisode

from silva.environments.process.workers import Workers
from silva.environments.settings import EnvironmentSettings
from silva.environments.worlds.sokoban import _shape
from silva.ports import derive
from silva.protocols import Environment, Forkable, Scripted, TaskSet
from silva.rendering.tool_calls import parse_hermes
from silva.types import Message, Observation, Step, Task, ToolCall

MOST_TURNS = 200
SPLITS = ("train", "eval")


class SlowTasks:
    """A task set whose environments are slow."""

    def __init__(self, inner: TaskSet) -> None:
        self._inner, self.tasks = inner, inner.tasks

    def environment(self, task: Task) -> Any:
        return Slow(self._inner.environment(task))


def registered(name: str, **changes: Any) -> EnvironmentSettings:
    return small(name, train_size=40, eval_size=8, **changes)


MADE: dict[str, Callable[[], TaskSet]] = {
    **{name: lambda name=name: registered(name).taskset() for name in OWN},  # type: ignore[misc]
    "by path": lambda: Parity(train_size=40, eval_size=8).taskset(),
    "in workers": lambda: Workers(registered("frozen_lake").model_copy(update={"workers": 2})),
    "connections in turns": lambda: registered("connections", form="turns").taskset(),
    "countdown in attempts": lambda: registered("countdown", attempts=3, style="compact").taskset(),
    "hotpotqa without choices": lambda: registered("hotpotqa_mc", choices=0).taskset(),
    "slow": lambda: SlowTasks(registered("frozen_lake").taskset()),
}


VARIED: list[tuple[str, dict[str, Any]]] = [
    ("browsecomp_plus_search", {"tools_change": False, "part_words": 25}),
    ("guess_number", {"numbers": 31, "guesses": 5, "ranges": 20}),
    ("webshop", {"layout": "sep", "page_size": 2, "goals_per_product": 9}),
    ("wiki_search", {"max_hops": 3, "search_in": "titles", "eval_size": 40}),
    ("alphabet_sort", {"style": "compact"}),
    ("alphabet_sort", {"max_turns": 7, "max_names": 8}),
    ("calculator", {"tool": False, "chain": 2, "terms": 3}),
    ("calculator", {"tool": False, "operators": "*"}),
    ("connections", {"form": "turns"}),
    ("countdown", {"min_numbers": 5, "max_numbers": 5}),
    ("countdown", {"use": "some"}),
    ("countdown", {"operators": "+-"}),
    ("countdown", {"style": "compact", "min_numbers": 2, "max_numbers": 2, "largest": 20}),
    ("frozen_lake", {"random_start": True, "max_actions": 8, "max_actions_per_turn": 2}),
    ("hanoi", {"form": "single", "partial": True, "think": False}),
    ("hanoi", {"form": "single", "min_disks": 5, "max_disks": 9}),
    ("hanoi", {"form": "single", "start": "tower", "min_disks": 2, "max_disks": 7, "eval_share": 0.4}),
    ("wordle", {"alphabet": "abc", "length": 3, "style": "compact", "eval_share": 0.4, "eval_size": 4}),
    ("wordle", {"alphabet": "abcd", "length": 3, "style": "compact", "guesses": 4}),
]
"""Worlds with settings that change how the expert plays; a solution earns 1."""


PARTS: dict[str, tuple[dict[str, Any], Callable[[Task], Iterable[Any]]]] = {
    "alphabet_sort": ({"style": "compact", "max_turns": 1, "max_names": 2, "train_size": 3000},
                      lambda task: [frozenset(task.data["names"][0])]),
    "bandit": ({}, lambda task: [frozenset(task.data["shown"])]),
    "browsecomp_plus_search": ({}, lambda task: [hop[1] for hop in task.data["hops"]]),
    "calculator": ({"digits": 1, "operators": "+-*", "chain": 3}, lambda task: [
        tuple(sorted(call["arguments"]["expression"].split())) for (call,) in task.data["calls"]]),
    "connections": ({}, lambda task: task.answer),
    "countdown": ({"max_numbers": 3, "largest": 9}, lambda task: [
        (*sorted(task.data["numbers"]), task.data["target"])]),
    "dataset": ({}, lambda task: [str(task.data["messages"])]),
    "guess_number": ({}, lambda task: [task.data["low"]]),
    "longbench_v2": ({"words": 300}, lambda task: [task.data["document"]]),
    "sokoban": ({"rows": 5, "columns": 5}, lambda task: [str(_shape(task.data["room"]))]),
    "webshop": ({}, lambda task: [task.data["asin"]]),
    "wiki_search": ({}, lambda task: [hop[1] for hop in task.data["hops"]]),
}  # fmt: skip
"""What two tasks must not have in common if one is for training and one is held out."""


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("alphabet_sort", {"max_names": 30}, "expected a product of 60 or less"),
    ("alphabet_sort", {"max_names": 1}, "one name needs no sorting"),
    ("bandit", {"risky_chance": 0.1}, "both arms pay the same"),
    ("calculator", {"operators": "+/"}, "operators"),
    ("connections", {"form": "turns", "groups": 2, "size": 2},
     "mistakes = 4: expected 2 or less, since on a board of 2 groups"),
    ("dataset", {"expert": "x"}, "expected a column in `expert`"),
    ("demonstrations", {"hub": "a/b"}, "expected one of path, hub and rows, got path and hub"),
    ("demonstrations", {"path": ""}, "expected one of path, hub and rows, got none"),
    ("frozen_lake", {"max_actions": 5}, "max_actions = 5 cannot reach the goal of a map of size 4"),
    ("guess_number", {"discount": 0.5}, "the last of 3 guesses would earn nothing"),
    ("hanoi", {"max_disks": 5}, "max_actions = 20: 5 disks need up to 31"),
    ("hotpotqa_mc", {"choices": 1}, "the only choice is always right"),
    ("key_door", {"max_actions": 4}, "max_actions = 4: 1 rooms, a key, 3 rooms and the door need 6"),
    ("longbench_v2", {"part_words": 100}, "overlap = 190: expected less than part_words = 100"),
    ("sokoban", {"max_moves": 12}, "expected min_moves <= max_moves <= max_actions"),
    ("sokoban", {"symbols": "#_O"}, "symbols: got '#_O', expected seven different characters"),
    ("sokoban", {"max_actions": 120}, "120 actions cost 12, but the last box pays 11"),
    ("webshop", {"products": "items.json"}, "set both `products` and `instructions`"),
    ("webshop", {"human_instructions": "people.json"}, "`products` is not"),
    ("wiki_search", {"corpus": "c"}, "`questions` is not"),
    ("wordle", {"alphabet": "abc", "words": "x"}, "set `alphabet` or `words`, not both"),
    ("wordle", {"alphabet": "aab"}, "two or more different letters"),
    ("wordle", {"alphabet": "abcdefghij"}, "makes 100000 sequences: expected at most 10000"),
    ("wordle", {"discount": 0.16}, r"the last of 6 guesses earns 0\.2, which must be more than"),
]  # fmt: skip


@pytest.fixture(scope="module", params=MADE)
def make(request: pytest.FixtureRequest) -> Callable[[], TaskSet]:
    return MADE[request.param]


@pytest.fixture(scope="module")
def taskset(make: Callable[[], TaskSet]) -> TaskSet:
    return make()


def content(task: Task) -> str:
    return json.dumps([task.data, task.answer], sort_keys=True)


def message(reply: str) -> Message:
    """As the renderer gives it to the environment."""
    parsed = parse_hermes(reply)
    return Message("assistant", parsed.content, tool_calls=parsed.calls, errors=parsed.errors)


async def said(reply: Any, turn: int) -> Message:
    """`reply` is a message, or text that may have to be waited for. Replies have ids, as in a rollout."""
    text = await reply if inspect.isawaitable(reply) else reply
    return dataclasses.replace(message(text) if isinstance(text, str) else text, id=f"reply-{turn}")


async def play(environment: Environment, replies: Callable[[int], Any]) -> list[Observation | Step]:
    """The first observation, and every step to the end."""
    told: list[Observation | Step] = [await environment.reset()]
    for turn in range(MOST_TURNS):
        step = await environment.step(await said(replies(turn), turn))
        told.append(step)
        if step.terminated or step.truncated:
            break
    await environment.close()
    return told


def scripted(environment: Any, seed: int, *, skill: float = 0.0) -> Callable[[int], Any]:
    """Replies of the environment's own: its expert's with this probability, otherwise random ones."""

    def reply(turn: int) -> Any:
        expert = derive(seed, "who", turn) % 1000 < 1000 * skill
        return environment.expert_reply() if expert else environment.random_reply(derive(seed, turn))

    return reply


def episode(taskset: TaskSet, task: Task, seed: int = 0, skill: float = 0.0) -> list[Observation | Step]:
    environment = taskset.environment(task)
    return asyncio.run(play(environment, scripted(environment, seed, skill=skill)))


def steps(told: Sequence[Observation | Step]) -> list[Step]:
    return [each for each in told if isinstance(each, Step)]


def earned(told: Sequence[Observation | Step]) -> float:
    return sum(value for step in steps(told) for value in step.rewards.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN)
def test_neither_seed_nor_size_nor_name_moves_a_problem_to_the_other_split(name: str) -> None:
    sizes = {"eval_size": 40, "train_size": 200}
    taskset = small(name, **sizes).taskset()
    held_out, train = ([task.content() for task in taskset.tasks(split)] for split in ("eval", "train"))
    assert len(held_out) == len({*held_out}) == 40 < len({*train}) and not {*train} & {*held_out}
    for other in ({"seed": 1, "train_size": 100}, {"eval_size": 55}, {"eval_size": 7, "name": "mine"}):
        changed = small(name, **(sizes | other))
        assert changed.type == name
        others = changed.taskset()
        assert others.tasks("train")[0].environment == changed.label
        assert not {task.content() for task in others.tasks("train")} & {*held_out}
        assert not {task.content() for task in others.tasks("eval")} & {*train}


@pytest.mark.slow
@pytest.mark.parametrize("name", PARTS)
def test_what_makes_two_tasks_alike_is_in_one_split(name: str) -> None:
    keys, parts = PARTS[name]
    taskset = small(name, **{"eval_size": 60, "train_size": 1000, **keys}).taskset()
    train, held_out = ({part for task in taskset.tasks(split) for part in parts(task)} for split in SPLITS)  # type: ignore[arg-type]
    assert len(train) > 20 and len(held_out) > 8 and not train & held_out


@pytest.mark.parametrize(("name", "keys", "message"), REFUSED)
def test_settings_that_cannot_work_are_refused(name: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        small(name, **keys)


@pytest.mark.parametrize("name", OWN)
def test_bounds_are_in_order(name: str) -> None:
    settings = small(name)
    for what in settings.bounds:
        low = getattr(settings, f"min_{what}")
        with pytest.raises(ValidationError):
            small(name, **{f"min_{what}": low + 1, f"max_{what}": low})


@pytest.mark.slow
def test_splits_share_no_problem_and_ids_are_unique(taskset: TaskSet) -> None:
    train, held_out = (list(taskset.tasks(split)) for split in SPLITS)  # type: ignore[arg-type]
    assert train and held_out
    assert not {content(task) for task in train} & {content(task) for task in held_out}
    ids = [task.id for task in (*train, *held_out)]
    assert len(set(ids)) == len(ids)
    assert {task.split for task in train} == {"train"} and {task.split for task in held_out} == {"eval"}


@pytest.mark.slow
def test_tasks_are_plain_json_and_the_same_each_time(make: Callable[[], TaskSet]) -> None:
    for split in SPLITS:
        first, again = (list(make().tasks(split)) for _ in range(2))  # type: ignore[arg-type]
        assert first == again
        assert all(json.loads(json.dumps(task.data)) == task.data for task in first)


@pytest.mark.slow
def test_an_episode_ends_and_its_numbers_are_finite(taskset: TaskSet) -> None:
    for task in taskset.tasks("train")[:8]:
        first, *rest = episode(taskset, task)
        assert isinstance(first, Observation) and first.messages
        assert all(each.role != "assistant" for each in first.messages)
        assert rest and all(isinstance(each, Step) for each in rest)
        assert steps(rest)[-1].terminated or steps(rest)[-1].truncated
        for step in steps(rest):
            numbers = [*step.rewards.values(), *step.shaped.values(), *step.metrics.values()]
            assert all(math.isfinite(number) for number in numbers)
        known = getattr(taskset.environment(task), "settings", EnvironmentSettings()).reward_range
        assert known is None or known[0] - 1e-9 <= earned(rest) <= known[1] + 1e-9


@pytest.mark.slow
def test_a_task_and_the_replies_decide_an_episode(make: Callable[[], TaskSet]) -> None:
    """Noise is of the task's seed, and episodes that run side by side share nothing."""
    taskset, other = make(), make()
    tasks = list(taskset.tasks("train")[:4])
    alone = [episode(taskset, task, seed) for seed, task in enumerate(tasks)]

    async def together() -> list[list[Observation | Step]]:
        made = [other.environment(task) for task in tasks]
        runs = [play(each, scripted(each, seed)) for seed, each in enumerate(made)]
        return list(await asyncio.gather(*runs))

    assert asyncio.run(together()) == alone


@pytest.mark.slow
def test_another_seed_changes_what_happens_but_not_what_is_asked(taskset: TaskSet) -> None:
    task = taskset.tasks("train")[0]

    async def first(seed: int) -> Observation:
        environment = taskset.environment(dataclasses.replace(task, seed=seed))
        try:
            return await environment.reset()
        finally:
            await environment.close()

    async def run() -> None:
        assert await first(task.seed + 1) == await first(task.seed)

    asyncio.run(run())


@pytest.mark.slow
def test_the_expert_always_succeeds_and_chance_seldom_does(taskset: TaskSet) -> None:
    task = taskset.tasks("eval")[0]
    if not isinstance(taskset.environment(task), Scripted):
        pytest.skip("this environment cannot play itself")

    def success(skill: float) -> float:
        ends = [
            steps(episode(taskset, task, seed, skill))[-1]
            for task in taskset.tasks("eval")
            for seed in range(4)
        ]
        return sum(end.metrics.get("success", 0.0) for end in ends) / len(ends)

    assert success(1.0) == 1.0
    assert success(0.0) <= {"bandit": 0.75, "guess_number": 0.5, "parity": 0.75}.get(task.environment, 0.45)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "keys"), VARIED, ids=lambda each: each if isinstance(each, str) else "")
def test_the_expert_solves_what_other_settings_ask(kind: str, keys: dict[str, Any]) -> None:
    taskset = small(kind, train_size=4, **{"eval_size": 8, **keys}).taskset()
    for task in taskset.tasks("eval"):
        played = steps(episode(taskset, task, skill=1.0))
        assert played[-1].metrics["success"] == 1.0 and earned(played) == pytest.approx(1.0)


@pytest.mark.slow
def test_no_failure_earns_as_much_as_a_success(taskset: TaskSet) -> None:
    """Replies with parts of the expert's, of random ones and of nonsense, repeated or in another order."""
    task = taskset.tasks("train")[1]
    if not isinstance(taskset.environment(task), Scripted) or task.environment == "bandit":
        pytest.skip("it cannot play itself, or pays by luck")
    full = earned(episode(taskset, task, skill=1.0))
    for seed in range(24):
        environment: Any = taskset.environment(task)
        rng = random.Random(seed)

        async def reply(turn: int, environment: Any = environment, rng: random.Random = rng) -> str:
            said = [environment.expert_reply(), environment.random_reply(rng.randrange(99))]
            texts = [await each if inspect.isawaitable(each) else each for each in said]
            pieces = [piece for text in texts for piece in re.findall(r"\w+|\W", text)] + [
                "</answer>",
                "\n",
                "1",
            ]
            few = rng.choices(pieces, k=rng.randint(0, 12))
            parts = re.split(r"(?<=>)(?=<)|(?<=\n)", texts[0])
            some = "".join(parts[: rng.randrange(len(parts) + 1)])
            return rng.choice([*texts, texts[0] * 2, "".join(texts), some, "".join(few)])

        told = steps(asyncio.run(play(environment, reply)))
        assert told[-1].metrics["success"] == 1.0 or earned(told) < full


@pytest.mark.slow
@pytest.mark.parametrize(
    "nonsense",
    [
        "",
        "\x00\ud800 " * 3,
        "x" * 100_000,
        "<answer>" * 50,
        Message("assistant", "", tool_calls=(ToolCall("nobody", {"x": 1}, "c0"),)),
        Message("assistant", "", errors=("malformed tool call: Expecting value",)),
    ],
    ids=["empty", "odd characters", "long", "open tags", "unknown tool", "malformed call"],
)
def test_nonsense_is_answered(taskset: TaskSet, nonsense: str | Message) -> None:
    """What a policy says is never the environment's fault: steps to an end, and no success."""
    environment = taskset.environment(taskset.tasks("train")[0])
    told = asyncio.run(play(environment, lambda turn: nonsense))
    assert steps(told)
    if not isinstance(environment, ParityEpisode):  # any reply may have its parity
        assert steps(told)[-1].metrics.get("success", 0.0) == 0.0


def test_closing_twice_and_before_the_reset_is_fine(taskset: TaskSet) -> None:
    task = taskset.tasks("train")[0]

    async def run() -> Observation:
        unused, used = taskset.environment(task), taskset.environment(task)
        await unused.close()
        first = await used.reset()
        await used.close()
        await used.close()
        after = taskset.environment(task)  # what was closed is no other episode's
        try:
            assert await after.reset() == first
        finally:
            await after.close()
        return first

    assert asyncio.run(run()).messages


def test_a_fork_goes_on_from_the_same_state_with_its_own_noise(taskset: TaskSet) -> None:
    """With the task's own seed it goes on as the environment does; neither changes the other."""
    task = taskset.tasks("train")[0]
    if not isinstance(taskset.environment(task), Forkable):
        pytest.skip("this environment cannot be forked")

    async def turn(environment: Any, number: int) -> Step:
        reply = environment.random_reply(derive(1, number)) if isinstance(environment, Scripted) else "?"
        return await environment.step(await said(reply, number))

    async def run() -> None:
        plain, forked = (taskset.environment(task) for _ in range(2))
        await plain.reset()
        await forked.reset()
        if (first := await turn(plain, 0)).terminated or first.truncated:
            fork = await forked.fork(task.seed)  # type: ignore[attr-defined]
            assert await turn(fork, 0) == await turn(forked, 0) == first
            return
        assert await turn(forked, 0) == first
        same, other = await forked.fork(task.seed), await forked.fork(task.seed + 1)  # type: ignore[attr-defined]
        await turn(other, 99)  # whatever happens there
        expected = await turn(plain, 1)
        assert await turn(same, 1) == expected == await turn(forked, 1)
        for each in (plain, forked, same, other):
            await each.close()

    asyncio.run(run())


def test_an_observation_is_never_changed_afterwards(taskset: TaskSet) -> None:
    environment = taskset.environment(taskset.tasks("train")[0])
    reply = scripted(environment, 3) if isinstance(environment, Scripted) else lambda turn: "?"

    async def run() -> None:
        told = await environment.reset()
        before = copy.deepcopy(told)
        await environment.step(await said(reply(0), 0))
        assert told == before

    asyncio.run(run())
