"""Visits to the store: pages, wrong actions, the expert over all goals, files of one's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.environments.conftest import said

from silva.environments.worlds.webshop import WebShop
from silva.environments.worlds.webshop_store import made_up
from silva.errors import ConfigError
from silva.types import Step, Task

PLAIN = {"think": False, "answer_tags": False}
STORE = made_up(300, 0, 3)
GOAL = next(goal for goal in STORE.goals if STORE.wanted(goal).query == "coffee mug")
MUG = STORE.wanted(GOAL)
TASK = Task("w", "webshop", 0, GOAL._asdict())


def visit(replies_to, *actions: str, **settings: Any) -> list[Step]:
    return replies_to(WebShop(**{**PLAIN, **settings}), TASK, list(actions))


@pytest.mark.slow
def test_the_expert_reaches_the_maximum_for_every_goal_of_the_catalogue(play_out) -> None:
    taskset = WebShop(**PLAIN).taskset()
    assert len(STORE.goals) > 800
    for number, goal in enumerate(STORE.goals[::4]):
        steps = play_out(taskset.environment(Task(f"w{number}", "webshop", 0, goal._asdict())))
        assert steps[-1].rewards == {"match": 1.0} and steps[-1].metrics["success"] == 1.0
        assert steps[-1].terminated and len(steps) <= 8  # search, perhaps pages, open, two options, buy


def test_the_expert_finds_its_way_from_anywhere(play_out) -> None:
    """After six random actions, wherever they led, unless something was bought."""
    taskset, finished = WebShop(max_actions=30).taskset(), 0
    for number, task in enumerate(taskset.tasks("eval")[:30]):
        episode = taskset.environment(task)

        def reply(turn: int, e=episode, n=number) -> str:
            return e.random_reply(n) if turn < 6 else e.expert_reply()

        steps = play_out(episode, reply)
        finished += len(steps) > 6
        assert len(steps) <= 6 or steps[-1].metrics["success"] == 1.0
    assert finished >= 15


def test_the_pages_of_a_visit(replies_to) -> None:
    asin = MUG.asin.lower()
    results, item, chosen, features, back, end = visit(
        replies_to, f"search[{MUG.title}]", f"click[{asin}]", f"click[{value('color')}]",
        "click[features]", "click[< Prev]", "CLICK[Buy Now]",
    )  # fmt: skip
    lines = said(results).split("\n")
    assert lines[0].startswith("Page 1 (Total results: ") and len(lines) == 13
    assert lines[1] == f"[{asin}] {MUG.title} ${MUG.price:.2f}"
    assert lines[-2:] == ["[back to search] [next >]", "Actions left: 14."]
    colors = " ".join(f"[{each}]" for each in MUG.options["color"])
    sizes = " ".join(f"[{each}]" for each in MUG.options["size"])
    page = [MUG.title, f"Price: ${MUG.price:.2f}", f"color: {colors}", f"size: {sizes}",
            "[back to search] [< prev] [description] [features] [buy now]"]  # fmt: skip
    assert said(item).split("\n") == [*page, "Actions left: 13."]
    page[2] = f"color (chosen: {value('color')}): {colors}"
    assert said(chosen).split("\n") == [*page, "Actions left: 12."]
    assert said(features).split("\n") == [*MUG.features, "[back to search] [< prev]", "Actions left: 11."]
    assert said(back).split("\n") == [*page, "Actions left: 10."]  # the choice is kept
    assert end.rewards["match"] == pytest.approx(4 / 5) and end.metrics["success"] == 0.0
    assert end.metrics["match_options"] == 0.5 and end.metrics["match_attributes"] == 1.0


def value(name: str) -> str:
    return dict(map(tuple, GOAL.options))[name]


def test_pages_of_results_are_turned(replies_to) -> None:
    steps = visit(
        replies_to, "search[coffee mug]", "click[next >]", "click[next >]", "click[< prev]", "click[< prev]",
        page_size=5,
    )  # fmt: skip
    pages = [said(step).split("\n") for step in steps]
    total = int(pages[0][0].split(": ")[1].rstrip(")"))
    assert total == 12 and [page[0][:6] for page in pages] == [
        "Page 1", "Page 2", "Page 3", "Page 2", "Page 1",
    ]  # fmt: skip
    assert [len(page) for page in pages] == [8, 8, 5, 8, 8]
    assert pages[0][1:6] == pages[4][1:6] and not set(pages[0][1:6]) & set(pages[1][1:6])
    assert [page[-2] for page in pages[:3]] == [
        "[back to search] [next >]", "[back to search] [< prev] [next >]", "[back to search] [< prev]",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("action", "answer"),
    [
        ("buy it", "'buy it' is no action. Reply in this form: click[text]"),
        ("click[buy now]", "There is nothing called 'buy now' to click on this page."),
        ("search[ ]", "A search needs words: search[words]."),
        ("", "No action was read. Reply in this form: click[text]"),
    ],
)
def test_an_invalid_action_is_answered_and_uses_up_one(replies_to, action: str, answer: str) -> None:
    (step,) = visit(replies_to, action)
    assert said(step) == f"{answer}\nSearch page\nActions left: 14."
    assert step.shaped["format"] == -0.1 and step.rewards["match"] == 0.0
    assert step.metrics["action_is_valid"] == 0.0


def test_a_search_needs_the_search_page(replies_to) -> None:
    _, again, _, search = visit(
        replies_to, "search[mug]", "search[tea]", "click[back to search]", "search[qqq]"
    )
    assert said(again).startswith("This page has no search bar: click[back to search] first.\nPage 1 ")
    assert said(search).startswith("Page 1 (Total results: 0)\n[back to search]\n")


def test_several_actions_a_turn_stop_at_the_first_wrong_one(replies_to) -> None:
    asin = MUG.asin.lower()
    (step,) = visit(
        replies_to, f"search[{MUG.title}] || click[{asin}] || click[pink elephant] || click[buy now]",
        max_actions_per_turn=4,
    )  # fmt: skip
    assert said(step).startswith(
        f"There is nothing called 'pink elephant' to click on this page.\n{MUG.title}"
    )
    assert step.metrics == {"action_is_valid": 0.0, "action_is_effective": 1.0, "actions": 2.0}
    assert said(step).endswith("Actions left: 13.")


def test_a_visit_ends_when_its_actions_are_used_up(replies_to) -> None:
    *_, end = visit(replies_to, *["search[mug]", "click[back to search]"] * 9, max_actions=4)
    assert end.truncated and not end.terminated
    assert end.metrics["success"] == 0.0 and end.rewards["match"] == 0.0


@pytest.mark.parametrize(("partial", "reward"), [(True, 3 / 5), (False, 0.0)])
def test_partial_matches_earn_less_or_nothing(replies_to, partial: bool, reward: float) -> None:
    asin = MUG.asin.lower()
    *_, end = visit(replies_to, f"search[{MUG.title}]", f"click[{asin}]", "click[buy now]", partial=partial)
    assert end.rewards["match"] == pytest.approx(reward)
    assert end.metrics["match_score"] == pytest.approx(3 / 5)


def test_what_is_shown_first(first) -> None:
    full = first(WebShop(), TASK)
    assert full.endswith(f"\n{GOAL.instruction}.\nSearch page\nActions left: 15.")
    assert "<think>your thoughts</think><answer>click[text]</answer>" in full
    assert first(WebShop(style="compact"), TASK) == f"{GOAL.instruction}.\nSearch page\n15"
    listed = first(WebShop(style="compact", show_actions=True), TASK)
    assert listed.endswith("\nPossible actions: search[words]\n15")


def test_webshops_own_layout(replies_to) -> None:
    asin = MUG.asin.lower()
    results, item = visit(
        replies_to, f"search[{MUG.title}]", f"click[{asin}]", layout="sep", show_actions=True, page_size=1
    )
    head = f"Instruction: [SEP] {GOAL.instruction} [SEP]"
    assert said(results).startswith(f"{head} Page 1 (Total results: ")
    assert (
        f" [SEP] {MUG.asin} [SEP] {MUG.title} [SEP] ${MUG.price:.2f} [SEP] Back to Search [SEP] Next >\n"
        in (said(results))
    )
    assert f"Possible actions: click[back to search], click[next >], click[{asin}]\n" in said(results)
    options = " [SEP] ".join(["color", *MUG.options["color"], "size", *MUG.options["size"]])
    assert said(item).startswith(f"{head} {MUG.title} [SEP] Price: ${MUG.price:.2f} [SEP] {options} [SEP] ")


ITEMS = [
    {"asin": f"B{number}", "name": name, "query": "lamp", "product_category": "Home › Light › Lamps",
     "pricing": "$20.00", "small_description": ["dimmable"], "full_description": "",
     "customization_options": options}
    for number, (name, options) in enumerate([
        ("Alpha Lamp", {"shade": [{"value": "10"}], "base": [{"value": "10"}, {"value": "features"}]}),
        ("Beta Lamp", {}), ("Gamma Lamp", None), ("Delta Lamp", {}), ("Omega Lamp", {}), ("Psi Lamp", {}),
    ])
]  # fmt: skip


def write(folder: Path, **files: Any) -> dict[str, str]:
    paths = {}
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
        paths[name] = str(folder / f"{name}.json")
    return paths


def about(number: int, attribute: str = "dimmable") -> dict[str, Any]:
    said = {"instruction": f"find lamp {number}", "instruction_attributes": [attribute]}
    return {"attributes": ["dimmable"], **said}


ABOUT = {f"B{number}": about(number) for number in range(6)}
KEYS: dict[str, Any] = {"eval_size": 1, "eval_share": 0.5, **PLAIN}


def test_a_store_of_ones_own_files(tmp_path: Path, play_out) -> None:
    """The goal for B5 asks for what the product is not: it is left out."""
    files = write(tmp_path, products=ITEMS, instructions={**ABOUT, "B5": about(5, "solar")})
    taskset = WebShop(**files, **KEYS).taskset()
    tasks = [*taskset.tasks("eval"), *taskset.tasks("train")]
    assert {task.data["asin"] for task in tasks} == {"B0", "B1", "B2", "B3", "B4"}
    for task in tasks:
        assert play_out(taskset.environment(task))[-1].rewards["match"] == 1.0


def test_values_that_would_be_ambiguous_are_named_with_their_option(tmp_path: Path, replies_to) -> None:
    settings = WebShop(**write(tmp_path, products=ITEMS, instructions=ABOUT), goals_per_product=1, **KEYS)
    goal = {"asin": "B0", "instruction": "x", "attributes": ["dimmable"], "price_limit": 30.0,
            "options": [["base", "features"], ["shade", "10"]]}  # fmt: skip
    steps = replies_to(
        settings, Task("w", "webshop", 0, goal), ["search[alpha]", "click[b0]", "click[base: features]",
                                                  "click[shade: 10]", "click[buy now]"],
    )  # fmt: skip
    assert "shade: [shade: 10]\nbase: [base: 10] [base: features]\n" in said(steps[1])
    assert steps[-1].rewards["match"] == 1.0


def test_instructions_of_people_replace_the_others_and_may_say_less(tmp_path: Path, play_out) -> None:
    """ "blue" is met by "navy blue" where no blue is offered."""
    options = {"color": [{"value": "white"}, {"value": "Navy Blue"}]}
    asked = {"instruction_attributes": ["dimmable"], "instruction_options": ["blue"]}
    files = write(
        tmp_path, products=[{**item, "customization_options": options} for item in ITEMS], instructions=ABOUT,
        human_instructions={f"B{n}": [{**asked, "instruction": f"lamp {n}"}] for n in range(4)},
    )  # fmt: skip
    taskset = WebShop(**files, **KEYS).taskset()
    tasks = [*taskset.tasks("eval"), *taskset.tasks("train")]
    assert {task.data["instruction"].split(",")[0] for task in tasks} == {f"lamp {n}" for n in range(4)}
    episode: Any = taskset.environment(tasks[0])
    steps = play_out(episode)
    assert episode.view.chosen == {"color": "navy blue"} and steps[-1].rewards["match"] == 1.0


def test_files_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    files = write(tmp_path, products=ITEMS, instructions={"B0": about(0, "solar")})
    with pytest.raises(ConfigError, match="none of its 6 products has an instruction in"):
        WebShop(**files).taskset()
    with pytest.raises(ConfigError, match="no such file"):
        WebShop(products=str(tmp_path / "no.json"), instructions=files["instructions"]).taskset()
