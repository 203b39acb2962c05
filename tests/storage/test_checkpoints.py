"""Checkpoints: damage refused by name, kills and full disks survived, old ones pruned last."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from silva.errors import CheckpointError, PartLost
from silva.ports import FILES, FaultyFiles, use_files
from silva.storage.checkpoints import MANIFEST, CheckpointStore, verify


def files(step):
    """What a trainer would give: tensors written by a callable, a folder of files, plain bytes."""

    def folder(path):
        path.mkdir()
        (path / "a.json").write_text(f'{{"step": {step}}}')
        (path / "b.txt").write_text("b" * 50)

    weights = {"w": np.full(20, step, np.float32)}
    return {
        "model.safetensors": lambda path: save_file(weights, path),
        "state": folder,
        "rng/state.bin": bytes(range(64)),
    }


NAMES = ["model.safetensors", "state/a.json", "state/b.txt", "rng/state.bin", MANIFEST]


def save(store, step):
    return store.save(step, files(step), {"ledger": 10 * step, "lr": 1e-5})


def holds(path, step):
    """The content itself, read without the store's help."""
    weights = load_file(path / "model.safetensors")["w"].tolist() == [step] * 20
    return weights and json.loads((path / "state/a.json").read_text()) == {"step": step}


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "checkpoints", keep=2)


def names(store):
    return sorted(os.listdir(store.directory))


def test_a_saved_checkpoint_is_found_with_its_meta_and_files(store):
    assert store.newest() is None and store.best() is None
    path = save(store, 3)
    assert store.newest() == (3, path) and path == store.directory / "step_3"
    manifest = verify(path)
    assert manifest.step == 3 and manifest.meta == {"ledger": 30, "lr": 1e-5}
    assert sorted(manifest.files) == sorted(NAMES[:-1])
    assert manifest.files["state/b.txt"][0] == 50
    # sha256 of the bytes 0..63
    digest = "fdeab9acf3710362bd2658cdc9a29e8f9c757fcf9811603a8c447cd1d9151108"
    assert manifest.files["rng/state.bin"] == (64, digest)
    assert holds(path, 3)
    assert (store.directory / "latest").read_text() == "step_3\n"
    assert names(store) == ["latest", "step_3"]


def test_steps_are_ordered_as_numbers_and_the_last_ones_kept(store):
    for step in (9, 10, 100):
        save(store, step)
    assert store.steps() == [10, 100]
    assert store.newest() == (100, store.path(100))


def test_the_best_stays_until_another_is_better(store):
    save(store, 1)
    store.mark_best(1)
    for step in (2, 3, 4):
        save(store, step)
    assert store.steps() == [1, 3, 4] and store.best() == (1, store.path(1))
    store.mark_best(4)
    save(store, 5)
    assert store.steps() == [4, 5]
    with pytest.raises(CheckpointError, match="cannot mark step 9 as best: no checkpoint at"):
        store.mark_best(9)
    (store.directory / "best").write_bytes(b"\xff")
    assert store.best() is None


def test_the_same_step_saved_again_replaces_the_old_one(store):
    save(store, 1)
    store.save(1, {"other": b"new"}, {})
    assert store.newest() == (1, store.path(1))
    assert sorted(os.listdir(store.path(1))) == [MANIFEST, "other"]
    assert names(store) == ["latest", "step_1"]


def test_an_old_checkpoint_that_stepped_aside_for_nothing_has_its_name_back(store):
    save(store, 1)
    store.path(1).rename(store.directory / "old-step_1")  # killed between the two renames
    assert store.newest() is None
    assert CheckpointStore(store.directory).newest() == (1, store.path(1))


def test_later_checkpoints_of_a_rolled_back_history_go(store):
    """Step 3 is damaged, so the run went back to 2: it must never be picked up, nor push 2 out."""
    for step in (2, 3):
        save(store, step)
    store.mark_best(3)
    (store.path(3) / "rng/state.bin").write_bytes(b"")
    single = CheckpointStore(store.directory, keep=1)
    assert single.newest() == (2, store.path(2))
    save(single, 2)
    assert single.steps() == [2] and single.newest() == (2, store.path(2))


@pytest.mark.parametrize("name", NAMES)
def test_a_damaged_checkpoint_is_passed_over_with_the_reason(store, name):
    """Which damage is seen: tests/contracts/test_files.py."""
    save(store, 1)
    file = save(store, 2) / name
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    assert store.newest() == (1, store.path(1)) and len(store.skipped) == 1
    assert store.skipped[0].startswith(f"checkpoint of step 2 is not used: {file}: ")
    size = f"got {len(whole) - 1} bytes, expected {len(whole)}: torn or altered"
    assert name == MANIFEST or size in store.skipped[0]
    file.write_bytes(whole)
    assert store.newest() == (2, store.path(2)) and store.skipped == []


def test_a_copy_under_another_step_is_refused(store):
    save(store, 2).rename(store.path(7))
    with pytest.raises(CheckpointError, match="step_7: its manifest says step 2"):
        verify(store.path(7))


@pytest.mark.parametrize("name", ["", "/etc/x", "../x", "a/../../x", MANIFEST])
def test_file_names_that_leave_the_folder_are_refused(store, name):
    with pytest.raises(CheckpointError, match="got the file name"):
        store.save(1, {name: b""}, {})
    assert names(store) == []


def test_what_cannot_be_saved_leaves_nothing(store):
    with pytest.raises(CheckpointError, match="expected plain JSON, no NaN"):
        store.save(1, {"a": b""}, {"loss": float("nan")})
    with pytest.raises(CheckpointError, match="'a': its writer wrote nothing"):
        store.save(1, {"a": lambda path: None}, {})
    with pytest.raises(ZeroDivisionError):  # a bug in a writer is not dressed up as a full disk
        store.save(1, {"a": lambda path: 1 / 0}, {})
    with pytest.raises(CheckpointError, match="got step -1"):
        store.save(-1, {}, {})
    with pytest.raises(CheckpointError, match="got 0, expected 1 or more"):
        CheckpointStore(store.directory, keep=0)
    assert names(store) == []


def test_a_reader_touches_nothing(store):
    save(store, 1)
    (store.directory / "tmp-step_2-abcd").mkdir()  # the writer is at work
    reader = CheckpointStore(store.directory, read_only=True)
    assert reader.newest() == (1, store.path(1))
    with pytest.raises(CheckpointError, match="opened for reading only"):
        save(reader, 2)
    assert "tmp-step_2-abcd" in names(store)
    CheckpointStore(store.directory)  # the next writer cleans up
    assert names(store) == ["latest", "step_1"]
    assert CheckpointStore(store.directory / "none", read_only=True).newest() is None


def test_a_file_in_the_folders_place_is_named(tmp_path):
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot use the checkpoint folder .*checkpoints"):
        CheckpointStore(tmp_path / "checkpoints")


class Order(FaultyFiles):
    """A disk without faults that remembers what was renamed, synced and removed."""

    def __init__(self):
        super().__init__(every_k=10**9)
        self.calls = []

    def fsync(self, path):
        self.calls.append(f"fsync {path.name}")
        super().fsync(path)

    def fsync_dir(self, path):
        self.calls.append(f"fsync_dir {path.name}")
        super().fsync_dir(path)

    def rename(self, source, target):
        self.calls.append(f"rename {target.name}")
        super().rename(source, target)


def test_everything_is_durable_before_its_name_and_pruning_comes_last(store):
    save(store, 1)
    save(store, 2)
    with use_files(Order()) as disk:
        store.save(3, {"a": b"1", "b": b"2"}, {})
    calls = [call.split("-")[0] if "tmp-" in call else call for call in disk.calls]
    assert calls == ["fsync a", "fsync b", f"fsync {MANIFEST}", "fsync_dir tmp", "rename step_3",
                     "fsync_dir checkpoints", "fsync .latest.tmp", "rename latest",
                     "fsync_dir checkpoints", "rename tmp"]  # fmt: skip
    assert store.steps() == [2, 3]


SAVES = """
import sys
from pathlib import Path
from silva.storage.checkpoints import CheckpointStore
store = CheckpointStore(Path(sys.argv[1]), keep=1)
for step in (1, 2, 3):
    store.save(step, {"a": bytes([step]) * 100, "b": b"second"}, {"step": step})
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("checkpoint_file:3", 1),
        ("checkpoint_file:4", 1),
        ("rename:2", 1),
        ("latest:2", 2),  # durable, though the hint still names step 1
        ("prune:2", 2),
    ],
)
def test_killed_at_each_point_of_a_save_the_store_is_readable(tmp_path, setting, expected):
    folder, proof = tmp_path / "checkpoints", tmp_path / "proof"
    env = {**os.environ, "SILVA_CRASH": setting, "SILVA_CRASH_PROOF": str(proof)}
    done = subprocess.run([sys.executable, "-c", SAVES, str(folder)], env=env)
    assert done.returncode == -9
    assert proof.read_text() == setting.split(":")[0]
    assert CheckpointStore(folder, read_only=True).newest() == (expected, folder / f"step_{expected}")
    store = CheckpointStore(folder, keep=1)
    assert store.newest() == (expected, folder / f"step_{expected}") and store.skipped == []
    assert (store.path(expected) / "a").read_bytes() == bytes([expected]) * 100
    store.save(3, {"a": b"3"}, {})
    assert names(store) == ["latest", "step_3"]


def test_a_disk_full_at_every_kth_operation_never_gives_a_wrong_load(tmp_path):
    """k = 1 fails all, larger k one operation of the save after another, until none is left to fail."""
    for k in range(1, 100):
        folder = tmp_path / str(k)
        store = CheckpointStore(folder, keep=2)
        for step in (1, 2):
            save(store, step)
        with use_files(FaultyFiles(every_k=k)) as disk:
            try:
                save(store, 2 + k % 2)  # a new step, or the same one again
                message = None
            except CheckpointError as error:
                message = str(error)
                assert error.__cause__.errno == errno.ENOSPC
        assert (message is not None) == (disk.fired > 0)
        assert message is None or (str(folder) in message and "No space left" in message)
        fresh = CheckpointStore(folder)
        step, path = fresh.newest()
        assert holds(path, step) and fresh.skipped == [], f"k = {k}"
        assert step in ((2, 3) if k % 2 else (2,))
        assert holds(fresh.path(2), 2)
        assert not [name for name in names(fresh) if name.startswith(("tmp-", "old-", "."))]
        if not disk.fired:
            break
    assert k > 15  # so many operations were each made to fail


def test_a_callable_that_finds_the_disk_full_is_reported_with_advice(store):
    def write(path: Path):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    save(store, 1)
    with pytest.raises(CheckpointError) as caught:
        store.save(2, {"model.safetensors": write}, {})
    message = str(caught.value)
    assert message.startswith(
        f"cannot save the checkpoint of step 2 in {store.directory}: [Errno 28] No space"
    )
    assert message.endswith("Earlier checkpoints are untouched; free some space, then --resume.")
    assert names(store) == ["latest", "step_1"]


def test_pruning_killed_half_way_never_looks_like_damage(store, monkeypatch):
    for step in (1, 2):
        save(store, step)

    def interrupted(path):
        (path / MANIFEST).unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(FILES.port, "remove_tree", interrupted)  # type: ignore[attr-defined]
        save(store, 3)
    assert names(store)[:3] == ["latest", "step_2", "step_3"]
    assert names(store)[3].startswith("tmp-pruned-step_1-")
    fresh = CheckpointStore(store.directory)
    assert fresh.steps() == [2, 3] and fresh.newest() == (3, store.path(3)) and fresh.skipped == []


def test_a_trainer_that_is_lost_while_it_saves_is_no_fault_of_the_disk(tmp_path: Path) -> None:
    """So that the run goes on from the checkpoint before, as after any other call to a lost trainer."""

    def lost(_: Path) -> None:
        raise PartLost("the trainer is gone (while it was asked to save)")

    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    before = store.save(1, {"a": lambda path: path.write_bytes(b"1")}, {})
    with pytest.raises(PartLost, match=r"^the trainer is gone \(while it was asked to save\)$"):
        store.save(2, {"a": lost}, {})
    assert [path.name for path in store.directory.glob("*step_*")] == [before.name]
    verify(before)
