"""Reading rows: what is in the files, and where a wrong row is."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from silva.data.row_shapes import recognised
from silva.data.rows import read_rows
from silva.errors import ConfigError

ROWS = [{"question": "2 + 2?", "answer": "4"}, {"question": 'a, "b"\nc?', "answer": "é"}]


def write(folder: Path, name: str) -> Path:
    path = folder / name
    if path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(row) for row in ROWS) + "\n\n")
    elif path.suffix == ".json":
        path.write_text(json.dumps(ROWS, indent=1))
    elif path.suffix in (".csv", ".tsv"):
        mark = "," if path.suffix == ".csv" else "\t"
        path.write_text(f'question{mark}answer\n2 + 2?{mark}4\n"a, ""b""\nc?"{mark}é\n')
    else:
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    return path


@pytest.mark.parametrize(
    "name, second",
    [
        ("rows.jsonl", "rows.jsonl:2"),
        ("rows.json", "rows.json: row 2"),
        ("rows.csv", "rows.csv:4"),
        ("rows.tsv", "rows.tsv:4"),
        ("rows.parquet", "rows.parquet: row 2"),
    ],
)
def test_every_format_gives_the_same_rows(tmp_path, name, second):
    found = list(read_rows(str(write(tmp_path, name))))
    assert [row.values for row in found] == ROWS
    assert found[1].where == f"{tmp_path}/{second}"


def test_a_folder_is_its_files_in_order_of_their_names(tmp_path):
    for name in ("b.jsonl", "a.jsonl"):
        (tmp_path / name).write_text(json.dumps({"file": name}))
    (tmp_path / "README.md").write_text("no rows")
    assert [row.values["file"] for row in read_rows(str(tmp_path))] == ["a.jsonl", "b.jsonl"]


def test_an_object_with_one_list_is_that_list(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"version": 1, "data": ROWS}))
    assert [row.values for row in read_rows(str(path))] == ROWS


def test_control_characters_in_strings_are_read(tmp_path):
    r"""Published rows hold 0x08 where \boxed was meant: as an escape, and as the byte itself."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "\\boxed{4}"}\n{"prompt": "\x08oxed{4}"}\n')
    assert [row.values["prompt"] for row in read_rows(str(path))] == ["\x08oxed{4}"] * 2


def test_parquet_gives_plain_json(tmp_path):
    import datetime

    path = tmp_path / "rows.parquet"
    row = {
        "list": [1, 2],
        "nested": {"ground_truth": "4"},
        "nan": float("nan"),
        "day": datetime.date(2026, 1, 2),
    }
    pq.write_table(pa.Table.from_pylist([row]), path)
    (found,) = read_rows(str(path))
    assert found.values == {"list": [1, 2], "nested": {"ground_truth": "4"}, "nan": None, "day": "2026-01-02"}
    json.dumps(found.values, allow_nan=False)


@pytest.mark.parametrize(
    "name, data, error",
    [
        ("a.jsonl", b'{"a": 1}\n{"a": }\n', "a.jsonl:2: not JSON: Expecting value, column 7"),
        ("a.jsonl", b'{"a": 1}\n[1]\n', "a.jsonl:2: got list, expected an object with named values"),
        ("a.jsonl", b'{"a": NaN}',
         "a.jsonl:1: not JSON: NaN is no JSON number"),
        ("a.jsonl", b'{"a": "\xff"}', "a.jsonl: not UTF-8 at byte 7"),
        ("a.json", b'[{"a": 1},\n 2]', "a.json: row 2: got int, expected an object with named values"),
        ("a.json", b'[{"a": 1},\n {"a"]', "a.json: not JSON: Expecting ':' delimiter, line 2, column 6"),
        ("a.json", b'{"x": [], "y": []}',
         "a.json: expected a list of rows, or an object with one list; got an object with 'x', 'y'"),
        ("a.json", b'"x"', "a.json: got str, expected a list of rows"),
        ("a.csv", b"a,b\n1,2\n1\n", "a.csv:3: got 1 cells, expected 2 as in the first line"),
        ("a.csv", b"a,b\n1,2,3\n", "a.csv:2: got 3 cells, expected 2 as in the first line"),
        ("a.csv", b'a,b\n1,"2\n', "a.csv:2: unexpected end of data"),
        ("a.csv", b"a,b,a\n1,2,3\n", "a.csv:1: several columns are called 'a'"),
        ("a.jsonl", b'{"a": 1e999}', "a.jsonl:1: not JSON: 1e999 is too large for a number"),
        ("a.jsonl", b"[" * 5000, "a.jsonl:1: objects or lists are nested too deeply to be read"),
        ("a.parquet", b"PAR1 no", "a.parquet: not a parquet file: "),
        ("a.txt", b"x",
         "a.txt: got a file that ends with '.txt', expected .jsonl, .ndjson, .json, .csv, .tsv, .parquet"),
    ],
)  # fmt: skip
def test_a_wrong_row_is_named_by_file_and_line(tmp_path, name, data, error):
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(ConfigError) as refused:
        list(read_rows(str(path)))
    assert str(refused.value).startswith(f"{tmp_path}/{error}")


def test_columns_that_json_cannot_hold_are_left_out_and_named_if_they_are_needed(tmp_path):
    path = tmp_path / "rows.parquet"
    rows = [
        {"question": "How much?", "answer": Decimal(text), "images": [{"bytes": b"\x89", "path": "a.png"}]}
        for text in ("72.00", "1.25")
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    first, second = read_rows(str(path))
    assert dict(first.values) == {"question": "How much?", "answer": 72}
    assert first.left_out == {"images": "bytes"}
    assert second.values["answer"] == 1.25 and json.dumps(second.values)
    for key in ("images", "images.0.bytes"):
        with pytest.raises(ConfigError, match=rf"row 1: {key} holds bytes, expected text, numbers, lists"):
            recognised(first, key)


def test_what_is_not_there(tmp_path):
    for source in ("nothing.jsonl", "data/nothing.jsonl"):
        with pytest.raises(ConfigError) as refused:
            list(read_rows(source))
        assert str(refused.value) == f"{source}: no such file or folder, and no hub id (owner/name)"
    with pytest.raises(ConfigError, match=r"no file in this folder ends with \.jsonl"):
        list(read_rows(str(tmp_path)))


def test_the_hub_says_what_to_do_without_it(monkeypatch):
    """Without the package, and with one whose network is down."""
    import sys
    import types

    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"needs the package datasets: pip install 'silva\[hub\]'"):
        list(read_rows("openai/gsm8k"))

    offline = types.ModuleType("datasets")

    def load_dataset(name: str, subset: str | None, split: str) -> None:
        assert (name, subset, split) == ("openai/gsm8k", "main", "test")
        raise ConnectionError("no route to host\nmore")

    offline.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", offline)
    with pytest.raises(ConfigError) as refused:
        list(read_rows("openai/gsm8k", split="test", subset="main"))
    assert str(refused.value) == (
        "openai/gsm8k: the hub gave no data (ConnectionError: no route to host). Without a network, run "
        "`huggingface-cli download openai/gsm8k --repo-type dataset --local-dir data` where there is one, "
        "and set `path` to a file in that folder."
    )
