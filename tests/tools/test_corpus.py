"""Documents from files: every form that is read, and what is said of a wrong row."""

from __future__ import annotations

import json

import pytest

from silva.data.documents import Document
from silva.errors import ConfigError
from silva.tools.corpus import Keys, read_documents

ROWS = [{"id": 7, "title": "T", "text": "one"}, {"text": "two"}]
READ = [Document("7", "T", "one"), Document("1", "", "two")]


def test_rows_of_every_kind_of_file(tmp_path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")
    (tmp_path / "a.json").write_text("\ufeff" + json.dumps(ROWS))
    assert read_documents(tmp_path / "a.jsonl") == read_documents(tmp_path / "a.json") == READ
    table = pa.table({"id": ["x", "y"], "title": ["T", None], "text": ["one", "two"]})
    parquet.write_table(table, tmp_path / "a.parquet")
    assert read_documents(tmp_path / "a.parquet") == [Document("x", "T", "one"), Document("y", "", "two")]


def test_other_keys(tmp_path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"docid": "d", "contents": "c", "title": "t"}\n')
    assert read_documents(path, Keys("docid", "title", "contents")) == [Document("d", "t", "c")]


def test_texts_of_a_folder(tmp_path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.md").write_text("# The heading\n\nBody.\n")
    (tmp_path / "a.txt").write_text("Just text.\n")
    (tmp_path / "ignored.csv").write_text("x")
    expected = [Document("a.txt", "a", "Just text."), Document("sub/b.md", "The heading", "Body.")]
    assert read_documents(tmp_path) == expected
    assert read_documents(tmp_path / "a.txt") == expected[:1]


def test_rows_without_ids_are_counted_over_all_files(tmp_path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text('{"text": "x"}\n{"text": "y"}\n')
    assert [document.id for document in read_documents(tmp_path)] == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"text": "x"}\n{"body": "y"}\n', "a.jsonl:2: got 'text' = None, .* its keys are 'body'"),
        ('{"text": 3}\n', "a.jsonl:1: got 'text' = 3, expected text"),
        ('{"text": "x", "id": 1.5}\n', "a.jsonl:1: got 'id' = 1.5, expected text or an integer"),
        ('{"text": "x", "title": []}\n', r"a.jsonl:1: got 'title' = \[\], expected text"),
        ('{"text": "x", "id": 1}\n{"text": "y", "id": "1"}\n', "a.jsonl:2: the id '1' is that of .*:1 too"),
    ],
)
def test_a_wrong_row_is_named(tmp_path, content, said) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=said):
        read_documents(tmp_path / "a.jsonl")


def test_a_wrong_file_is_named(tmp_path) -> None:
    (tmp_path / "a.txt").write_bytes(b"ab\xff")
    with pytest.raises(ConfigError, match=r"a\.txt: not UTF-8 at byte 2"):
        read_documents(tmp_path)
    with pytest.raises(ConfigError, match=r"got a file that ends with '\.pdf', expected \.jsonl"):
        (tmp_path / "d.pdf").write_bytes(b"")
        read_documents(tmp_path / "d.pdf")
    with pytest.raises(ConfigError, match=r"corpus .*nowhere: no such file or folder"):
        read_documents(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"no file in this folder ends with \.jsonl"):
        read_documents(tmp_path / "empty")
