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


def issued(work, step):
    return Record(0, "issued", {"work": work, "task": "t", "environment": "w", "step": step, "attempt": 0})


def dropped(group):
    return Record(0, "dropped", {"group": group, "reason": "late"})


def unseal(records, group):
    return [r for r in records if not (r.event == "sealed" and group in r.fields["groups"])]


# By kind: the event where it is planted, the records in its place, and what the audit says. `r` is that
# record, and `g` the first of its groups; events of groups are passed over where they have none.
PLANTED = {
    "trained twice": ("trained", lambda r, g: [r, change(r, groups=[g])], "trained twice"),
    "sealed unissued": ("sealed", lambda r, g: [change(r, work="never issued")],
                        "work never issued sealed after nothing, expected after issued"),
    "sealed twice": ("sealed", lambda r, g: [r, r], "sealed twice"),
    "issued twice": ("issued", lambda r, g: [r, r], "issued after it was issued, expected once"),
    "dropped and trained": ("trained", lambda r, g: [dropped(g), r], "trained after dropped, expected after"),
    "trained and dropped": ("trained", lambda r, g: [r, dropped(g)], "dropped after trained, expected after"),
    "skipped": ("trained", lambda r, g: [change(r, groups=r.fields["groups"][1:])], "was skipped: sealed"),
    "version skipped": ("published", lambda r, g: [change(r, version=r.fields["version"] + 1)],
                        "published version"),
    "rewards misaligned": (
        "sealed",
        lambda r, g: [change(r, groups={**r.fields["groups"], g: {**RESULT, "rewards": [1.0]}})],
        "got 1 rewards, expected 2",
    ),
    "group of two works": (
        "sealed", lambda r, g: [r, issued("other", 1), change(r, work="other")], "sealed twice"
    ),
}  # fmt: skip
OF_ALL = {  # these change other records too
    "trained unsealed": (unseal, "trained after nothing, expected after sealed"),
    "work skipped": (lambda records, group: [issued("slow", 0), *records],
                     "work slow was skipped: issued, then training went on to what was issued later"),
}  # fmt: skip


def planted(kind, records):
    """The records with one violation, for each place where there is one to plant."""
    for index, r in enumerate(records):
        group = next(iter(r.fields.get("groups", ())), None)
        if kind in OF_ALL and r.event == "trained" and group:
            yield OF_ALL[kind][0](records, group)
        there = r.fields.get("version") != 1 and (group or "groups" not in r.fields)
        if kind in PLANTED and r.event == PLANTED[kind][0] and there:
            yield [*records[:index], *PLANTED[kind][1](r, group), *records[index + 1 :]]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*PLANTED, *OF_ALL])
def test_planted_violations_are_found(tmp_path_factory, kind):
    count, said = 0, (PLANTED | OF_ALL)[kind][-1]

    @settings(random_runs, max_examples=15, database=None)
    @given(st.data())
    def check(data):
        nonlocal count
        path = tmp_path_factory.mktemp("run") / "ledger.jsonl"
        run_with_crashes(path, data.draw, steps=3, crashes=data.draw(st.integers(0, 1)))
        for version in planted(kind, renumber(history(read(path)))):
            count += 1
            assert any(said in problem for problem in audit(renumber(version), finished=True))

    check()
    assert count >= 10


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
