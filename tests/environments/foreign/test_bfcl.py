"""BFCL from its package: its own answers are right, changed ones are not, and tasks of several turns are
graded as the package's own checker grades them, which evaluates the calls."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest
from tests.environments.conftest import call, said

from silva.environments.foreign.bfcl import Bfcl, _call, _schema, specs
from silva.environments.foreign.bfcl_services import SCENARIOS, ServiceDialogue, read_call
from silva.rendering.tool_calls import parse_hermes
from silva.types import Message, Task, ToolCall

COUNTS = {
    "simple_python": 400, "simple_java": 100, "simple_javascript": 50, "multiple": 200, "parallel": 200,
    "parallel_multiple": 200, "irrelevance": 240, "live_simple": 258, "live_multiple": 1053,
    "live_parallel": 16, "live_parallel_multiple": 24, "live_irrelevance": 884, "live_relevance": 16,
} | dict.fromkeys(SCENARIOS, 200)  # fmt: skip
GRADED = ["simple_python", "multiple", "parallel", "live_simple", "live_multiple", "live_parallel_multiple"]


def test_descriptions_become_json_schemas() -> None:
    given = {
        "type": "dict",
        "properties": {
            "sizes": {"type": "tuple", "items": {"type": "float"}, "description": "all"},
            "how": {"type": "dict", "properties": {"fast": {"type": "boolean", "default": 1, "optional": 1}}},
            "any": {"type": "any"},
        },
        "required": ["sizes"],
    }  # fmt: skip
    assert _schema(given) == {
        "type": "object",
        "properties": {
            "sizes": {"type": "array", "items": {"type": "number"}, "description": "all"},
            "how": {"type": "object", "properties": {"fast": {"type": "boolean", "default": 1}}},
            "any": {"type": "string"},
        },
        "required": ["sizes"],
    }
    java = {
        "type": "dict",
        "properties": {"ids": {"type": "ArrayList", "items": {"type": "long"}}},
        "required": [],
    }
    (spec,) = specs([{"name": "a.b", "description": "It.", "parameters": java}], "java")
    assert (spec.name, spec.description) == ("a_b", "It. The function is in Java.")
    assert spec.parameters["properties"]["ids"] == {
        "type": "string", "description": "The value, a ArrayList of long, as code of java."
    }  # fmt: skip


def test_the_expert_takes_the_first_value_that_is_given() -> None:
    possible = {"a.b": {"x": ["", 3], "y": [""], "z": [{"w": [[1, 2]], "v": ["", 4.0]}]}}
    assert _call(possible) == ToolCall("a_b", {"x": 3, "z": {"w": [1, 2], "v": 4.0}})


# --- with the package


def tasks_of(category: str) -> tuple[Any, list[Task]]:
    pytest.importorskip("bfcl_eval", reason="needs bfcl-eval: pip install --no-deps bfcl-eval mpmath")
    taskset = Bfcl(categories=(category,), eval_share=1.0).taskset()
    return taskset, list(taskset.tasks("eval"))


def success(taskset: Any, task: Task, *replies: Message) -> float:
    async def play() -> float:
        episode = taskset.environment(task)
        await episode.reset()
        for reply in replies:
            step = await episode.step(replace(reply, id="r"))
        return step.metrics["success"]

    return asyncio.run(play())


@pytest.mark.slow
@pytest.mark.parametrize("category", COUNTS)
def test_every_row_of_a_category_is_a_task(category: str) -> None:
    assert len(tasks_of(category)[1]) == COUNTS[category]


@pytest.mark.parametrize("category", GRADED)
def test_the_package_s_answers_are_right_and_changed_ones_are_not(category: str, play_out) -> None:
    taskset, tasks = tasks_of(category)
    for task in tasks[:12]:
        *_, last = play_out(taskset.environment(task))
        assert last.metrics["success"] == 1.0, task.data["id"]
        calls = list(parse_hermes(taskset.environment(task).expert_reply()).calls)
        other = ToolCall(calls[0].name, {**calls[0].arguments, "no_such": 1})
        for wrong in ([], [other, *calls[1:]], [*calls, calls[0]], [replace(calls[0], name="x"), *calls[1:]]):
            assert success(taskset, task, Message("assistant", "", tool_calls=tuple(wrong))) == 0.0


def test_calls_in_other_languages_are_texts() -> None:
    taskset, tasks = tasks_of("simple_java")
    task = next(task for task in tasks if task.data["id"] == "simple_java_0")
    arguments = {"controller": "mapController", "parent": "mapArea"}
    assert success(taskset, task, call("GeometryPresentation_createPresentation", **arguments)) == 1.0
    assert success(taskset, task, call("GeometryPresentation_createPresentation", controller="x")) == 0.0


@pytest.mark.parametrize(("category", "called", "silent"), [("irrelevance", 0, 1), ("live_relevance", 1, 0)])
def test_whether_to_call_at_all_is_graded(category: str, called: float, silent: float) -> None:
    taskset, (task, *_) = tasks_of(category)
    name = taskset.environment(task).settings and task.data["functions"][0]["name"].replace(".", "_")
    assert success(taskset, task, call(name)) == called
    assert success(taskset, task, Message("assistant", "I cannot.")) == silent


def package_says(task: Task, turns: list[list[str]], name: str) -> bool:
    """What the package's own checker says of these calls, one list a turn."""
    from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker

    entry = {"initial_config": task.data["initial_config"], "involved_classes": task.data["services"],
             "id": task.data["id"]}  # fmt: skip
    decoded = [[calls] if calls else [] for calls in turns]
    return multi_turn_checker(decoded, task.answer, entry, task.data["category"], name)["valid"]


@pytest.mark.slow
@pytest.mark.parametrize("category", SCENARIOS)
def test_several_turns_are_graded_as_the_package_does(category: str) -> None:
    taskset, tasks = tasks_of(category)
    rng, verdicts = random.Random(category), []
    for number, task in enumerate(tasks[:24]):
        turns = [list(calls) for calls in task.answer]
        full = [i for i, calls in enumerate(turns) if calls]
        if number % 3:  # a call is left out, or made again
            where = rng.choice(full)
            which = rng.randrange(len(turns[where]))
            turns[where][which : which + 1] = [turns[where][which]] * (0 if number % 3 == 1 else 2)
        verdicts.append(package_says(task, turns, f"silva_{number}"))
        episode = taskset.environment(task)
        assert isinstance(episode, ServiceDialogue)
        assert asyncio.run(played(episode, turns)) == verdicts[-1], task.data["id"]
    assert verdicts[::3] == [True] * 8 and False in verdicts


async def played(episode: ServiceDialogue, turns: list[list[str]]) -> bool:
    await episode.reset()
    for calls in turns:
        if calls:
            made = tuple(read_call(text, episode.services) for text in calls)
            step = await episode.step(Message("assistant", "", tool_calls=made, id="r"))
        step = await episode.step(Message("assistant", "Done.", id="d"))
        if step.terminated:
            break
    assert step.terminated
    return step.metrics["success"] == 1.0


def test_functions_come_later_and_forks_have_services_of_their_own() -> None:
    taskset, tasks = tasks_of("multi_turn_miss_func")
    task = next(task for task in tasks if task.data["id"] == "multi_turn_miss_func_0")

    async def run() -> None:
        episode = taskset.environment(task)
        first = await episode.reset()
        names = {spec.name for spec in first.tools}
        assert "cd" in names and "post_tweet" in names and "sort" not in names
        assert said(first).startswith("Move 'final_report.pdf' within document directory")
        twin = await episode.fork(1)
        step = await twin.step(call("cd", folder="document"))
        assert said(step) == '{"current_working_directory": "document"}'
        assert said(await episode.step(call("cd", folder="nowhere"))).startswith('{"error"')
        assert said(await episode.step(call("pwd"))) != said(await twin.step(call("pwd")))
        assert said(await episode.step(call("no_such"))) == "Error: there is no function no_such"
        assert said(await episode.step(call("cd", where=1))).startswith("Error during execution: ")
        assert (await episode.step(Message("assistant", "Done."))).metrics == {
            "success": 0.0,
            "turns_right": 0.0,
        }

    asyncio.run(run())


def test_too_many_replies_with_calls_end_a_task() -> None:
    pytest.importorskip("bfcl_eval", reason="needs bfcl-eval: pip install --no-deps bfcl-eval mpmath")
    taskset = Bfcl(categories=("multi_turn_base",), eval_share=1.0, max_steps=2).taskset()
    task = next(task for task in taskset.tasks("eval") if task.data["id"] == "multi_turn_base_0")

    async def run() -> list[bool]:
        episode = taskset.environment(task)
        await episode.reset()
        return [(await episode.step(call("pwd"))).truncated for _ in range(3)]

    assert asyncio.run(run()) == [False, False, True]
