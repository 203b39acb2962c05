"""The ledger: durable batches, damage found by line, roll backs, and the audit that finds violations."""

import errno
import hashlib
import itertools
import json
import os
import struct
import subprocess
import sys
import zlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from silva.errors import LedgerError
from silva.ports import FaultyFiles, Files, use_files
from silva.storage.ledger import Ledger, Record, audit, history, read, token_digest


def issue(ledger, group, step=1, attempt=0):
    ledger.record("issued", work=group, task=group, environment="w", step=step, attempt=attempt)


RESULT = {"trajectories": ["a", "b"], "rewards": [1.0, None], "digest": "00"}


def seal(ledger, work, step=1, groups=None):
    """Work that gave one group of its name, or these."""
    names = [work] if groups is None else groups
    ledger.record("sealed", work=work, step=step, groups=dict.fromkeys(names, RESULT))


def one_step(ledger, step, groups):
    for group in groups:
        issue(ledger, group, step)
    for group in groups:
        seal(ledger, group, step)
    ledger.record("trained", step=step, update=0, groups=groups)
    ledger.record("published", version=step)
    ledger.commit()


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
        ("seald", {}, "ledger event 'seald': got , expected issued, sealed, trained"),
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


def test_a_torn_last_line_is_cut_off_wherever_it_tears(path):
    ledger = Ledger.create(path)
    one_step(ledger, 1, ["a"])
    data = path.read_bytes()
    last = data[:-1].rindex(b"\n") + 1
    for size in range(last, len(data)):
        path.write_bytes(data[:size])
        assert len(read(path)) == 3  # reading changes nothing ...
        assert path.stat().st_size == size
        assert Ledger.open(path).position == 3  # ... going on repairs
        assert path.read_bytes() == data[:last]


def test_every_flipped_bit_in_the_middle_is_found_with_its_line(path):
    ledger = Ledger.create(path)
    one_step(ledger, 1, ["a", "b"])
    data = path.read_bytes()
    last = data[:-1].rindex(b"\n") + 1
    for place, bit in itertools.product(range(0, last, 7), (0, 5)):
        broken = bytearray(data)
        broken[place] ^= 1 << bit
        path.write_bytes(broken)
        number = data[:place].count(b"\n") + 1
        with pytest.raises(LedgerError, match=rf"ledger\.jsonl:{number}: damaged line"):
            Ledger.open(path)


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
    with pytest.raises(LedgerError, match="seq 4 to 8 were undone by an earlier roll back"):
        ledger.roll_back(6, step=2)
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


# --- random legal runs, crashes and restarts included -------------------------------------------------


class Unsynced(Files):
    """Nothing here pulls the plug, so these runs need not wait for the disk."""

    def fsync(self, path):
        pass

    def fsync_dir(self, path):
        pass


def run_with_crashes(path, draw, steps, crashes):
    """A tiny run: work of no group or several, drops, two updates a step, a checkpoint now and then; killed
    `crashes` times."""
    with use_files(Unsynced()):
        _run_with_crashes(path, draw, steps, crashes)


def _run_with_crashes(path, draw, steps, crashes):
    saved = [(0, 0)]  # (step, ledger position) of the checkpoint
    ledger = Ledger.create(path)
    for life in range(crashes + 1):
        budget = draw(st.integers(0, 25 * steps)) if life < crashes else None
        try:
            live(ledger, draw, saved, steps, budget)
            return
        except InterruptedError:
            ledger = Ledger.open(path)
            ledger.roll_back(saved[-1][1], saved[-1][0])


def live(ledger, draw, saved, steps, budget):
    def tick():
        nonlocal budget
        if budget is not None:
            budget -= 1
            if budget < 0:
                raise InterruptedError

    for step in range(saved[-1][0] + 1, steps + 1):
        works = [f"{step}/{index}" for index in range(draw(st.integers(1, 4)))]
        for work in works:
            issue(ledger, work, step)
        ledger.commit()
        tick()
        kept = []
        for work in works:
            groups = [f"{work}.{turn}" for turn in range(draw(st.integers(0, 3)))]
            seal(ledger, work, step, groups)
            for group in groups:
                if draw(st.booleans()):
                    ledger.record("dropped", group=group, reason="zero variance")
                else:
                    kept.append(group)
            if draw(st.booleans()):
                ledger.commit()
                tick()
        for update, part in enumerate((kept[::2], kept[1::2])):
            ledger.record("trained", step=step, update=update, groups=part)
            ledger.commit()
            tick()
        ledger.record("published", version=step)
        ledger.commit()
        tick()
        if draw(st.booleans()):
            saved.append((step, ledger.position))
            ledger.record("checkpoint", step=step, position=saved[-1][1])
            ledger.commit()
            tick()


random_runs = settings(max_examples=40, deadline=None, derandomize=True,
                       suppress_health_check=[HealthCheck.too_slow])  # fmt: skip


@random_runs
@given(st.data())
def test_random_runs_with_crashes_audit_clean(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("run") / "ledger.jsonl"
    steps, crashes = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 3))
    run_with_crashes(path, data.draw, steps, crashes)
    records = read(path)
    assert audit(records, finished=True) == []
    effective = history(records)
    trained = [
        group for record in effective if record.event == "trained" for group in record.fields["groups"]
    ]
    dropped = [record.fields["group"] for record in effective if record.event == "dropped"]
    sealed = [group for record in effective if record.event == "sealed" for group in record.fields["groups"]]
    assert sorted(trained + dropped) == sorted(sealed)  # each exactly once


def renumber(records):
    return [Record(seq, record.event, record.fields) for seq, record in enumerate(records)]


def change(record, **fields):
    return Record(record.seq, record.event, {**record.fields, **fields})


def plant(kind, records, index):
    """The records with one violation, or None where `index` offers no place for it."""
    record = records[index]
    before, after = records[:index], records[index + 1 :]
    is_trained = record.event == "trained" and record.fields["groups"]
    if kind == "trained twice" and is_trained:
        return [*before, record, change(record, groups=record.fields["groups"][:1]), *after]
    if kind == "trained unsealed" and is_trained:
        group = record.fields["groups"][0]
        return [r for r in records if not (r.event == "sealed" and group in r.fields["groups"])]
    if kind == "sealed unissued" and record.event == "sealed":
        return [*before, change(record, work="never issued"), *after]
    if kind == "sealed twice" and record.event == "sealed":
        return [*before, record, record, *after]
    if kind == "issued twice" and record.event == "issued":
        return [*before, record, record, *after]
    if kind == "dropped and trained" and is_trained:
        dropped = Record(0, "dropped", {"group": record.fields["groups"][0], "reason": "late"})
        return [*before, dropped, record, *after]
    if kind == "trained and dropped" and is_trained:
        dropped = Record(0, "dropped", {"group": record.fields["groups"][0], "reason": "late"})
        return [*before, record, dropped, *after]
    if kind == "skipped" and is_trained:
        return [*before, change(record, groups=record.fields["groups"][1:]), *after]
    if kind == "version skipped" and record.event == "published" and record.fields["version"] > 1:
        return [*before, change(record, version=record.fields["version"] + 1), *after]
    if kind == "rewards misaligned" and record.event == "sealed" and record.fields["groups"]:
        (group, *_) = record.fields["groups"]
        wrong = {**record.fields["groups"], group: {**RESULT, "rewards": [1.0]}}
        return [*before, change(record, groups=wrong), *after]
    if kind == "group of two works" and record.event == "sealed" and record.fields["groups"]:
        other = Record(
            0, "issued", {"work": "other", "task": "t", "environment": "w", "step": 1, "attempt": 0}
        )
        return [*before, record, other, change(record, work="other"), *after]
    if kind == "work skipped" and is_trained:
        work = Record(0, "issued", {"work": "slow", "task": "t", "environment": "w", "step": 0, "attempt": 0})
        return [work, *records]
    return None


EXPECTED = {
    "trained twice": "trained twice",
    "trained unsealed": "trained after nothing, expected after sealed",
    "sealed unissued": "work never issued sealed after nothing, expected after issued",
    "sealed twice": "sealed twice",
    "issued twice": "issued after it was issued, expected once",
    "dropped and trained": "trained after dropped, expected after sealed",
    "trained and dropped": "dropped after trained, expected after sealed",
    "skipped": "was skipped: sealed, then",
    "work skipped": "work slow was skipped: issued, then training went on to what was issued later",
    "version skipped": "published version",
    "rewards misaligned": "got 1 rewards, expected 2",
    "group of two works": "sealed twice",
}


@pytest.mark.parametrize("kind", EXPECTED)
def test_planted_violations_are_found(tmp_path_factory, kind):
    planted = 0

    @settings(random_runs, max_examples=15, database=None)
    @given(st.data())
    def check(data):
        nonlocal planted
        path = tmp_path_factory.mktemp("run") / "ledger.jsonl"
        run_with_crashes(path, data.draw, steps=3, crashes=data.draw(st.integers(0, 1)))
        records = renumber(history(read(path)))
        broken = [plant(kind, records, index) for index in range(len(records))]
        for version in broken:
            if version is not None:
                planted += 1
                problems = audit(renumber(version), finished=True)
                assert any(part in problem for problem in problems for part in EXPECTED[kind].split("|"))

    check()
    assert planted >= 10


def test_work_lost_in_a_rolled_back_past_is_found(path):
    """The bug of a data cursor that runs ahead: after the restart the work is not issued again."""
    ledger = Ledger.create(path)
    one_step(ledger, 1, ["a"])
    saved = ledger.position
    issue(ledger, "b", step=2)
    issue(ledger, "c", step=2)
    ledger.commit()
    ledger.roll_back(saved + 1, step=1)  # "b" stays issued, "c" never was
    one_step(ledger, 3, ["d"])
    assert audit(read(path)) == [
        "seq 10: published version 3, expected 2",
        "work b was skipped: issued, then training went on to what was issued later",
    ]


def test_a_sealed_group_that_training_went_past_is_found_before_the_run_ends(path):
    ledger = Ledger.create(path)
    for work in ("a", "b"):
        issue(ledger, work, step=1)
        seal(ledger, work, step=1)
    ledger.record("trained", step=1, update=0, groups=["a"])
    ledger.commit()
    assert audit(read(path)) == []  # another update of the step may still train it
    one_step(ledger, 2, ["c"])
    assert audit(read(path)) == ["group b of step 1 was skipped: sealed, then training went on to step 2"]


def test_work_in_flight_is_issued_again_after_a_restart_and_only_then(path):
    ledger = Ledger.create(path)
    one_step(ledger, 1, ["a"])
    issue(ledger, "b", step=1)
    saved = ledger.position
    issue(ledger, "b", step=1)
    ledger.commit()
    assert audit(read(path)) == [
        "seq 5: work b issued after it was issued, expected once, or again after a restart"
    ]
    ledger.roll_back(saved, step=1)
    one_step(ledger, 2, ["b"])
    assert audit(read(path), finished=True) == []


def test_work_in_flight_is_fine_until_the_run_has_finished(path):
    ledger = Ledger.create(path)
    one_step(ledger, 1, ["a"])
    issue(ledger, "b", step=2)
    ledger.commit()
    assert audit(read(path)) == []
    assert audit(read(path), finished=True) == ["work b was skipped: issued, then the run has finished"]
