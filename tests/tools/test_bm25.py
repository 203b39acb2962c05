"""BM25 against the formula worked by hand, and itself on disk."""

from __future__ import annotations

import json
import math
import multiprocessing
import random
import sys
from pathlib import Path

import pytest
from tests.real_rows import DATA

from silva.data.documents import Document
from silva.errors import ConfigError
from silva.tools.bm25 import Bm25, words

pytest.importorskip("bm25s", reason="needs bm25s: pip install 'silva[search]'")

ANIMALS = [
    Document("a", "", "cat dog dog"),
    Document("b", "", "cat bird"),
    Document("c", "", "fish fish fish fish"),
]


def test_scores_are_those_of_the_formula() -> None:
    """3 documents of 3, 2 and 4 words, 3 on average; "cat" is in two of them, "dog" in one, twice."""
    hits = Bm25(ANIMALS, k1=1.5, b=0.75).search("dog cat")
    cat, dog = math.log(1 + (3 - 2 + 0.5) / (2 + 0.5)), math.log(1 + (3 - 1 + 0.5) / (1 + 0.5))
    first = dog * 2 / (2 + 1.5) + cat * 1 / (1 + 1.5)  # |d| is the average
    second = cat * 1 / (1 + 1.5 * (1 - 0.75 + 0.75 * 2 / 3))
    assert [(hit.id, hit.text) for hit in hits] == [("a", "cat dog dog"), ("b", "cat bird")]
    assert [hit.score for hit in hits] == pytest.approx([first, second], rel=1e-6)
    assert first == pytest.approx(0.748475, abs=1e-6)


def by_hand(texts: list[list[str]], query: list[str], k1: float, b: float) -> list[float]:
    """The formula, document by document."""
    average = sum(map(len, texts)) / len(texts)
    scores = []
    for text in texts:
        score = 0.0
        for word in query:
            n, tf = sum(word in other for other in texts), text.count(word)
            idf = math.log(1 + (len(texts) - n + 0.5) / (n + 0.5))
            score += idf * tf / (tf + k1 * (1 - b + b * len(text) / average)) if tf else 0.0
        scores.append(score)
    return scores


@pytest.mark.slow
@pytest.mark.parametrize(("k1", "b"), [(1.5, 0.75), (0.9, 0.4), (2.0, 1.0), (0.0, 0.0)])
def test_queries_of_several_words_are_scored_by_the_formula(k1, b) -> None:
    rng = random.Random(11)
    vocabulary = [f"w{i}" for i in range(40)]
    texts = [rng.choices(vocabulary, k=rng.randint(1, 25)) for _ in range(120)]
    index = Bm25([Document(f"{i:03}", "", " ".join(text)) for i, text in enumerate(texts)], k1=k1, b=b)
    for _ in range(20):
        query = rng.choices([*vocabulary, "unheard"], k=rng.randint(1, 6))  # words may be repeated
        expected = by_hand(texts, query, k1, b)
        hits = index.search(" ".join(query), 200)
        assert {int(hit.id): hit.score for hit in hits} == pytest.approx(
            {i: score for i, score in enumerate(expected) if score > 0}, rel=1e-5
        )
        scores = [hit.score for hit in hits]
        assert scores == sorted(scores, reverse=True)
        assert index.search(" ".join(query), 7) == hits[:7]


PASSAGES = DATA / "2wiki_corpus.json"


@pytest.mark.slow
@pytest.mark.skipif(not PASSAGES.is_file(), reason=f"needs {PASSAGES}")
def test_real_passages(tmp_path) -> None:
    index = Bm25.open(PASSAGES, cache=tmp_path)
    assert len(index) == 6119
    assert [hit.title for hit in index.search("Who is Lothair II?", 1)] == ["Lothair II"]
    [hit] = index.search("Etan Boritzer What is God?", 1)
    assert hit.title == "Etan Boritzer" and index.document(hit.id).text == hit.text


def test_equal_scores_come_in_order_of_ids_whatever_the_order_of_documents() -> None:
    documents = [Document(f"{i:02}", "", "same words" if i % 3 else "same words same") for i in range(30)]
    random.Random(1).shuffle(documents)
    found = [hit.id for hit in Bm25(documents).search("same", 15)]
    assert found == [f"{i:02}" for i in range(0, 30, 3)] + ["01", "02", "04", "05", "07"]
    assert found == [hit.id for hit in Bm25(reversed(documents)).search("same", 15)]


def test_titles_are_searched_and_shown() -> None:
    index = Bm25([Document("1", "The Nile", "A river."), Document("2", "", "A hill.")])
    assert [(hit.id, hit.title, hit.text) for hit in index.search("nile")] == [("1", "The Nile", "A river.")]
    assert index.document("2") == Document("2", "", "A hill.")
    with pytest.raises(KeyError):
        index.document("3")


@pytest.mark.parametrize(("query", "k"), [("", 5), ("unheard", 5), ("!?", 5), ("cat", 0), ("cat", -1)])
def test_nothing_is_found(query, k) -> None:
    assert Bm25(ANIMALS).search(query, k) == []


def test_words() -> None:
    assert words("Straße, STRASSE; it's R2-D2_x!") == ["strasse", "strasse", "it", "s", "r2", "d2", "x"]
    assert words("ﬁne 東京tower") == ["fine", "東", "京", "tower"]


@pytest.mark.parametrize(
    ("documents", "said"),
    [([], "no document holds a word"), ([Document("1", "", " ?")], "no document holds a word"),
     ([*ANIMALS, Document("a", "", "x")], "two documents have the id 'a'")],
)  # fmt: skip
def test_what_cannot_be_an_index_is_refused(documents, said) -> None:
    with pytest.raises(ConfigError, match=said):
        Bm25(documents)


def test_without_the_package_the_error_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(ConfigError, match=r"pip install 'silva\[search\]'"):
        Bm25(ANIMALS)


def corpus(folder: Path) -> Path:
    path = folder / "corpus.jsonl"
    path.write_text("".join(json.dumps(d._asdict()) + "\n" for d in ANIMALS))
    return path


def test_an_index_on_disk_finds_the_same(tmp_path) -> None:
    path = corpus(tmp_path)
    stored = Bm25.open(path, cache=tmp_path / "cache")
    assert stored.search("dog cat") == Bm25(ANIMALS).search("dog cat") == Bm25.open(path).search("dog cat")
    assert (len(stored), stored.document("b").text) == (3, "cat bird")


def indices(cache: Path) -> list[Path]:
    return sorted(path for path in cache.iterdir() if path.is_dir())


def test_an_index_is_built_once_and_again_when_anything_changes(tmp_path, monkeypatch) -> None:
    path, cache = corpus(tmp_path), tmp_path / "cache"
    Bm25.open(path, cache=cache)
    [index] = indices(cache)
    with monkeypatch.context() as patch:
        patch.setattr(Bm25, "__init__", None)  # any call raises TypeError
        Bm25.open(path, cache=cache)
        copied = tmp_path / "elsewhere.jsonl"  # the content counts, not the place
        copied.write_bytes(path.read_bytes())
        Bm25.open(copied, cache=cache)
    Bm25.open(path, cache=cache, b=0.5)
    path.write_text(path.read_text().replace("bird", "bear"))
    assert [hit.id for hit in Bm25.open(path, cache=cache).search("bear")] == ["b"]
    assert len(indices(cache)) == 3 and index in indices(cache)


def test_a_damaged_index_is_named(tmp_path) -> None:
    path, cache = corpus(tmp_path), tmp_path / "cache"
    Bm25.open(path, cache=cache)
    [index] = indices(cache)
    (index / "starts.npy").write_bytes(b"")
    with pytest.raises(ConfigError, match=f"{index}: a damaged index; remove the folder"):
        Bm25.open(path, cache=cache)


def build(path, cache, gate, found) -> None:
    inner = Bm25._write

    def counted(self, folder) -> None:
        found.put("built")
        inner(self, folder)

    Bm25._write = counted
    gate.wait()
    found.put([hit.id for hit in Bm25.open(path, cache=cache).search("cat")])


def test_processes_that_build_at_once_build_once(tmp_path) -> None:
    path, cache = corpus(tmp_path), tmp_path / "cache"
    cache.mkdir()
    (cache / ".bm25-0.silva-dead").mkdir()  # another index's leftover is not touched
    context = multiprocessing.get_context("fork")
    gate, found = context.Barrier(3), context.Queue()
    processes = [
        context.Process(target=build, args=(path, cache, gate, found), daemon=True) for _ in range(3)
    ]
    for process in processes:
        process.start()
    said = [found.get(timeout=30) for _ in range(4)]
    for process in processes:
        process.join(30)
    assert sorted(map(str, said)) == ["['b', 'a']"] * 3 + ["built"]
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert len(indices(cache)) == 2


def test_leftovers_of_a_killed_build_are_removed(tmp_path) -> None:
    path, cache = corpus(tmp_path), tmp_path / "cache"
    Bm25.open(path, cache=cache)
    [index] = indices(cache)
    left = cache / f".{index.name}.silva-killed00"
    index.rename(left)
    Bm25.open(path, cache=cache)
    assert indices(cache) == [index]
