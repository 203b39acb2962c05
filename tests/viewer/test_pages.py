"""What the viewer answers: one reader for each file, nothing outside the folders, and a run that goes on."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tests.monitoring.fake_run import HOSTILE, make_run, rollout

from silva.errors import ConfigError, RecordError
from silva.evaluation.over_seeds import over_seeds
from silva.monitoring.report import charts
from silva.storage.layout import Layout
from silva.storage.ledger import Ledger, read
from silva.storage.metrics import append_metrics, read_metrics
from silva.storage.rollouts import LearnedTurn, RolloutRow, rollouts_path, write_rollouts
from silva.storage.run_folder import lock
from silva.types import Segment, Trajectory, Turn
from silva.viewer.catalogue import Catalogue
from silva.viewer.pages import Pages
from silva.viewer.routes import POLICY, app_of
from silva.wire.guard import Guard
from silva.wire.listening import Bind

RUN, OTHER = "runs/walk/seed_0", "runs/walk/seed_1"


def ask(pages: Pages, *paths: str, method: str = "GET", **headers: str) -> list[httpx2.Response]:
    async def work() -> list[httpx2.Response]:
        guard = Guard(app_of(pages), Bind("127.0.0.1", 1), key="", log=lambda line: None)
        transport = httpx2.ASGITransport(app=guard)
        async with httpx2.AsyncClient(
            transport=transport, base_url="http://127.0.0.1:1", headers=headers
        ) as client:
            return [await client.request(method, path) for path in paths]

    return asyncio.run(work())


def test_runs_are_found_with_how_they_stand(pages: Pages) -> None:
    runs = pages.answer("runs", {})["runs"]
    assert {run["run"]: (run["state"], run["step"]) for run in runs} == {
        RUN: ("finished", 12),
        OTHER: ("finished", 12),
    }


def test_a_run_that_a_process_has_open_is_running_and_one_that_was_killed_is_not(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "a", steps=2)
    (run / "summary.json").unlink()
    catalogue = Catalogue([tmp_path / "runs"])
    found = catalogue.run("runs/a")
    assert catalogue.status(found)["state"] == "interrupted"
    with lock(run):
        (run / "now.json").write_text(json.dumps({"doing": "rollout 3/8", "since": time.time() - 65}))
        assert re.fullmatch(r"rollout 3/8, 1m 0\ds", catalogue.status(found)["waiting"])
        (run / "run.log").write_text(
            "2026-11-28T00:00:00+00:00 warning: nothing has moved for 40 s; stage: eval\n"
        )
        assert (catalogue.status(found)["state"], catalogue.status(found)["waiting"]) == (
            "running", "nothing has moved for 40 s; stage: eval",
        )  # fmt: skip
    assert catalogue.status(found)["state"] == "interrupted"


def test_curves_are_those_of_the_report_and_means_those_of_several_seeds(pages: Pages, folder: Path) -> None:
    rows = [read_metrics(Layout(folder / "walk" / f"seed_{seed}").metrics) for seed in (0, 1)]
    assert pages.answer("curves", {"run": [RUN]})["charts"] == charts(rows[0])
    assert pages.answer("curves", {"run": [RUN, OTHER]})["charts"] == charts(over_seeds(rows))


def test_the_difference_of_configurations_has_origins(pages: Pages) -> None:
    rows = pages.answer("diff", {"a": [RUN], "b": [OTHER]})["rows"]
    assert [(r["path"], r["a"], r["b"], r["origin_a"]) for r in rows] == [
        ("seed", 7, 8, "command line: --seed")
    ]


def test_a_group_is_its_forest_and_its_members(pages: Pages) -> None:
    (first, *_) = pages.answer("groups", {"run": [RUN], "step": ["5"]})["rows"]
    found = pages.answer("forest", {"run": [RUN], "step": ["5"], "group": [first["group"]]})
    ends = {end["trajectory"] for node in found["forest"]["nodes"] for end in node["ends"]}
    assert ends == {row["trajectory"] for row in found["members"]} and len(ends) == first["rollouts"]


def test_a_rollout_is_its_dialogue_and_its_tokens(pages: Pages) -> None:
    at = {"run": [RUN], "step": ["5"], "at": ["2"]}
    shown = pages.answer("rollout", at)
    assert shown["environment"] == "calculator" and shown["turns"][0]["messages"][1]["content"].startswith(
        "What is"
    )
    tokens = pages.answer("tokens", {**at, "turn": ["1"]})
    read, said = tokens["segments"]
    assert read["source"] == "environment" and read["logprobs"] == []
    assert "".join(said["tokens"]).startswith(shown["turns"][1]["messages"][-1]["content"])
    assert len(said["tokens"]) == len(said["logprobs"]) == len(said["entropies"]) == len(said["versions"])


def test_tokens_have_what_training_knew_of_them(tmp_path: Path, pages_of: Callable[[Path], Pages]) -> None:
    turn = Turn(
        "a",
        (
            Segment("environment", (1, 2)),
            Segment("policy", (3, 4), (-1.0, -2.0), versions=(5, 6)),
            Segment("expert", (7,)),
        ),
        fresh=True,
    )
    learned = LearnedTurn(
        "a",
        (0.5,),
        (1.0, 0.0, 1.0),
        (-1.0, -1.5, -3.0),
        {"echo": (0.0, 0.3, 0.0, 0.0, 0.0)},
        (True, False, False),
    )
    played = Trajectory("x", (turn,), "terminated", {"score": 1.0})
    row = RolloutRow(1, "t", "w", "g", played, "trained", version=7, learned=(learned,))
    run = Layout(tmp_path / "runs" / "a")
    run.rollouts.mkdir(parents=True)
    run.metrics.write_text("")
    write_rollouts(rollouts_path(run.rollouts, 1), [row])
    pages = pages_of(tmp_path / "runs")
    at = {"run": ["runs/a"], "step": ["1"]}
    read, said, expert = pages.answer("tokens", {**at, "at": ["0"]})["segments"]
    assert read["streams"] == ["", "echo"] and "advantages" not in read
    assert (said["advantages"], said["weights"], said["trainer_logprobs"]) == (
        [0.5, 0.5],
        [1, 0],
        [-1.0, -1.5],
    )
    assert said["ratios"] == [1.0, round(math.exp(0.5), 5)]
    assert (said["clipped"], expert["clipped"], "clipped" in read) == ([1, 0], [0], False)
    assert (expert["weights"], expert["trainer_logprobs"], "ratios" in expert) == ([1], [-3.0], False)
    (listed,) = pages.answer("rollouts", {**at, "filter": ["staleness == 2"]})["rows"]
    assert listed["trajectory"] == "x"
    (node,) = pages.answer("forest", {**at, "group": ["g"]})["forest"]["nodes"]
    assert node["staleness"] == 2


def test_work_that_was_thrown_away_as_too_old_has_its_reason_and_what_it_became(
    tmp_path: Path, pages_of: Callable[[Path], Pages]
) -> None:
    run = Layout(make_run(tmp_path / "runs" / "a", steps=2))
    asked = {"run": ["runs/a"]}
    ledger = Ledger.create(run.ledger)
    for work, step in (("s1g0", 1), ("s1g1", 1), ("s2g0", 2)):
        ledger.record("issued", work=work, task="t", environment="w", step=step, attempt=0)
    ledger.record("restarted", work="s1g1", version=1)
    ledger.record("sealed", work="s1g1", step=2, groups={})
    ledger.record("restarted", work="s2g0", version=2)
    ledger.commit()
    pages = pages_of(tmp_path / "runs")
    (row,) = [row for row in pages.answer("outcomes", asked)["rows"] if row["kind"] == "restarted"]
    assert (row["what"], row["count"], row["first"], row["step"], row["at"]) == ("stale", 2, 2, 2, None)
    assert row["works"] == ["s2g0", "s1g1"] and "too old to be trained" in row["about"]
    again = replace(rollout(3, 0, random.Random(0), 1.0), group="s1g1")
    write_rollouts(rollouts_path(run.rollouts, 3), [rollout(3, 1, random.Random(0), 1.0), again])
    ledger.record("sealed", work="s2g0", step=4, groups={})
    ledger.record("restarted", work="s1g1", version=3)
    ledger.record("sealed", work="s1g1", step=3, groups={})
    ledger.commit()
    (row,) = [row for row in pages.answer("outcomes", asked)["rows"] if row["kind"] == "restarted"]
    assert (row["count"], row["first"], row["step"], row["at"]) == (3, 3, 3, 1)
    assert row["about"].endswith("counts restarts (pieces of work: 2)")


def test_restarts_of_much_work_say_what_their_link_finds_and_of_thoughts_it_finds_them(
    tmp_path: Path, pages_of: Callable[[Path], Pages]
) -> None:
    run = Layout(make_run(tmp_path / "runs" / "a", steps=2))
    ledger = Ledger.create(run.ledger)
    for work in (f"s1g{i}" for i in range(81)):
        ledger.record("issued", work=work, task="t", environment="w", step=1, attempt=0)
        ledger.record("restarted", work=work, version=1)
    ledger.commit()
    thoughts = [replace(rollout(3, i, random.Random(0), 1.0), group=f"s1g80/t{i}") for i in (0, 1)]
    write_rollouts(rollouts_path(run.rollouts, 3), thoughts)
    pages, asked = pages_of(tmp_path / "runs"), {"run": ["runs/a"]}
    (row,) = [row for row in pages.answer("outcomes", asked)["rows"] if row["kind"] == "restarted"]
    assert len(row["works"]) == 80 and row["about"].endswith("finds the 80 that were restarted last")
    linked = f"work in ({', '.join(map(json.dumps, row['works']))})"  # filterOf in static/rollouts.js
    assert pages.answer("count", {**asked, "filter": [linked]})["count"] == 2


def test_a_ledger_is_read_only_for_restarts_once_a_size_and_a_damaged_one_breaks_no_page(
    tmp_path: Path, pages_of: Callable[[Path], Pages], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, read_of = Layout(make_run(tmp_path / "runs" / "a", steps=2)), list[Path]()
    monkeypatch.setattr("silva.viewer.pages.read", lambda path: [read_of.append(path), read(path)][1])
    ledger, pages = Ledger.create(run.ledger), pages_of(tmp_path / "runs")

    def kinds() -> set[str]:
        return {row["kind"] for row in pages.answer("outcomes", {"run": ["runs/a"]})["rows"]}

    ledger.record("issued", work="s1g0", task="t", environment="w", step=1, attempt=0)
    ledger.commit()
    others = kinds()
    assert "restarted" not in others and not read_of
    ledger.record("restarted", work="s1g0", version=1)
    ledger.commit()
    assert kinds() == kinds() == others | {"restarted"} and len(read_of) == 1
    run.ledger.write_bytes(run.ledger.read_bytes() + b"damaged\n")
    assert kinds() == others
    run.ledger.unlink()
    assert kinds() == others


def test_two_rollouts_of_a_task_word_by_word(pages: Pages) -> None:
    found = pages.answer("texts", {"run": [RUN], "a": ["3:2"], "b": ["9:2"]})
    assert (found["a"]["step"], found["b"]["step"]) == (3, 9)
    kinds = {part["kind"] for part in found["parts"]}
    assert "equal" in kinds and kinds - {"equal"}
    assert all(part["a"] == part["b"] for part in found["parts"] if part["kind"] == "equal")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("api/nothing", "no page 'nothing'"),
        ("api/run?run=../secret.txt", "no run '../secret.txt'"),
        ("api/run?run=/etc", "no run '/etc'"),
        (f"api/run?run={RUN}&run={OTHER}", "run: got 2 values, expected one"),
        ("api/run", "run: got 0 values"),
        (f"api/groups?run={RUN}&step=99", "no rollouts of step 99"),
        (f"api/groups?run={RUN}&step=-1", "step: got '-1', expected a whole number"),
        (f"api/rollout?run={RUN}&step=3&at=999", "at: got 999, expected 0 to 21"),
        (f"api/tokens?run={RUN}&step=3&at=0&turn=40", "turn: got 40"),
        (f"api/forest?run={RUN}&step=3&group=x", "no group 'x'"),
        (f"api/texts?run={RUN}&a=3&b=4", "a: got '3', expected STEP:ROW"),
        (f"api/rollouts?run={RUN}&after={{", "after: got '{', expected JSON"),
        (f"api/rollouts?run={RUN}&after={'[' * 5000}", "expected JSON"),
        (f"api/rollouts?run={RUN}&filter=rewrd<1", "no column rewrd; did you mean reward?"),
    ],
)  # fmt: skip
def test_what_is_not_there_is_refused_in_words(pages: Pages, path: str, said: str) -> None:
    (answer,) = ask(pages, f"/{path}")
    assert answer.status_code == 400 and said in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "path",
    ["/../pages.py", "/..%2fpages.py", "/vendor/../../pages.py", "/%2e%2e/%2e%2e/secret.txt", "//etc/passwd"],
)
def test_no_file_outside_the_front_end_is_served(pages: Pages, path: str) -> None:
    (answer,) = ask(pages, path)
    assert answer.status_code == 404 and "not for you" not in answer.text


def test_a_link_to_a_folder_elsewhere_is_not_followed(
    tmp_path: Path, pages_of: Callable[[Path], Pages]
) -> None:
    make_run(tmp_path / "elsewhere" / "b", steps=1)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "b").symlink_to(tmp_path / "elsewhere" / "b")
    assert pages_of(tmp_path / "runs").answer("runs", {})["runs"] == []


def test_it_answers_get_alone_with_a_policy_and_says_when_nothing_is_new(pages: Pages) -> None:
    first, page = ask(pages, "/api/runs", "/")
    assert first.headers["content-security-policy"] == page.headers["content-security-policy"] == POLICY
    assert (
        "unsafe" not in POLICY
        and "<script>" not in page.text
        and page.headers["x-content-type-options"] == "nosniff"
    )
    (again,) = ask(pages, "/api/runs", **{"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    for method in ("POST", "PUT", "DELETE"):
        assert ask(pages, "/api/runs", method=method)[0].status_code == 405
    assert ask(pages, "/api/runs", host="evil.example")[0].status_code == 403


def test_runs_of_one_name_in_two_folders_and_a_folder_in_a_folder_are_each_one_run(tmp_path: Path) -> None:
    folders = [tmp_path / side / "runs" for side in ("a", "b")]
    for folder in folders:
        make_run(folder / "x", steps=1)
    (folders[0] / "summary.json").write_text("{}")  # as the folder of several seeds has one
    found = Catalogue([*folders, folders[0] / "x"]).runs()
    assert {run.layout.path for run in found.values()} == {folder / "x" for folder in folders}
    assert len(found) == 2


def test_a_folder_whose_name_is_no_text_can_be_opened(
    tmp_path: Path, pages_of: Callable[[Path], Pages]
) -> None:
    make_run(tmp_path / "runs" / "a", steps=1).rename(tmp_path / "runs" / os.fsdecode(b"a\xff"))
    pages = pages_of(tmp_path / "runs")
    (run,) = pages.answer("runs", {})["runs"]
    assert run["run"] == "runs/a\\xff"
    given = {"run": [run["run"]], "step": ["1"], "at": ["0"]}
    assert pages.answer("run", given)["steps"] == [0, 1] and pages.answer("curves", given)["charts"]
    with pytest.raises(RecordError, match=r"rollouts cannot be read: .* UTF-8"):  # by duckdb
        pages.answer("rollouts", given)
    (answer,) = ask(pages, "/api/run?run=runs/a%5Cxff")
    assert answer.status_code == 200


def test_a_run_that_goes_on_is_followed(tmp_path: Path, pages_of: Callable[[Path], Pages]) -> None:
    run = Layout(make_run(tmp_path / "runs" / "a", steps=3))
    pages = pages_of(tmp_path / "runs")
    (before,) = pages.answer("runs", {})["runs"]
    append_metrics(run.metrics, 4, {"reward/raw": 0.5})
    write_rollouts(rollouts_path(run.rollouts, 4), [rollout(4, 0, random.Random(0), 1.0)])
    (after,) = pages.answer("runs", {})["runs"]
    assert (before["step"], after["step"]) == (3, 4) and before["stamp"] != after["stamp"]
    assert pages.answer("rollouts", {"run": ["runs/a"]})["rows"][0]["step"] == 4
    assert pages.answer("count", {"run": ["runs/a"]})["count"] == 3 * 16 + 4 * 6 + 1


def test_hostile_text_stays_text(pages: Pages) -> None:
    page = pages.answer("rollouts", {"run": [RUN], "filter": ["failed"]})["rows"]
    (answer,) = ask(pages, f"/api/rollout?run={RUN}&step={page[0]['step']}&at={page[0]['at']}")
    assert HOSTILE in answer.json()["error"] and answer.headers["content-type"] == "application/json"


def test_without_a_tokenizer_tokens_are_numbers(folder: Path) -> None:
    from silva.registries import REGISTRIES

    pages = Pages(Catalogue([folder]), REGISTRIES, lambda layout: None)
    found: dict[str, Any] = pages.answer("tokens", {"run": [RUN], "step": ["5"], "at": ["2"]})
    assert (
        found["text"] is False and found["segments"][0]["tokens"][0] == f"[{found['segments'][0]['ids'][0]}]"
    )


def test_a_folder_that_is_missing_is_refused() -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        Catalogue([Path("not/here")])


def test_answers_are_json_without_nan(pages: Pages) -> None:
    (answer,) = ask(pages, f"/api/curves?run={RUN}")
    found = json.loads(answer.text, parse_constant=lambda name: pytest.fail(name))
    assert [chart["title"] for chart in found["charts"]][:2] == ["Held-out success (95 % interval)", "Reward"]
