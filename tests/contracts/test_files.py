"""The files of a run: read as they were written, or refused by name; an append loses a torn line at most.

A new file adds itself to `WHOLE` or `APPENDED`.
"""

from __future__ import annotations

import functools
import json
import math
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file, save_file
from tests.models.tiny import TINY
from tests.monitoring.fake_run import rollout
from tests.storage.test_summary import DATA
from tests.stored_models import load_weights

from silva.errors import CheckpointError, LedgerError, ModelError, RecordError, SilvaError
from silva.models.loading import load_model
from silva.models.snapshots import save_parameters, weight_folder
from silva.monitoring.trace import Trace
from silva.orchestrator.state import RunState
from silva.ports import FaultyFiles, use_files
from silva.storage import ledger, metrics
from silva.storage.checkpoints import MANIFEST, CheckpointStore, verify
from silva.storage.plain import note_machine, read_plain, write_plain
from silva.storage.rollouts import read_columns, read_rollouts, write_rollouts
from silva.storage.summary import write_summary
from silva.trainer.learner import Learner
from silva.trainer.settings import LocalTrainerSettings
from silva.types import WeightFolder

ROWS = [rollout(3, i, random.Random(i), 0.5) for i in range(2)]
STATE = RunState(step=2, ledger=7, parts={"in_flight": []}, eval_before=[{"mean": 0.5}])


@dataclass(frozen=True)
class Whole:
    """`write` puts the file, or the folder whose file `name` is damaged, at a path; `read` gives its content.

    `hashed`: one flipped bit is noticed.
    """

    write: Callable[[Path], object]
    read: Callable[[Path], Any]
    error: type[SilvaError]
    expected: Any = None  # None: that nothing is raised is all there is to see
    name: str = ""
    hashed: bool = False


def checkpoint(path: Path) -> None:
    store = CheckpointStore(path.parent / "checkpoints")
    files = {"state.json": STATE.encode(), "trainer/weights": bytes(range(64))}
    shutil.copytree(store.save(2, files, {"ledger": 7}), path)


@functools.cache
def learner(seed: int = 0) -> Learner:
    return Learner(load_model(TINY, seed=seed), LocalTrainerSettings(), seed=0, reference=True, critic=True)


def weights(path: Path) -> None:
    save_parameters(learner().loaded, path)
    write_plain(path.parent / "digest.json", [weight_folder(path).digest])


def arrived(path: Path) -> list[float]:
    (digest,) = read_plain(path.parent / "digest.json", list)
    load_weights(learner(5).loaded, WeightFolder(str(path), digest))
    return learner(5).loaded.model.get_parameter("model.norm.weight").tolist()  # type: ignore[no-any-return]


TRAINER = {
    f"trainer/{name}": Whole(lambda path: learner().save(path), lambda path: learner(5).load(path),
                             CheckpointError, name=name)
    for name in ("weights.safetensors", "optimizer.safetensors", "rng.safetensors", "trainer.json",
                 "reference.safetensors", "critic/weights.safetensors", "critic/trainer.json")
}  # fmt: skip
CHECKPOINT = {
    name: Whole(checkpoint, verify, CheckpointError, name=name, hashed=True)
    for name in (MANIFEST, "state.json", "trainer/weights")
}
PLAIN = {"a": [1, None], "(files)": {}}
WHOLE = {
    "config.json": Whole(lambda path: write_plain(path, PLAIN), read_plain, RecordError, PLAIN),
    "summary.json": Whole(
        lambda path: write_summary(path, DATA), lambda path: read_plain(path)["steps"], RecordError, 4
    ),
    "rollouts": Whole(lambda path: write_rollouts(path, ROWS), read_rollouts, RecordError, ROWS),
    "columns of rollouts": Whole(
        lambda path: write_rollouts(path, ROWS),
        lambda path: [row["task"] for row in read_columns(path, ["task"])],
        RecordError,
        [row.task for row in ROWS],
    ),
    "state of a run": Whole(
        lambda path: path.write_bytes(STATE.encode()),
        lambda path: RunState.decode(path.read_bytes()),
        CheckpointError,
        STATE,
    ),
    "weights": Whole(
        weights,
        arrived,
        ModelError,
        [1.0] * 16,
        "model.safetensors",
        hashed=True,
    ),
    **{f"checkpoint/{name}": kind for name, kind in CHECKPOINT.items()},
    **TRAINER,
}


@pytest.fixture(params=WHOLE)
def kind(request: pytest.FixtureRequest) -> Whole:
    return WHOLE[request.param]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "step_2"


def test_what_was_written_is_read(kind: Whole, path: Path) -> None:
    kind.write(path)
    found = kind.read(path)
    assert kind.expected is None or found == kind.expected


@pytest.mark.slow
def test_cut_anywhere_empty_or_of_another_kind_it_is_refused_by_name(kind: Whole, path: Path) -> None:
    kind.write(path)
    file = path / kind.name if kind.name else path
    whole = file.read_bytes()
    cuts = [whole[: len(whole) * place // 20] for place in range(20)]
    if file.suffix == ".json" or b'"' in whole[:3]:
        cuts += [b"[1, 2]", b"3", b'{"schema": 1}']
    for content in (*cuts, whole[:-2], b"\xff" * 64, b"no such format\n" * 99):
        file.write_bytes(content)
        with pytest.raises(kind.error) as caught:
            kind.read(path)
        named = "state.json" if kind.read is WHOLE["state of a run"].read else str(path)
        assert named in str(caught.value), content[:20]
    file.write_bytes(whole)
    kind.read(path)


def test_a_missing_file_and_one_that_cannot_be_read_are_named(kind: Whole, path: Path) -> None:
    if kind.read is WHOLE["state of a run"].read:
        return  # its checkpoint has looked at it before
    kind.write(path)
    file = path / kind.name if kind.name else path
    file.unlink()
    with pytest.raises((kind.error, FileNotFoundError), match=str(path)):
        kind.read(path)
    file.mkdir()
    with pytest.raises(kind.error, match=str(path)):
        kind.read(path)


@pytest.mark.parametrize("name", [name for name, kind in WHOLE.items() if kind.hashed])
def test_one_flipped_bit_is_noticed(name: str, path: Path) -> None:
    kind, generator = WHOLE[name], random.Random(name)
    kind.write(path)
    file = path / kind.name
    whole = file.read_bytes()
    for place in (0, len(whole) - 1, *(generator.randrange(len(whole)) for _ in range(20))):
        broken = bytearray(whole)
        broken[place] ^= 1 << generator.randrange(8)
        file.write_bytes(broken)
        with pytest.raises(kind.error, match=str(path)):
            kind.read(path)


def edited(file: Path, old: str, new: str) -> None:
    file.write_text(file.read_text().replace(old, new))


def less(file: Path) -> None:
    pq.write_table(pq.read_table(file).drop_columns(["episode", "turns"]), file)


def of_another_silva(folder: Path) -> None:
    file = folder / "model.safetensors"
    save_file(load_file(file), file, metadata={"silva_base": json.dumps({"version of Silva": "0.0.1"})})
    write_plain(folder.parent / "digest.json", [weight_folder(folder).digest])


@pytest.mark.parametrize(
    ("name", "age", "words"),
    [
        ("checkpoint/" + MANIFEST, lambda path: edited(path / MANIFEST, '"schema": 1', '"schema": 2'),
         "got schema 2, expected 1"),
        ("state of a run", lambda path: edited(path, '"updates"', '"tasks"'), "another version.*has tasks"),
        ("rollouts", less, "no column episode, turns: damaged, or of another version"),
        ("columns of rollouts", lambda path: pq.write_table(pq.read_table(path).drop_columns(["task"]), path),
         "no column task"),
        ("weights", of_another_silva, "another version of Silva: got 0.0.1"),
        ("trainer/trainer.json", lambda path: edited(path / "trainer.json", '"updates"', '"count"'),
         r"trainer\.json: expected an object with"),
    ],
)  # fmt: skip
def test_another_version_is_told(name: str, age: Callable[[Path], object], words: str, path: Path) -> None:
    WHOLE[name].write(path)
    age(path)
    with pytest.raises(WHOLE[name].error, match=words):
        WHOLE[name].read(path)


@pytest.mark.parametrize("name", ["config.json", "summary.json", "rollouts"])
def test_a_full_disk_leaves_what_was_there(name: str, path: Path) -> None:
    kind = WHOLE[name]
    kind.write(path)
    with use_files(FaultyFiles(every_k=1)) as disk, pytest.raises(OSError, match="No space left"):
        kind.write(path)
    assert disk.fired == 1 and kind.read(path) == kind.expected and os.listdir(path.parent) == [path.name]


def test_a_number_that_json_has_not_is_refused_before_anything_is_written(path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_plain(path, {"reward": math.nan})
    assert not path.exists()


# What is appended to.


@dataclass(frozen=True)
class Appended:
    """`write` adds three entries to what is there, `read` gives as many as are whole."""

    write: Callable[[Path], object]
    read: Callable[[Path], int]
    middle: str  # what is said of damage to the second line; "": nothing


def three_rows(path: Path) -> None:
    last = metrics.last_step(path) or 0
    metrics.truncate_metrics(path, last)
    for step in range(last, last + 3):
        metrics.append_metrics(path, step + 1, {"reward/raw": 0.5})


def three_events(path: Path) -> None:
    made = ledger.Ledger.open(path) if path.exists() else ledger.Ledger.create(path)
    for version in range(3):
        made.record("published", version=version)
    made.commit()


def three_spans(path: Path) -> None:
    trace = Trace(path)
    for name in ("load", "rollout", "train"):
        with trace.phase(name):
            pass
    assert trace._file is not None
    trace._file._drop_file()  # as a kill does


def spans(path: Path) -> int:
    lines = path.read_text().removesuffix("\n]\n").removeprefix("[\n").split(",\n")
    return sum('"ph": "X"' in line and line.endswith("}") for line in lines)


APPENDED = {
    "metrics.jsonl": Appended(three_rows, lambda path: len(metrics.read_metrics(path)), "RecordError"),
    "ledger.jsonl": Appended(three_events, lambda path: len(ledger.read(path)), "LedgerError"),
    "trace.json": Appended(three_spans, spans, ""),
}


@pytest.mark.parametrize("name", APPENDED)
def test_the_torn_end_is_dropped_wherever_it_tears(name: str, tmp_path: Path) -> None:
    kind, path = APPENDED[name], tmp_path / name
    kind.write(path)
    data = path.read_bytes()
    last = data[:-1].rindex(b"\n") + 1
    for size in range(last + 1, len(data)):
        path.write_bytes(data[:size])
        before = kind.read(path)
        assert before == (3 if name == "trace.json" and data[:size].endswith(b"}") else 2)
        assert path.read_bytes() == data[:size]  # reading changes nothing ...
        kind.write(path)  # ... going on repairs
        assert kind.read(path) == before + 3 and path.read_bytes().startswith(data[:last].rstrip(b",\n"))


@pytest.mark.parametrize("name", [name for name, kind in APPENDED.items() if kind.middle])
def test_damage_before_the_end_is_named_with_its_line_and_nothing_is_removed(
    name: str, tmp_path: Path
) -> None:
    kind, path = APPENDED[name], tmp_path / name
    kind.write(path)
    first, second, third = path.read_bytes().splitlines(keepends=True)
    for damaged in (b"rubbish\n", b"[1]\n", b"\xff\n", second[:-9] + b"\n", second.replace(b'"', b"'", 1)):
        path.write_bytes(first + damaged + third)
        for read in (kind.read, kind.write):
            with pytest.raises((RecordError, LedgerError), match=rf"{name}:2: ") as caught:
                read(path)
            assert type(caught.value).__name__ == kind.middle
        assert path.read_bytes() == first + damaged + third


def test_a_machine_is_noted_when_it_changes_and_a_damaged_file_begins_again(tmp_path: Path) -> None:
    path, here, there = tmp_path / "machine.json", {"processor": "A", "threads": 2}, {"processor": "B"}
    assert note_machine(path, here) == note_machine(path, here) == ""
    assert note_machine(path, there).endswith("(processor was 'A', is 'B'; threads was 2, is None)")
    assert read_plain(path, list) == [here, there]
    for text in ("{", '{"processor": "A"}', ""):
        path.write_text(text)
        assert note_machine(path, here) == "" and read_plain(path, list) == [here]
