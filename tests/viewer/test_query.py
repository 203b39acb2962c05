"""Lists of rollouts: the same as Python makes of the rows, page by page."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from silva.errors import ConfigError, RecordError
from silva.storage.rollouts import RolloutRow, read_rollouts, rollouts_in, write_rollouts
from silva.viewer.pages import Pages
from silva.viewer.query import SORTS, Query

RUN = "runs/walk/seed_0"


@pytest.fixture(scope="module")
def files(folder: Path) -> dict[int, Path]:
    return rollouts_in(folder / "walk" / "seed_0" / "rollouts")


@pytest.fixture(scope="module")
def rows(files: dict[int, Path]) -> list[RolloutRow]:
    return [row for path in files.values() for row in read_rollouts(path)]


@pytest.fixture(scope="module")
def query() -> Query:
    return Query()


def every(query: Query, files: dict[int, Path], **asked: Any) -> list[dict[str, Any]]:
    found, after = [], ()
    while True:
        page = query.page(files, after=after, **asked)
        found += page["rows"]
        if not (after := page["next"]):
            return found


def ids(found: list[dict[str, Any]]) -> list[str]:
    return [row["trajectory"] for row in found]


@pytest.mark.parametrize("limit", [1, 7, 100])
def test_pages_follow_on_one_another_without_a_gap(
    query: Query, files: dict[int, Path], rows: list[RolloutRow], limit: int
) -> None:
    found = every(query, files, limit=limit)
    assert sorted(ids(found)) == sorted(row.trajectory.id for row in rows)
    assert all((-a["step"], a["at"]) < (-b["step"], b["at"]) for a, b in pairwise(found)), (
        "the newest step first, in the order of its file"
    )


@pytest.mark.parametrize("sort", [f"{sign}{name}" for name in SORTS for sign in ("", "-")])
def test_each_order_has_every_row_once_and_missing_values_last(
    query: Query, files: dict[int, Path], rows: list[RolloutRow], sort: str
) -> None:
    found = every(query, files, sort=sort, limit=50)
    assert sorted(ids(found)) == sorted(row.trajectory.id for row in rows)
    name = sort.removeprefix("-")
    if name in found[0]:
        values = [row[name] for row in found]
        known = [value for value in values if value is not None]
        assert known == sorted(known, reverse=sort.startswith("-"))
        assert values == known + [None] * (len(values) - len(known))


def wanted(row: RolloutRow) -> bool:
    calls = sum(len(turn.messages[-1].tool_calls) for turn in row.trajectory.turns)
    said = " ".join(m.content for turn in row.trajectory.turns for m in turn.messages)
    return row.trajectory.raw_reward < 0.5 and calls > 0 and "calculator" in said


def test_a_filter_reads_rewards_calls_and_text(
    query: Query, files: dict[int, Path], rows: list[RolloutRow]
) -> None:
    asked = 'reward < 0.5 and tool_calls > 0 and "calculator" in text'
    expected = sorted(row.trajectory.id for row in rows if wanted(row))
    assert expected and sorted(ids(every(query, files, filter=asked, limit=9))) == expected
    assert query.count([*files.values()], asked)["count"] == len(expected)


def test_rewards_have_names(query: Query, files: dict[int, Path], rows: list[RolloutRow]) -> None:
    expected = sorted(row.trajectory.id for row in rows if row.trajectory.rewards.get("correct") == 1)
    assert expected and sorted(ids(every(query, files, filter="rewards.correct == 1"))) == expected


def test_groups_and_kinds_of_errors_count_what_is_there(pages: Pages, rows: list[RolloutRow]) -> None:
    step = [row for row in rows if row.step == 6]
    groups = pages.answer("groups", {"run": [RUN], "step": ["6"]})["rows"]
    assert {g["group"]: g["rollouts"] for g in groups} == {
        group: sum(row.group == group for row in step) for group in {row.group for row in step}
    }
    kinds = pages.answer("outcomes", {"run": [RUN]})["rows"]
    failed = [row for row in rows if row.trajectory.failure]
    assert [(k["what"], k["count"]) for k in kinds if k["what"] == "failed"] == [("failed", len(failed))]
    assert next(k for k in kinds if k["kind"] == "max_turns")["about"] == "it reached the limit of turns"
    dropped = [row for row in rows if row.status == "dropped"]
    assert [(k["kind"], k["count"]) for k in kinds if k["what"] == "dropped"] == [
        ("zero_variance", len(dropped))
    ]


def test_what_is_stale_says_how_old_it_is_and_has_a_filter(pages: Pages, rows: list[RolloutRow]) -> None:
    kinds = pages.answer("outcomes", {"run": [RUN]})["rows"]
    stale = {k["kind"]: k for k in kinds if k["what"] == "stale"}

    def age_of(row: RolloutRow) -> int:
        assert row.version is not None
        return row.version - min(v for t in row.trajectory.turns for s in t.segments for v in s.versions)

    trained = [row for row in rows if row.status == "trained" and row.trajectory.stop_reason == "terminated"]
    for kind, age in (("1 version behind", 1), ("2 versions behind", 2)):
        found = [row for row in trained if age_of(row) == age]
        assert stale[kind]["count"] == len(found) > 0 and stale[kind]["about"].startswith("its oldest token")
        asked = f'staleness == {age} and status == "trained" and not truncated'
        assert pages.answer("count", {"run": [RUN], "filter": [asked]})["count"] == len(found)
        newest = {"run": [RUN], "step": [str(stale[kind]["step"])], "at": [str(stale[kind]["at"])]}
        assert pages.answer("rollout", newest)["staleness"] == age


def test_the_filters_of_the_documentation_are_understood(query: Query, files: dict[int, Path]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "viewer.md").read_text()
    filters = page.partition("## Filters\n\n```\n")[2].partition("```")[0].splitlines()
    assert len(filters) == 4
    for each in filters:
        assert query.count([files[1]], each)["count"] >= 0


@pytest.mark.parametrize("after", [[1], ["x", 1, 2], [1, "x", 2], [1, 2, None], [True, 1, 2]])
def test_a_place_that_no_page_gave_is_refused(query: Query, files: dict[int, Path], after: list[Any]) -> None:
    with pytest.raises(ConfigError, match="after: got"):
        query.page(files, after=after)


def test_an_order_that_is_no_column_is_refused(query: Query, files: dict[int, Path]) -> None:
    with pytest.raises(ConfigError, match="sort: got 'text; drop'"):
        query.page(files, sort="text; drop")


def test_a_file_that_is_written_again_is_read_again(
    query: Query, rows: list[RolloutRow], tmp_path: Path
) -> None:
    path = tmp_path / "step_1.parquet"
    for count in (3, 7, 4):
        path.unlink(missing_ok=True)
        write_rollouts(path, rows[:count])
        found = ids(query.page({1: path})["rows"])
        assert sorted(found) == sorted(row.trajectory.id for row in rows[:count])
        assert query.count([path])["count"] == count


def test_a_file_that_is_damaged_is_an_error_in_words(query: Query, tmp_path: Path) -> None:
    (tmp_path / "step_1.parquet").write_bytes(b"PAR1 nothing PAR1")
    with pytest.raises(RecordError, match="rollouts cannot be read"):
        query.page({1: tmp_path / "step_1.parquet"})
