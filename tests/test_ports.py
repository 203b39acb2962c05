"""Ports: durable writes, injected faults, counter-based randomness, crash points."""

import errno
import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest

from silva import ports
from silva.errors import ConfigError
from silva.ports import (
    CLOCK,
    FILES,
    Clock,
    FaultyFiles,
    Files,
    crash_point,
    derive,
    uniform,
    use_clock,
    use_files,
)


class Recorder(Files):
    """Remembers the order of operations."""

    def __init__(self):
        self.calls = []

    def write(self, path, data):
        self.calls.append(("write", path.name))
        super().write(path, data)

    def fsync(self, path):
        self.calls.append(("fsync", path.name))
        super().fsync(path)

    def rename(self, source, target):
        self.calls.append(("rename", target.name))
        super().rename(source, target)

    def fsync_dir(self, path):
        self.calls.append(("fsync_dir", path.name))
        super().fsync_dir(path)


def test_write_atomic_syncs_before_it_renames_and_the_folder_after(tmp_path):
    target = tmp_path / "latest"
    with use_files(Recorder()) as disk:
        FILES.write_atomic(target, b"step_1")
    temporary = disk.calls[0][1]
    assert temporary.startswith(".latest.tmp-")
    assert disk.calls == [("write", temporary), ("fsync", temporary), ("rename", "latest"),
                          ("fsync_dir", tmp_path.name)]  # fmt: skip
    assert target.read_bytes() == b"step_1"
    assert os.listdir(tmp_path) == ["latest"]


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_write_atomic_that_fails_leaves_old_or_new_content_and_no_rubbish(tmp_path, k):
    target = tmp_path / "file"
    target.write_bytes(b"old content")
    with use_files(FaultyFiles(every_k=k)) as disk, pytest.raises(OSError) as caught:
        FILES.write_atomic(target, b"new content")
    assert disk.fired == 1 and caught.value.errno == errno.ENOSPC
    # the fourth operation is the folder's fsync: the new name is there, only not yet durable
    assert target.read_bytes() == (b"new content" if k == 4 else b"old content")
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("k", [1, 2])
def test_a_failed_append_is_cut_off_again(tmp_path, k):
    target = tmp_path / "log"
    FILES.append(target, b"first\n")
    with use_files(FaultyFiles(every_k=k)) as disk, pytest.raises(OSError):
        FILES.append(target, b"second\n")
    assert disk.fired == 1
    FILES.append(target, b"third\n", sync=False)
    assert target.read_bytes() == b"first\nthird\n"


def test_faults_come_at_every_kth_operation_and_leave_half_the_data(tmp_path):
    disk = FaultyFiles(every_k=2, error=errno.EIO)
    disk.write(tmp_path / "a", b"12345678")
    with pytest.raises(OSError, match="Input/output"):
        disk.write(tmp_path / "b", b"12345678")
    disk.write(tmp_path / "c", b"12345678")
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert sizes == {"a": 8, "b": 4, "c": 8}
    assert (disk.operations, disk.fired) == (3, 1)
    with pytest.raises(ValueError, match="got 0, expected 1 or more"):
        FaultyFiles(every_k=0)


def test_a_port_is_put_back_when_its_block_ends_in_an_error(tmp_path):
    with pytest.raises(OSError), use_files(FaultyFiles(every_k=1)):
        FILES.write(tmp_path / "x", b"data")
    FILES.write(tmp_path / "x", b"data")
    assert (tmp_path / "x").read_bytes() == b"data"


def test_what_another_process_removes_at_the_same_time_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    (tmp_path / "folder" / "inner" / "file").write_text("x")
    for name in ("unlink", "rmdir"):
        before = getattr(os, name)

        def twice(*given, before=before, **named):
            before(*given, **named)
            before(*given, **named)  # raises FileNotFoundError

        monkeypatch.setattr(os, name, twice)
    FILES.remove_tree(tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def test_remove_tree_takes_folders_files_and_nothing_but_not_what_a_link_points_to(tmp_path):
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    (tmp_path / "folder" / "inner" / "file").write_bytes(b"x")
    (tmp_path / "kept").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    for name in ("folder", "link", "never there"):
        FILES.remove_tree(tmp_path / name)
    assert os.listdir(tmp_path) == ["kept"]


def test_the_clock_can_be_replaced():
    class Stopped(Clock):
        def monotonic(self):
            return 42.0

        def time(self):
            return 1e9

    before = CLOCK.monotonic()
    with use_clock(Stopped()):
        assert (CLOCK.monotonic(), CLOCK.time()) == (42.0, 1e9)
    assert CLOCK.monotonic() >= before


def _splitmix64(state, count):
    """The published generator, in plain Python integers."""
    mask, outputs = (1 << 64) - 1, []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        outputs.append(z ^ (z >> 31))
    return outputs


def test_uniform_is_splitmix64():
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert _splitmix64(1234567, 4) == known  # the published outputs for this seed
    for seed in (0, 1, 2**63, -1, 12345678901234567890123):
        start = _splitmix64(seed, 1)[0]
        expected = [(bits >> 11) / 2**53 for bits in _splitmix64(start, 50)]
        assert uniform(seed, np.arange(50)).tolist() == expected


def test_uniform_depends_on_nothing_but_seed_and_position():
    whole = uniform(7, np.arange(1000))
    picked = np.array([999, 0, 500, 500])
    assert uniform(7, picked).tolist() == whole[picked].tolist()
    assert float(uniform(7, 3)) == whole[3] and uniform(7, 3).shape == ()
    assert uniform(7, picked.reshape(2, 2)).shape == (2, 2)
    assert uniform(7, []).shape == (0,)


def test_uniform_is_uniform_and_neighbouring_seeds_are_independent():
    rows = np.stack([uniform(seed, np.arange(20_000)) for seed in range(8)])
    assert rows.min() >= 0 and rows.max() < 1
    counts = np.stack([np.histogram(row, bins=100, range=(0, 1))[0] for row in rows])
    chi2 = ((counts - 200) ** 2 / 200).sum(axis=1)
    assert (chi2 < 149).all()  # 99 degrees of freedom: 1 in 1000 lies above 148.2
    correlations = np.corrcoef(rows)[~np.eye(8, dtype=bool)]
    assert abs(correlations).max() < 4 / np.sqrt(20_000)


def test_derive_hashes_type_length_and_value_of_each_part():
    data = b"i1:7s4:taski1:3"
    expected = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") >> 1
    assert derive(7, "task", 3) == expected == 2248128356362540711
    different = {derive(0, "ab", "c"), derive(0, "a", "bc"), derive(0, "abc"), derive(0, 1), derive(0, "1"),
                 derive(1, 0), derive(0), derive(0, -1), derive(0, "é")}  # fmt: skip
    assert len(different) == 9 and all(0 <= seed < 2**63 for seed in different)
    with pytest.raises(TypeError, match="type float, expected str or int"):
        derive(0, 1.5)  # type: ignore[arg-type]


KILLED = """
from silva.ports import crash_point
for turn in range(5):
    crash_point("seal")
    print("sealed", turn, flush=True)
    crash_point("backward")
    print("backward", turn, flush=True)
"""


def _run(tmp_path, setting):
    proof = tmp_path / "proof"
    env = {**os.environ, "SILVA_CRASH": setting, "SILVA_CRASH_PROOF": str(proof)}
    done = subprocess.run([sys.executable, "-c", KILLED], env=env, capture_output=True, text=True)
    return done, proof.read_text() if proof.exists() else None


def test_a_crash_point_kills_at_the_time_named_and_leaves_proof(tmp_path):
    done, proof = _run(tmp_path, "backward:3")
    assert done.returncode == -9
    assert done.stdout.split("\n")[-2] == "sealed 2"
    assert proof == "backward"


def test_a_crash_point_that_is_never_reached_leaves_no_proof(tmp_path):
    done, proof = _run(tmp_path, "seal:6")
    assert (done.returncode, proof) == (0, None)


def test_unknown_crash_points_are_refused_by_name(tmp_path, monkeypatch):
    done, proof = _run(tmp_path, "backwards")
    assert done.returncode == 1 and proof is None
    assert (
        "SILVA_CRASH: got the crash point 'backwards', expected one of issue, seal, backward" in done.stderr
    )
    monkeypatch.setattr(ports, "_crash", "optim:0")
    with pytest.raises(ConfigError, match="SILVA_CRASH=optim:0: got count '0', expected a number from 1"):
        ports.crash_setting()
    monkeypatch.setattr(ports, "_crash", "optim")
    assert ports.crash_setting() == ("optim", 1)
    with pytest.raises(ConfigError, match="crash_point: got the crash point 'nowhere'"):
        crash_point("nowhere")
    monkeypatch.setattr(ports, "_crash", "")
    assert ports.crash_setting() is None
