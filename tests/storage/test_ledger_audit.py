"""The audit of a ledger: clean for every legal run, crashes included, and it finds each planted violation."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.storage.ledgers import RESULT, issue, one_step, seal

from silva.ports import Files, use_files
from silva.storage.ledger import Ledger, Record, audit, history, read


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.jsonl"


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
