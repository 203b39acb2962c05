"""The run's folder: new, refused, overwritten, resumed, finished; locked; never someone else's files."""

import errno
import json
import os
import signal
import subprocess
import sys

import pytest

from silva.errors import LedgerError, RunFolderError
from silva.ports import Files, use_files
from silva.storage.ledger import Ledger
from silva.storage.run_folder import LOCK, RunFolder

CONFIG = {"name": "r", "steps": 5, "environments": [{"type": "bandit", "size": 4}], "betas": [0.9, 0.95]}


def frozen(old, new):
    """All but `steps` may not change."""
    changed = [] if old["environments"] == new["environments"] else ["environments.0.size"]
    changed += [key for key in ("name", "betas", "model") if old.get(key) != new.get(key)]
    return dict.fromkeys(changed, "")


def start(path, resume=False, overwrite=False, **changes):
    config = CONFIG | changes
    return RunFolder.open(path, resume=resume, overwrite=overwrite, config=config, may_change=frozen)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "runs" / "r"


def trained(path, steps, finished=False):
    """A run that did `steps` steps and has a checkpoint of the first."""
    with start(path) as run:
        ledger = Ledger.create(run.ledger)
        run.save_config('name = "r"\n', CONFIG)
        ledger.record("published", version=1)
        ledger.commit()
        run.metrics.write_text("".join(f'{{"step": {step}}}\n' for step in range(1, steps + 1)))
        (run.checkpoints / "step_1").mkdir(parents=True)
        (run.checkpoints / "step_1" / "weights").write_text("w")
        if finished:
            run.summary.write_text(json.dumps({"steps": steps}))


def test_a_new_run_makes_its_folder_and_names_its_files(path):
    with start(path) as run:
        assert (run.state, run.notes) == ("new", [])
        run.save_config('name = "r"\n', CONFIG | {"betas": (0.9, 0.95), "model": None})
        assert os.listdir(path) and run.config_toml.read_text() == 'name = "r"\n'
        assert json.loads(run.config_json.read_text()) == CONFIG | {"model": None, "(files)": {}}


def test_an_empty_folder_is_as_good_as_none(path):
    path.mkdir(parents=True)
    with start(path) as run:
        assert run.state == "new"


def test_an_earlier_run_is_not_touched_without_a_flag(path):
    trained(path, 3)
    before = sorted(path.rglob("*"))
    with pytest.raises(RunFolderError) as caught:
        start(path)
    assert str(caught.value) == (
        f"{path} holds a run already (step 3 was its last, newest checkpoint step_1). Add --resume to go on "
        "with it, --overwrite to remove it and start again, or choose another --name."
    )
    assert sorted(path.rglob("*")) == before
    with open(path / "metrics.jsonl", "a") as file:
        file.write('{"step": 4')  # torn: does not count
    with pytest.raises(RunFolderError, match="step 3 was its last"):
        start(path)


def test_how_far_a_run_came_is_said_for_each_kind(path):
    trained(path, 5, finished=True)
    with pytest.raises(RunFolderError, match=r"\(finished, 5 steps\)"):
        start(path)
    (path / "summary.json").unlink()
    (path / "metrics.jsonl").unlink()
    (path / "checkpoints").rename(path / "elsewhere")
    with pytest.raises(RunFolderError, match=r"\(no step done, no checkpoint\)"):
        start(path)


def content(path):
    return {
        str(f.relative_to(path)): f.read_bytes() for f in path.rglob("*") if f.is_file() and f.name != LOCK
    }


def test_overwrite_removes_the_earlier_run_once_the_new_one_has_begun(path):
    trained(path, 3)
    with start(path, overwrite=True) as run:
        assert run.state == "new"
        assert run.notes == [f"{path} holds an earlier run: it is removed when the first step is done"]
        assert not run.ledger.exists() and not run.checkpoints.exists()
        run.save_config("new", CONFIG)
        run.begun()
        assert sorted(os.listdir(path)) == [LOCK, "config.json", "config.toml"]
        assert run.restore() == ""
    assert run.config_toml.read_text() == "new"
    with start(path / "other", overwrite=True) as run:
        assert run.state == "new" and run.notes == []
        run.begun()


def test_overwrite_puts_the_earlier_run_back_if_the_new_one_never_began(path):
    trained(path, 3)
    before = content(path)
    with start(path, overwrite=True) as run:
        run.save_config("new", CONFIG)
        run.log.write_text("no such model")
        assert run.restore() == f"{path}: the earlier run is back, since the new one did not begin"
        assert content(path) == before
    with pytest.raises(OSError, match="the model"), start(path, overwrite=True) as run:
        raise OSError("the model cannot be read")
    assert content(path) == before


def test_an_overwrite_that_was_killed_before_it_began_is_undone(path):
    trained(path, 3)
    before = content(path)
    run = start(path, overwrite=True)
    run.save_config("new", CONFIG)
    run._lock.close()  # as the system does when the process is killed
    with pytest.raises(RunFolderError, match=r"\(step 3 was its last, newest checkpoint step_1; it is back"):
        start(path)
    assert content(path) == before
    start(path, overwrite=True)._lock.close()
    with start(path, resume=True) as run:
        assert (run.state, content(path)) == ("resumed", before)
        assert run.notes == [f"{path}: the earlier run is back, since the one to replace it had not begun"]


def test_an_earlier_run_that_cannot_be_put_back_is_kept_aside(path):
    class Broken(Files):
        def rename(self, source, target):
            raise OSError(errno.EIO, "Input/output error")

    trained(path, 3)
    before = content(path)
    run = start(path, overwrite=True)
    with use_files(Broken()):
        assert run.restore() == (
            f"{path}: the earlier run could not be put back (Input/output error). It is not lost: the next "
            "start in this folder puts it back."
        )
    run.close()
    with start(path, resume=True):
        assert content(path) == before


@pytest.mark.parametrize("theirs", ["thesis.tex", "other_run/ledger.jsonl", ".a.tmp-0a1b.tex"])
def test_overwrite_leaves_a_folder_alone_that_holds_more_than_a_run(path, theirs):
    """As `runs/` itself: an empty name made it the folder of a run, and every run below was deleted."""
    trained(path, 3)
    (path / theirs).parent.mkdir(exist_ok=True)
    (path / theirs).write_text("precious")
    (path / ".config.toml.tmp-0a1b").write_text("of a write that was killed")
    before = content(path)
    with pytest.raises(RunFolderError) as caught:
        start(path, overwrite=True)
    assert str(caught.value) == (
        f"{path} holds more than a run of Silva ({theirs.partition('/')[0]}), so --overwrite leaves it "
        "alone: move that away, or choose another --name or --output_dir."
    )
    assert content(path) == before


@pytest.mark.parametrize("flags", [{}, {"resume": True}, {"overwrite": True}])
def test_a_folder_that_is_no_run_is_left_alone(path, flags):
    path.mkdir(parents=True)
    (path / "config.toml").write_text("# of some other program")
    with pytest.raises(RunFolderError, match=r"not a run of Silva .* so it is left alone"):
        start(path, **flags)
    assert os.listdir(path) == ["config.toml"]


def test_both_flags_are_refused(path):
    with pytest.raises(RunFolderError, match="got both, expected one"):
        start(path, resume=True, overwrite=True)
    assert not path.exists()


def test_a_run_is_resumed_with_its_own_configuration_and_more_steps(path):
    trained(path, 3)
    (path / ".config.toml.tmp-1234").write_text("killed before its rename")
    for steps in (5, 9):
        with start(path, resume=True, steps=steps, betas=(0.9, 0.95)) as run:
            assert (run.state, run.notes) == ("resumed", [])
    assert not (path / ".config.toml.tmp-1234").exists()
    assert (path / "checkpoints/step_1/weights").read_text() == "w"


def test_keys_that_may_not_change_are_named_with_both_values(path):
    trained(path, 3)
    with pytest.raises(RunFolderError) as caught:
        start(path, resume=True, environments=[{"type": "bandit", "size": 8}], model="tiny")
    assert str(caught.value) == (
        f"cannot resume {path}: these keys may not change in a run:\n"
        "  environments.0.size: was 4, now 8\n"
        '  model: was not set, now "tiny"\n'
        "Put them back, or choose another --name."
    )
    start(path, resume=True).close()  # the refusal gave the lock back


def test_resume_without_the_ledger_refuses(path):
    trained(path, 3)
    (path / "ledger.jsonl").unlink()
    with pytest.raises(LedgerError, match=r"ledger\.jsonl is missing"):
        start(path, resume=True)


@pytest.mark.parametrize("damage", [lambda file: file.unlink(), lambda file: file.write_text('{"steps"')])
def test_resume_without_its_configuration_refuses(path, damage):
    trained(path, 3)
    damage(path / "config.json")
    with pytest.raises(RunFolderError, match=r"config\.json is missing or damaged"):
        start(path, resume=True)


def test_resume_before_the_first_checkpoint_starts_again_with_a_note(path):
    with start(path) as run:
        ledger = Ledger.create(run.ledger)
        run.save_config("", CONFIG)
        ledger.record("published", version=1)
        ledger.commit()
    with start(path, resume=True) as run:
        assert run.state == "resumed"
        assert run.notes == [f"{path} has no checkpoint yet: its steps are done again from the first"]


@pytest.mark.parametrize("names", [(), ("config.toml",), ("config.toml", "config.json", "ledger.jsonl")])
def test_resume_of_a_run_killed_before_its_first_event_is_a_new_run(path, names):
    start(path).close()
    for name in names:
        (path / name).write_text("")
    with start(path, resume=True) as run:
        assert run.state == "new"
        assert run.notes == [f"{path} has done nothing yet: starting from the beginning"]
        assert Ledger.create(run.ledger).position == 0


def test_a_finished_run_is_finished_unless_steps_were_raised(path):
    trained(path, 5, finished=True)
    for steps in (5, 4):
        with start(path, resume=True, steps=steps) as run:
            assert run.state == "finished"
            assert run.notes == [f"{path} has finished (5 steps); raise steps to go on"]
    with start(path, resume=True, steps=6) as run:
        assert run.state == "resumed"


def test_a_key_that_may_not_change_says_why(path):
    def fixed(old, new):
        return {"steps": "a schedule ends with them"} if old["steps"] != new["steps"] else {}

    def resume(steps):
        config = CONFIG | {"steps": steps}
        return RunFolder.open(path, resume=True, overwrite=False, config=config, may_change=fixed)

    trained(path, CONFIG["steps"], finished=True)
    with pytest.raises(RunFolderError, match=r"steps: was 5, now 6 \(a schedule ends with them\)"):
        resume(6)
    with resume(5) as run:
        assert run.notes == [f"{path} has finished (5 steps)"]  # no word of raising them


def test_two_processes_cannot_use_one_run(path):
    with start(path):
        for flags in ({}, {"resume": True}, {"overwrite": True}):
            with pytest.raises(RunFolderError, match=f"in use by process {os.getpid()}"):
                start(path, **flags)
        (path / LOCK).write_text("?")
        with pytest.raises(RunFolderError, match="in use by process unknown"):
            start(path)
    start(path).close()


def test_the_lock_of_a_killed_process_does_not_hold(path):
    code = (
        "import sys; from pathlib import Path\n"
        "from silva.storage.run_folder import RunFolder\n"
        "run = RunFolder.open(Path(sys.argv[1]), resume=False, overwrite=False, config={},\n"
        "                        may_change=lambda old, new: {})\n"
        "print('locked', flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout.readline() == b"locked\n"
        with pytest.raises(RunFolderError, match=f"in use by process {child.pid}"):
            start(path)
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate()
    with start(path) as run:
        assert run.state == "new" and (path / LOCK).read_text() == f"{os.getpid()}\n"


def test_a_file_in_the_folders_place_or_above_it_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "r"):
        with pytest.raises(
            RunFolderError, match=f"{path} cannot be a run's folder: there is a file in its place"
        ):
            start(path)


def test_a_folder_that_cannot_be_written_is_named(path, monkeypatch):
    def denied(*args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(
        type(path), "mkdir", denied
    )  # root may write anywhere, so the mode would prove nothing
    with pytest.raises(RunFolderError, match=f"{path} cannot be written: Permission denied"):
        start(path)


def test_other_files_than_those_it_began_with_are_named_and_refused(path):
    def begin(files, resume=False):
        return RunFolder.open(
            path, resume=resume, overwrite=False, config=CONFIG, may_change=frozen, files=files
        )

    before = {"/d/rows.jsonl": "9 bytes, sha256 a", "/d/gone.py": "1 bytes, sha256 b", "/d/same": "2 bytes"}
    with begin(before) as run:
        Ledger.create(run.ledger)
        run.save_config('name = "r"\n', CONFIG)
        run.metrics.write_text('{"step": 1}\n')
    with begin(before, resume=True) as run:
        assert run.state == "resumed"
    now = {"/d/rows.jsonl": "12 bytes, sha256 c", "/d/new.py": "3 bytes, sha256 d", "/d/same": "2 bytes"}
    with pytest.raises(RunFolderError) as caught:
        begin(now, resume=True)
    assert str(caught.value) == (
        f"cannot resume {path}: files that its configuration points at have changed:\n"
        "  /d/gone.py: was 1 bytes, sha256 b, now not there\n"
        "  /d/new.py: was not there, now 3 bytes, sha256 d\n"
        "  /d/rows.jsonl: was 9 bytes, sha256 a, now 12 bytes, sha256 c\n"
        "Put them back, choose another --name, or add --accept-files to go on with them as they are now; the "
        "ledger records the change."
    )
    many = {f"/d/{i:02}": "1 bytes" for i in range(12)}
    with pytest.raises(RunFolderError, match=r"/d/09: was not there.*\n  and 2 more\n"):
        begin(before | many, resume=True)
