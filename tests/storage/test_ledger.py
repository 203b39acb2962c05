"""The ledger: durable batches, damage found by line, roll backs, digests."""

import errno
import hashlib
import json
import os
import struct
import subprocess
import sys
import zlib

import pytest
from tests.storage.ledgers import issue, one_step

from silva.errors import LedgerError
from silva.ports import FaultyFiles, use_files
from silva.storage.ledger import Ledger, Record, audit, history, read, token_digest


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.jsonl"


def test_a_line_is_json_with_seq_event_fields_and_the_crc32_of_the_rest(path):
    ledger = Ledger.create(path)
    assert ledger.record("published", version=3) == 0
    ledger.record("dropped", group="g", reason="zero variance", step=7)
    ledger.commit()
    body = '{"seq": 0, "event": "published", "version": 3}'
    first, second = path.read_text().splitlines()
    assert first == f'{body[:-1]}, "crc": "{zlib.crc32(body.encode()):08x}"}}'
    assert json.loads(second)["step"] == 7  # more fields than needed are welcome
    assert read(path)[1] == Record(1, "dropped", {"group": "g", "reason": "zero variance", "step": 7})


def test_nothing_is_written_before_commit_and_one_append_a_batch(path):
    ledger = Ledger.create(path)
    issue(ledger, "a")
    issue(ledger, "b")
    assert path.read_bytes() == b"" and ledger.position == 2
    with use_files(FaultyFiles(every_k=100)) as disk:
        ledger.commit()
        ledger.commit()  # an empty buffer costs nothing
    assert disk.operations == 2  # one append, one fsync
    assert [record.fields["work"] for record in read(path)] == ["a", "b"]


def test_open_goes_on_where_the_last_commit_ended(path):
    ledger = Ledger.create(path)
    one_step(ledger, 1, ["a"])
    issue(ledger, "lost")  # never committed
    ledger = Ledger.open(path)
    assert ledger.position == 4
    one_step(ledger, 2, ["b"])
    assert [record.seq for record in read(path)] == list(range(8))
    assert audit(read(path), finished=True) == []


def test_create_refuses_an_existing_ledger_and_open_a_missing_one(path):
    with pytest.raises(LedgerError, match=r"no ledger at .*ledger.jsonl.*--overwrite"):
        Ledger.open(path)
    Ledger.create(path)
    with pytest.raises(LedgerError, match="there is a ledger at"):
        Ledger.create(path)


@pytest.mark.parametrize(
    ("event", "fields", "message"),
    [
        ("seald", {}, "ledger event 'seald': got , expected issued, restarted, sealed"),
        ("published", {}, "expected version"),
        ("published", {"version": 1, "crc": "0"}, "got version, crc, expected version"),
        ("published", {"version": float("nan")}, "expected plain JSON, null for NaN"),
        ("published", {"version": object()}, "expected plain JSON"),
    ],
)
def test_records_that_do_not_fit_are_refused(path, event, fields, message):
    ledger = Ledger.create(path)
    with pytest.raises(LedgerError, match=message):
        ledger.record(event, **fields)
    assert ledger.position == 0


def test_a_missing_line_is_found(path):
    ledger = Ledger.create(path)
    one_step(ledger, 1, ["a"])
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:1] + lines[2:]))
    with pytest.raises(LedgerError, match=r"ledger\.jsonl:2: got seq 2, expected 1: lines are missing"):
        Ledger.open(path)


def test_history_forgets_what_was_rolled_back(path):
    ledger = Ledger.create(path)
    one_step(ledger, 1, ["a"])
    saved = ledger.position
    one_step(ledger, 2, ["b"])
    ledger = Ledger.open(path)
    ledger.roll_back(saved, step=1)
    one_step(ledger, 2, ["b"])
    ledger = Ledger.open(path)
    ledger.roll_back(saved, step=1)
    ledger.roll_back(0, step=0)
    one_step(ledger, 1, ["a"])
    records = read(path)
    assert [record.seq for record in history(records)] == [15, 16, 17, 18]
    assert [record.fields["groups"] for record in records if record.event == "trained"] == [["a"], ["b"], ["b"], ["a"]]  # fmt: skip # noqa: E501
    assert audit(records, finished=True) == []


def test_roll_back_refuses_what_the_ledger_does_not_hold(path):
    ledger = Ledger.create(path)
    one_step(ledger, 1, ["a"])
    with pytest.raises(LedgerError, match=r"cannot roll back to seq 5 \(step 1\): expected 0 to 4"):
        ledger.roll_back(5, step=1)
    one_step(ledger, 2, ["b"])
    ledger.roll_back(4, step=1)
    ledger = Ledger.open(path)
    for undone in (6, 8):
        with pytest.raises(LedgerError, match="seq 4 to 8 were undone by an earlier roll back"):
            ledger.roll_back(undone, step=2)
    ledger.roll_back(4, step=1)
    assert ledger.position == 10


def test_a_full_disk_is_named_and_costs_nothing_that_was_committed(path):
    ledger = Ledger.create(path)
    one_step(ledger, 1, ["a"])
    before = path.read_bytes()
    for k in (1, 2):
        issue(ledger, f"late {k}")
        with (
            use_files(FaultyFiles(every_k=k)) as disk,
            pytest.raises(LedgerError, match="No space left") as caught,
        ):
            ledger.commit()
        assert disk.fired == 1 and caught.value.__cause__.errno == errno.ENOSPC
        assert path.read_bytes() == before
    ledger.commit()  # there is room again: the buffer was kept
    assert [record.fields["work"] for record in read(path)[4:]] == ["late 1", "late 2"]


def test_two_writers_are_noticed(path):
    first = Ledger.create(path)
    second = Ledger.open(path)
    one_step(second, 1, ["a"])
    issue(first, "b")
    with pytest.raises(LedgerError, match=r"got \d+ bytes, expected 0: another process wrote to it"):
        first.commit()
    assert len(read(path)) == 4


def test_killed_at_the_ledger_point_the_batch_is_durable(path, tmp_path):
    code = (
        "import sys, pathlib; from silva.storage.ledger import Ledger\n"
        "ledger = Ledger.create(pathlib.Path(sys.argv[1]))\n"
        "for version in range(3): ledger.record('published', version=version); ledger.commit()"
    )
    proof = tmp_path / "proof"
    env = {**os.environ, "SILVA_CRASH": "ledger:2", "SILVA_CRASH_PROOF": str(proof)}
    assert subprocess.run([sys.executable, "-c", code, str(path)], env=env).returncode == -9
    assert proof.read_text() == "ledger"
    assert [record.fields["version"] for record in read(path)] == [0, 1]


def test_the_digest_depends_on_every_token_and_every_bound():
    digests = [[[1, 2], [3]], [[1], [2, 3]], [[1, 2, 3]], [[1, 2], [4]], [[3], [1, 2]], []]
    assert len({token_digest(sequences) for sequences in digests}) == 6
    # each sequence: its length, then its ids, as little-endian 64-bit numbers
    packed = hashlib.blake2b(struct.pack("<QqqQq", 2, 1, 2, 1, 3), digest_size=8).hexdigest()
    assert token_digest([(1, 2), (3,)]) == token_digest([[1, 2], [3]]) == packed == "dc931137287e2d4c"
