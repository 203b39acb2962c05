"""The earlier run while a new one replaces it: whole or gone after a kill at any point, never in between."""

from pathlib import Path

import pytest

from silva.ports import Files, use_files
from silva.storage import replaced

OLD = {"config.toml": "old", "ledger.jsonl": "old", "checkpoints/step_3/weights": "old", ".lock": "lock"}
KEEP = (".lock",)


class Killed(BaseException):
    pass


class Dying(Files):
    """The process dies before the `last + 1`-th rename or removal."""

    def __init__(self, last):
        self.left = last

    def _step(self):
        if self.left == 0:
            raise Killed
        self.left -= 1

    def rename(self, source, target):
        self._step()
        super().rename(source, target)

    def remove_tree(self, path):
        self._step()
        super().remove_tree(path)


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def content(folder):
    return {str(f.relative_to(folder)): f.read_text() for f in sorted(folder.rglob("*")) if f.is_file()}


def died(last, work, *arguments):
    """Whether `work` was killed."""
    try:
        with use_files(Dying(last)):
            work(*arguments)
    except Killed:
        return True
    return False


@pytest.fixture
def run(tmp_path):
    write(tmp_path, OLD)
    return tmp_path


def new_run(folder: Path, **more):
    files = {"config.toml": "new", "metrics.jsonl": "new", **more}
    write(folder, files)
    return files | {".lock": "lock"}


def test_aside_and_back(run):
    replaced.put_aside(run, KEEP)
    assert sorted(path.name for path in run.iterdir()) == [".lock", ".replaced"]
    new_run(run)
    assert replaced.recover(run, KEEP) == "restored"
    assert content(run) == OLD
    assert replaced.recover(run, KEEP) is None


def test_aside_and_removed(run):
    replaced.put_aside(run, KEEP)
    new = new_run(run)
    replaced.remove(run)
    assert content(run) == new
    assert replaced.recover(run, KEEP) is None and content(run) == new


def test_a_new_run_with_a_checkpoint_stays(run):
    replaced.put_aside(run, KEEP)
    new = new_run(run, **{"checkpoints/step_0/weights": "new"})
    assert replaced.recover(run, KEEP) == "removed"
    assert content(run) == new


def test_killed_while_it_is_put_aside(run):
    """Three entries and the last rename: four places to die at."""
    for last in range(4):
        assert died(last, replaced.put_aside, run, KEEP)
        assert replaced.recover(run, KEEP) == "restored"
        assert content(run) == OLD
    assert not died(4, replaced.put_aside, run, KEEP)


@pytest.mark.parametrize("last", range(6))
def test_killed_while_it_is_put_back(run, last):
    """Two entries of the new run to remove, the rename, three entries to move."""
    replaced.put_aside(run, KEEP)
    new_run(run)
    assert died(last, replaced.recover, run, KEEP)
    assert replaced.recover(run, KEEP) == "restored"
    assert content(run) == OLD


@pytest.mark.parametrize(("last", "found"), [(0, "restored"), (1, "removed")])
def test_killed_while_it_is_removed(run, last, found):
    """Before the rename nothing is decided, after it everything is."""
    replaced.put_aside(run, KEEP)
    new = new_run(run)
    assert died(last, replaced.remove, run)
    assert replaced.recover(run, KEEP) == found
    assert content(run) == (OLD if found == "restored" else new)
