"""Rows of many shapes become documents; documents are divided at their headings."""

from __future__ import annotations

from typing import Any

import pytest

from silva.data.documents import Document, DocumentSection, as_id, documents, documents_inside, sections
from silva.data.rows import Row
from silva.errors import ConfigError


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"id": "p1", "title": "Ems", "content": "A river."}, Document("p1", "Ems", "A river.")),
        ({"title": "Upper  Ems", "text": "x"}, Document("upper_ems", "Upper  Ems", "x")),
        ({"docid": 5412, "text": "x", "url": "u"}, Document("5412", "5412", "x")),
        (
            {"docid": "7", "text": "---\ntitle: The Ems\nauthor: A\n---\nA river."},
            Document("7", "The Ems", "---\ntitle: The Ems\nauthor: A\n---\nA river."),
        ),
        ({"id": "0", "contents": '"Ems"\nA river.'}, Document("0", "Ems", "A river.")),
    ],
    ids=["PRIME-RL", "2Wiki", "BrowseComp-Plus", "front matter", "Search-R1"],
)
def test_shapes_of_rows(values: dict[str, Any], expected: Document) -> None:
    assert documents([Row("f:1", values)]) == [expected]


def test_the_first_of_equal_ids_counts() -> None:
    rows = [Row(f"f:{i}", {"title": "Ems", "text": text}) for i, text in enumerate("ab")]
    assert documents(rows) == [Document("ems", "Ems", "a")]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"title": "Ems"}, "f:1: no text: got 'title', expected one of text, content, contents, article"),
        ({"text": "x"}, "f:1: neither a title nor an id; expected title or one of docid, id, _id, page_id"),
        ({"id": "1", "text": 3}, "f:1: no text: got 'id', 'text', expected one of"),
    ],
)
def test_a_wrong_row_is_named(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        documents([Row("f:1", values)])
    assert str(error.value).startswith(said)


def test_documents_inside_rows() -> None:
    rows = [
        Row(
            "f:1",
            {"gold_docs": [{"docid": "1", "text": "a"}], "negative_docs": [{"docid": "2", "text": "b"}]},
        ),
        Row("f:2", {"evidence_docs": [{"docid": "1", "text": "a"}], "gold_docs": None}),
        Row("f:3", {"context": {"title": ["The Ems"], "sentences": [["A river.", " Long."]]}}),
    ]
    assert documents_inside(rows) == [
        Document("1", "1", "a"), Document("2", "2", "b"), Document("the_ems", "The Ems", "A river. Long."),
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=r"f:1: gold_docs\.0: no text"):
        documents_inside([Row("f:1", {"gold_docs": [{"docid": "1"}]})])


def test_sections_begin_at_headings() -> None:
    page = Document(
        "ems", "Ems", "A river.\n\n# Course\nLong.\n## Names: old #\nAms.\n#5 is no heading\n# Course\nEnd."
    )
    assert sections(page) == [
        DocumentSection("ems:introduction", "Introduction", "A river."),
        DocumentSection("ems:course", "Course", "Long."),
        DocumentSection("ems:names:_old", "Names: old", "Ams.\n#5 is no heading"),
        DocumentSection("ems:course_2", "Course", "End."),  # repeated names stay within reach
    ]


def test_a_page_without_headings_is_one_section() -> None:
    assert sections(Document("p", "P", "a\nb")) == [DocumentSection("p:full_page", "Full page", "a\nb")]
    assert sections(Document("p", "P", "## Only\na")) == [DocumentSection("p:only", "Only", "a")]


def test_ids_are_lower_case_without_spaces() -> None:
    assert as_id("  Lumarin \n Works ") == "lumarin_works"
