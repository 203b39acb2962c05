"""Rows by number are the rows that are read one after the other, and they are not held."""

from __future__ import annotations

import json
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from silva.data import indexed as module
from silva.data.indexed import indexed, shuffled
from silva.data.rows import read_rows
from silva.data.settings import GivenRows
from silva.errors import ConfigError

ROWS = [{"question": f"q{i} é\u2028", "answer": "a" * i} for i in range(7)]
LINES = [json.dumps(row, ensure_ascii=False) for row in ROWS]


def write(folder: Path) -> None:
    folder.mkdir()
    (folder / "a.jsonl").write_text("\ufeff" + "\r\n\n  \n".join(LINES) + "\n\n")
    (folder / "b.jsonl").write_text("\n".join(LINES))
    (folder / "c.json").write_text(json.dumps({"data": ROWS}))
    (folder / "d.csv").write_text("question,answer\n" + "".join(f'"q{i}\n",a\n' for i in range(7)))
    parquet.write_table(pa.Table.from_pylist(ROWS), folder / "e.parquet", row_group_size=3)
    (folder / "f.jsonl").write_text("\n")


@pytest.mark.parametrize("name", ["", "a.jsonl", "b.jsonl", "c.json", "d.csv", "e.parquet"])
@pytest.mark.parametrize("chunk", [5, 1 << 24])
def test_rows_by_number_are_those_that_are_read_in_turn(tmp_path, monkeypatch, name: str, chunk: int) -> None:
    monkeypatch.setattr(module, "CHUNK", chunk)
    write(tmp_path / "rows")
    path = str(tmp_path / "rows" / name)
    rows = indexed(GivenRows(path=path))
    assert [rows[i] for i in range(len(rows))] == list(read_rows(path))
    assert sum(rows.blocks) == len(rows) == (7 if name else 35)
    assert len(rows.blocks) == (3 if name == "e.parquet" else 1 if name else 8)


def test_inline_rows_are_a_source_too() -> None:
    rows = indexed(GivenRows(rows=tuple(ROWS)))
    assert [(rows[i].where, rows[i].values) for i in (0, 6)] == [("rows[0]", ROWS[0]), ("rows[6]", ROWS[6])]


def test_an_order_holds_each_row_once_and_blocks_together() -> None:
    for blocks in ([50], [10, 1, 0, 25, 14]):
        orders = [shuffled(blocks, seed).tolist() for seed in (1, 1, 2)]
        assert orders[0] == orders[1] != orders[2] and orders[0] != sorted(orders[0])
        assert sorted(orders[0]) == list(range(50))
    blocks_of = np.repeat(np.arange(5), [10, 1, 0, 25, 14])[orders[0]]
    assert np.count_nonzero(np.diff(blocks_of)) == 3  # three changes between four blocks
    firsts = Counter(int(shuffled([5], seed)[0]) for seed in range(1000))
    assert all(150 < firsts[i] < 250 for i in range(5))


def test_a_row_group_is_read_once_where_rows_come_in_order(tmp_path, monkeypatch) -> None:
    write(tmp_path / "rows")
    reads: list[int] = []
    own = module._row_group
    monkeypatch.setattr(module, "_row_group", lambda path, number: reads.append(number) or own(path, number))
    rows = indexed(GivenRows(path=str(tmp_path / "rows" / "e.parquet")))
    seen = [rows[i].values["answer"] for i in shuffled(rows.blocks, 5)]
    assert sorted(seen) == [row["answer"] for row in ROWS] and sorted(reads) == [0, 1, 2]


def test_rows_of_arrow_lack_the_keys_of_other_rows(tmp_path, monkeypatch) -> None:
    calls: list[dict[str, Any]] = [
        {"call": {"name": "add", "arguments": {"x": 1}}, "system": None},
        {"call": {"name": "hi", "arguments": {"to": "a"}}, "system": "S"},
    ]
    table = pa.Table.from_pylist(calls)
    assert table.to_pylist()[0]["call"]["arguments"] == {"x": 1, "to": None}
    parquet.write_table(table, tmp_path / "rows.parquet")
    rows = indexed(GivenRows(path=str(tmp_path / "rows.parquet")))
    assert [rows[i].values for i in range(2)] == calls
    monkeypatch.setattr(module, "from_hub", lambda name, split, subset: table.to_pylist())
    rows = indexed(GivenRows(hub="owner/name", split="test"))
    assert [(rows[i].where, rows[i].values) for i in range(2)] == [
        ("owner/name (test): row 1", calls[0]), ("owner/name (test): row 2", calls[1]),
    ]  # fmt: skip


def test_lines_take_eight_bytes_a_row(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 1 << 14)
    (tmp_path / "big.jsonl").write_text((json.dumps({"question": "x" * 900, "answer": "y"}) + "\n") * 5000)
    tracemalloc.start()
    rows = indexed(GivenRows(path=str(tmp_path / "big.jsonl")))
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(rows) == 5000 and held < 5000 * 8 + 20_000 and peak < 600_000  # of a file of 4.6 MB


def test_what_cannot_be_read_is_named(tmp_path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": \n[1]\n{"a": "\xff"}\n')
    rows = indexed(GivenRows(path=str(path)))
    found = []
    for i in range(4):
        try:
            rows[i]
        except ConfigError as error:
            found.append(str(error).removeprefix(str(path)))
    assert found == [
        ":2: not JSON: Expecting value, column 7",
        ":3: got list, expected an object with named values",
        ":4: not UTF-8 at byte 7",
    ]
    (tmp_path / "x.parquet").write_bytes(b"no")
    with pytest.raises(ConfigError, match=r"x\.parquet: not a parquet file"):
        indexed(GivenRows(path=str(tmp_path / "x.parquet")))


def test_the_last_row_is_whole_after_blank_lines_and_what_is_false_is_a_value(tmp_path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n\n{"a": 2}')
    assert [indexed(GivenRows(path=str(path)))[i].values for i in range(2)] == [{"a": 1}, {"a": 2}]
    table = tmp_path / "rows.parquet"
    parquet.write_table(pa.Table.from_pylist([{"a": {"x": 0, "y": False, "z": "", "n": None}}]), table)
    assert indexed(GivenRows(path=str(table)))[0].values == {"a": {"x": 0, "y": False, "z": ""}}
