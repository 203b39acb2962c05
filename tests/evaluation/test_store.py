"""The folder of an evaluation: what is kept of it, when it goes on, and when it is refused."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from silva.errors import RecordError, RunFolderError
from silva.evaluation import store
from silva.evaluation.evaluator import Job
from silva.evaluation.store import EvalFolder, free_name
from silva.ports import FILES, FaultyFiles, use_files
from silva.storage.rollouts import read_rollouts
from silva.types import Segment, Task, Trajectory, Turn

THIS = {"seed": 1, "eval": {"tasks": 4}, "engine": {"model": "m", "max_cost": 1.0}, "tasks": "abc"}
JOBS = [Job("lake", Task(f"t{i}", "lake", i, {}), sample) for i in range(2) for sample in range(2)]


def episode(job: Job, **more) -> Trajectory:
    nan = float("nan")
    policy = Segment("policy", (3, 4), (-0.1, nan), (-0.2, -1e-30), (0.5, 0.25), (0, 0))
    turn = Turn("q", (Segment("environment", (1, 2)), policy), fresh=True)
    return Trajectory(job.id, (turn,), "terminated", rewards={"r": 0.1 + job.sample}, **more)


def opened(path: Path, this=THIS, *, overwrite: bool = False) -> EvalFolder:
    return EvalFolder.open(path, this, "seed = 1\n", overwrite=overwrite)


def keep(folder: EvalFolder, *jobs: Job, step: int = 0, spent=None) -> None:
    for job in jobs:
        folder.keep(step, job, episode(job), spent)


def test_what_is_kept_is_there_again_bit_for_bit(tmp_path: Path) -> None:
    with opened(tmp_path / "e") as folder:
        keep(folder, JOBS[2], JOBS[0])
        keep(folder, JOBS[0], step=7)
        assert (folder.missing(0, JOBS), folder.missing(7, JOBS)) == (2, 3)
        rows = folder.in_order([0, 7], JOBS)
    with opened(tmp_path / "e") as folder:
        assert repr(folder.in_order([0, 7], JOBS)) == repr(rows)  # NaN is not equal to itself
        assert [(row.step, row.trajectory.id) for row in rows] == [
            (0, "eval:t0/0"), (0, "eval:t1/0"), (7, "eval:t0/0"),
        ]  # fmt: skip
        assert not folder.finished


def test_a_line_that_was_cut_off_is_played_again_and_any_other_is_damage(tmp_path: Path) -> None:
    with opened(tmp_path / "e") as folder:
        keep(folder, *JOBS[:3])
    data = folder.journal.read_bytes()
    folder.journal.write_bytes(data[:-9])
    with opened(tmp_path / "e") as folder:
        assert folder.missing(0, JOBS) == 2
        keep(folder, JOBS[2])
    assert folder.journal.read_bytes() == data
    folder.journal.write_bytes(data[:9] + b"\n" + data)
    with pytest.raises(RecordError, match=r"journal\.jsonl:1: damaged .*--overwrite begins again"):
        opened(tmp_path / "e")


def test_the_whole_is_read_from_its_rows_and_failures_are_played_again(tmp_path: Path) -> None:
    with opened(tmp_path / "e") as folder:
        keep(folder, *JOBS[:3])
        folder.keep(0, JOBS[3], episode(JOBS[3], failure="redo", error="broken"), None)
        assert folder.missing(0, JOBS) == 1 and not folder.finished
        folder.write(folder.in_order([0], JOBS), {"name": "e"})
        assert not folder.finished
        folder.done()
        assert folder.finished
    assert [row.reason for row in read_rollouts(folder.episodes)] == ["", "", "", "broken"]
    with opened(tmp_path / "e") as folder:
        assert set(folder.known(0)) == {job.key for job in JOBS[:3]}
        keep(folder, JOBS[3])
    with opened(tmp_path / "e") as folder:
        assert folder.missing(0, JOBS) == 0 and not folder.finished  # the new row is in the journal alone
        assert [row.reason for row in folder.in_order([0], JOBS)] == [""] * 4


def test_what_was_spent_goes_on(tmp_path: Path) -> None:
    with opened(tmp_path / "e") as folder:
        keep(folder, JOBS[0], spent={"cost": 0.25})
        keep(folder, JOBS[1], spent={"cost": 0.5})
    with opened(tmp_path / "e") as folder:
        assert folder.spent == {"cost": 0.5}
        folder.write(folder.in_order([0], JOBS), {"spent": folder.spent})
        folder.done()
    with opened(tmp_path / "e") as folder:
        assert folder.spent == {"cost": 0.5}


def test_a_write_that_was_killed_leaves_nothing_behind(tmp_path: Path) -> None:
    opened(tmp_path / "e").close()
    (tmp_path / "e" / ".summary.json.tmp-4f3401d7").write_text("{")
    opened(tmp_path / "e").close()
    assert {each.name for each in (tmp_path / "e").iterdir()} == {"config.toml", "config.json", ".silva.lock"}


def test_another_evaluation_is_refused_in_words(tmp_path: Path) -> None:
    with opened(tmp_path / "e") as folder:
        keep(folder, JOBS[0])
    other = THIS | {"eval": {"tasks": 8}, "seed": 2}
    words = r"holds another evaluation: eval\.tasks was 4, is 8; seed was 1, is 2\. .*--name, or --overwrite"
    with pytest.raises(RunFolderError, match=words):
        opened(tmp_path / "e", other)
    with pytest.raises(RunFolderError, match="its tasks have other contents"):
        opened(tmp_path / "e", THIS | {"tasks": "abd"})
    with pytest.raises(RunFolderError, match=r"another evaluation: eval\.tasks was 4, is 8\. Give"):
        opened(tmp_path / "e", THIS | {"eval": {"tasks": 8}, "tasks": "abd"})
    dearer = THIS | {"engine": {"model": "m", "max_cost": 2.0}}  # says nothing about the answers
    with opened(tmp_path / "e", dearer) as folder:
        assert len(folder.rows) == 1
    newer = THIS | {"eval": {"tasks": 4, "later": 1}}
    with pytest.raises(RunFolderError, match=r"eval\.later was absent, is 1"):
        EvalFolder.open(tmp_path / "e", newer, "", overwrite=False, given=["eval.later"])
    with pytest.raises(RunFolderError, match="files was absent"):  # a file is no key of the configuration
        opened(tmp_path / "e", newer | {"files": {"rows.jsonl": "abc"}})
    opened(tmp_path / "e", newer).close()  # a key of a later version, with its default
    with opened(tmp_path / "e", other, overwrite=True) as folder:
        assert folder.rows == {} and not folder.journal.exists()


def test_a_name_is_the_first_that_is_free_or_its_own(tmp_path: Path) -> None:
    assert free_name(tmp_path, "e", THIS) == "e"
    opened(tmp_path / "e").close()
    (tmp_path / "e-2").mkdir()
    (tmp_path / "e-2" / "notes.txt").write_text("mine")
    assert free_name(tmp_path, "e", THIS) == "e"
    assert free_name(tmp_path, "e", THIS | {"seed": 2}) == "e-3"
    with pytest.raises(RunFolderError, match="e-2 is not empty and no evaluation of Silva"):
        opened(tmp_path / "e-2", overwrite=True)
    assert (tmp_path / "e-2" / "notes.txt").exists()


def test_two_processes_never_write_one(tmp_path: Path) -> None:
    with opened(tmp_path / "e"), pytest.raises(RunFolderError, match="in use by process"):
        opened(tmp_path / "e")


def test_a_place_where_nothing_can_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "evals").write_text("a file")
    with pytest.raises(RunFolderError, match="evals/e cannot be written: Not a directory"):
        opened(tmp_path / "evals" / "e")


def test_a_full_disk_keeps_what_there_was(tmp_path: Path) -> None:
    with opened(tmp_path / "e") as folder:
        keep(folder, JOBS[0])
        with use_files(FaultyFiles(1)), pytest.raises(RunFolderError, match=r"cannot be written: .* is kept"):
            keep(folder, JOBS[1])
        keep(folder, JOBS[2])
    with opened(tmp_path / "e") as folder:
        assert [row.trajectory.id for row in folder.in_order([0], JOBS)] == [JOBS[0].id, JOBS[2].id]


def test_a_finished_one_is_read_where_nothing_may_be_written(tmp_path: Path, monkeypatch) -> None:
    """And refused if anything would have to be written."""
    with opened(tmp_path / "e") as folder:
        keep(folder, *JOBS)
        folder.write(folder.in_order([0], JOBS), {"name": "e"})
        folder.done()
    with opened(tmp_path / "half") as folder:
        keep(folder, JOBS[0])
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    monkeypatch.setattr(store, "lock", refused)
    monkeypatch.setattr(FILES, "write_atomic", refused)
    with opened(tmp_path / "e") as folder:
        assert folder.read_only and folder.finished and folder.missing(0, JOBS) == 0
    with pytest.raises(RunFolderError, match=r"holds another evaluation: seed was 1, is 2"):
        opened(tmp_path / "e", THIS | {"seed": 2})
    for path, how in (("e", {"overwrite": True}), ("half", {})):
        with pytest.raises(RunFolderError, match=rf"{path} cannot be written: Read-only file system"):
            opened(tmp_path / path, **how)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def refused(*_: object) -> None:
    raise OSError(errno.EROFS, "Read-only file system")
