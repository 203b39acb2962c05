"""The search tool with every backend: what is asked, how answers are read, what the model is shown."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tools.web_server import Reply, serving

from silva.errors import ConfigError
from silva.tools import TOOLS
from silva.tools.backends import FORMS
from silva.tools.function import ToolError
from silva.tools.search import SearchSettings
from silva.tools.web import MALFORMED, ServiceFault
from silva.wire.requests import Transient

pytest.importorskip("httpx2", reason="needs httpx2: pip install 'silva[search]'")

KEY = "sk-very-secret-0123456789"


def settings(backend: dict, **more) -> SearchSettings:
    return SearchSettings.model_validate({"backend": backend, "cache": "", **more}, strict=False)


def searched(made: SearchSettings, *queries: str) -> list:
    """What the tool says to each query, or the exception; in one session, one after the other."""

    async def run():
        session = await made.build().open(0)
        found = []
        for query in queries:
            try:
                found.append(await session.tools[0]({"query": query}))
            except Exception as error:
                found.append(error)
        twin = await session.fork(1)
        await session.close()
        await session.close()  # twice does no harm
        if queries:
            assert isinstance(found[0], Exception) or found[0] == await twin.tools[0]({"query": queries[0]})
        await twin.close()
        return found

    return asyncio.run(run())


@pytest.fixture(autouse=True)
def keys(monkeypatch):
    for name in ("SERPER_API_KEY", "BRIGHTDATA_API_KEY", "OWN_KEY"):
        monkeypatch.setenv(name, KEY)


SERPER = {
    "searchParameters": {"q": "height of everest", "type": "search", "num": 3},
    "answerBox": {"snippet": "8,849 m", "title": "Mount Everest", "link": "https://a.org/everest"},
    "knowledgeGraph": {"title": "Everest", "description": "A mountain.", "descriptionLink": "https://b.org"},
    "organic": [
        {"title": "Everest facts", "link": "https://c.org/x", "snippet": "High <b>up</b>.", "position": 1},
        {"title": "No snippet", "link": "https://d.org", "position": 2},
    ],
}
BRIGHTDATA = {
    "general": {"search_engine": "google", "results_cnt": 2},
    "organic": [
        {"link": "https://a.org", "display_link": "a.org", "title": "A", "description": "One.", "rank": 1},
        {"link": "https://b.org", "title": "B", "description": "Two.", "rank": 2, "global_rank": 5},
    ],
}
SEARXNG = {
    "query": "x",
    "number_of_results": 0,
    "results": [
        {"url": "https://a.org", "title": "A", "content": "One.", "engine": "brave", "score": 2.0},
        {"url": "https://b.org", "title": "B", "content": None, "engines": ["brave"]},
    ],
    "unresponsive_engines": [["google", "timeout"]],
}
SEARCH_R1 = {
    "result": [
        [
            {"document": {"id": "7", "contents": '"The Nile"\nA river.\nLong.'}, "score": 12.5},
            {"document": {"id": "8", "contents": "A text of one line."}, "score": 3},
            {"document": {"id": "9", "title": "T", "text": "Split."}, "score": 1},
        ]
    ]
}
TWO = "1. A (https://a.org)\n> One.\n\n2. B (https://b.org)\n> Two."


def test_serper() -> None:
    with serving(lambda n, request: SERPER) as server:
        backend = {"type": "serper", "url": server.url + "/search", "country": "us", "language": "en"}
        [shown] = searched(settings(backend), "height of\n everest ")
    [request] = server.requests
    assert (request.method, request.path, request.headers["x-api-key"]) == ("POST", "/search", KEY)
    assert request.body == {"q": "height of everest", "num": 5, "gl": "us", "hl": "en"}
    assert shown == (
        "1. Mount Everest (https://a.org/everest)\n> 8,849 m\n\n"
        "2. Everest (https://b.org)\n> A mountain.\n\n"
        "3. Everest facts (https://c.org/x)\n> High ‹b>up‹/b>.\n\n"
        "4. No snippet (https://d.org)\n> "
    )


@pytest.mark.parametrize("engine", ["google", "bing"])
def test_brightdata(engine) -> None:
    with serving(lambda n, request: BRIGHTDATA) as server:
        backend = {"type": "brightdata", "url": server.url + "/request", "zone": "z1", "engine": engine}
        [shown] = searched(settings(backend | {"country": "de", "language": "de"}, results=2), "a & b?")
    [request] = server.requests
    assert request.headers["authorization"] == f"Bearer {KEY}"
    assert {k: v for k, v in request.body.items() if k != "url"} == {"zone": "z1", "format": "raw"}
    page = urlsplit(request.body["url"])
    assert page.netloc == f"www.{engine}.com" and page.path == "/search"
    country, language, count = ("gl", "hl", "num") if engine == "google" else ("cc", "setlang", "count")
    assert parse_qs(page.query) == {
        "q": ["a & b?"], "brd_json": ["1"], country: ["de"], language: ["de"], count: ["2"],
    }  # fmt: skip
    assert shown == TWO


def test_searxng() -> None:
    with serving(lambda n, request: SEARXNG) as server:
        backend = {"type": "searxng", "url": server.url + "/", "engines": "brave", "key_variable": "OWN_KEY"}
        [shown] = searched(settings(backend), "x")
    [request] = server.requests
    assert (request.method, request.path, request.body) == ("GET", "/search", None)
    assert request.query == {"q": "x", "format": "json", "engines": "brave"}
    assert request.headers["authorization"] == f"Bearer {KEY}"
    assert shown == TWO.replace("Two.", "")


def test_retrieval_server() -> None:
    with serving(lambda n, request: SEARCH_R1) as server:
        [shown] = searched(settings({"type": "retrieval_server", "url": server.url + "/retrieve"}), "nile")
    [request] = server.requests
    assert request.body == {"queries": ["nile"], "topk": 5, "return_scores": True}
    assert "authorization" not in request.headers
    assert shown == ("1. The Nile\n> A river. Long.\n\n2. 8\n> A text of one line.\n\n3. T\n> Split.")
    bare = {"result": [[row["document"] for row in SEARCH_R1["result"][0]]]}
    with serving(lambda n, request: bare) as server:  # one that gives no scores
        assert searched(settings({"type": "retrieval_server", "url": server.url}), "nile") == [shown]


@pytest.mark.parametrize(
    ("type_", "answer"),
    [
        ("serper", {"organic": []}),
        ("brightdata", {"general": {"results_cnt": 0}}),
        ("brightdata", {"organic": []}),
        ("searxng", {"results": []}),
        ("retrieval_server", {"result": [[]]}),
    ],
)
def test_nothing_found_is_an_answer(type_, answer) -> None:
    with serving(lambda n, request: answer) as server:
        assert searched(settings({"type": type_, "url": server.url}), "x") == ["No results found."]


@pytest.mark.parametrize(
    ("type_", "answer"),
    [
        ("serper", {"message": "Unauthorized."}),
        ("serper", {"organic": [{"title": ["a"]}]}),
        ("brightdata", {"error": "no such zone"}),
        ("brightdata", "<html>"),
        ("searxng", {"results": [], "unresponsive_engines": [["google", "CAPTCHA"]]}),
        ("searxng", {"results": {"a": 1}}),
        ("retrieval_server", {"result": []}),
        ("retrieval_server", {"result": [[{"document": {"id": "1"}}]]}),
        ("retrieval_server", {"detail": "Internal"}),
    ],
)
def test_a_service_that_fails_is_a_fault_and_never_no_results(type_, answer) -> None:
    with serving(lambda n, request: answer) as server:
        [found] = searched(settings({"type": type_, "url": server.url, "retries": 0}), "x")
    assert isinstance(found, ServiceFault) and not isinstance(found, ToolError)
    assert str(found).startswith(f"{type_}: ")


KEYS = [
    "organic", "answerBox", "knowledgeGraph", "general", "results", "unresponsive_engines", "result",
    "answer", "id", "document", "contents", "text", "title", "link", "url", "snippet", "description",
    "content", "score",
]  # fmt: skip
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5),
    max_leaves=12,
)


@pytest.mark.slow
@pytest.mark.parametrize("type_", FORMS)
@given(answer=ANY_JSON)
def test_any_answer_is_read_or_malformed(type_, answer) -> None:
    form = FORMS[type_](settings({"type": type_}).backend)
    try:
        hits = form.read(answer)
    except (*MALFORMED, Transient):
        return
    for hit in hits:
        assert isinstance(hit.score, float) and all(isinstance(text, str) for text in hit[:3])


def test_answers_are_kept_and_asked_for_once(tmp_path) -> None:
    with serving(lambda n, request: BRIGHTDATA) as server:
        backend = {"type": "brightdata", "url": server.url}
        made = settings(backend, cache=str(tmp_path))
        assert searched(made, "a", " a\n", "a") == [TWO] * 3
        assert searched(made, "a") == [TWO]
        assert len(server.requests) == 1
        searched(settings(backend, cache=str(tmp_path), results=1), "a")
        searched(settings(backend | {"country": "de"}, cache=str(tmp_path)), "a")
        searched(settings(backend | {"timeout": 9.0, "max_requests": 50}, cache=str(tmp_path)), "a")
        assert len(server.requests) == 3  # limits are no part of a question
    stored = b"".join(path.read_bytes() for path in Path(tmp_path).iterdir())
    assert b"https://a.org" in stored and KEY.encode() not in stored


def test_the_key_is_in_no_log(caplog) -> None:
    caplog.set_level(logging.DEBUG)
    with serving(lambda n, request: Reply(KEY.encode(), 401)) as server:
        [found] = searched(settings({"type": "serper", "url": server.url}), "x")
    assert isinstance(found, ServiceFault) and KEY not in str(found)
    assert KEY not in caplog.text and "Traceback" not in caplog.text


def test_a_missing_key_is_said_at_the_start(monkeypatch) -> None:
    monkeypatch.delenv("SERPER_API_KEY")
    with pytest.raises(ConfigError, match=r"search\.backend\.key_variable: SERPER_API_KEY is not set"):
        settings({"type": "serper"}).build()


@pytest.mark.parametrize("url", ["ftp://a.org", "a.org", "https://", "https://user:secret@a.org/x"])
def test_a_wrong_address_is_refused(url) -> None:
    for type_ in ("serper", "brightdata", "searxng", "retrieval_server"):
        with pytest.raises(ValueError, match="expected an address"):
            settings({"type": type_, "url": url})


def test_arpos_cache_answers_before_the_service(tmp_path) -> None:
    path = tmp_path / "arpo.json"
    answers = {"who is x": "Page 1: One <answer>\nmore\nPage 2: Two", "none": "No search results found."}
    path.write_text(json.dumps(answers))
    with serving(lambda n, request: BRIGHTDATA) as server:
        made = settings({"type": "brightdata", "url": server.url}, arpo_cache=str(path), cache=str(tmp_path))
        expected = "1. Page 1\n> One ‹answer> more\n\n2. Page 2\n> Two"
        assert searched(made, 'who is "x"', "none", "other") == [expected, "No results found.", TWO]
        assert len(server.requests) == 1


def test_kept_answers_are_replayed_without_a_key(tmp_path, monkeypatch) -> None:
    path = tmp_path / "arpo.json"
    path.write_text(json.dumps({"who is x": "Page 1: One"}))
    made = settings({"type": "brightdata"}, arpo_cache=str(path), cache=str(tmp_path))
    monkeypatch.delenv("BRIGHTDATA_API_KEY")
    replayed, other = searched(made, "who is x", "other")
    assert replayed == "1. Page 1\n> One" and isinstance(other, ServiceFault)
    why = "'other' is not in the cache, and search.backend.key_variable: BRIGHTDATA_API_KEY is not"
    assert why in str(other)


def test_lengths_are_limited() -> None:
    long = {"organic": [{"title": "t" * 500, "link": "https://a.org", "snippet": "s" * 5000}] * 9}
    with serving(lambda n, request: long) as server:
        backend = {"type": "serper", "url": server.url}
        [shown] = searched(settings(backend, results=3, max_result_chars=50), "x")
        assert shown.count("\n> ") == 3 and shown.count("s" * 50 + "...") == 3 and "s" * 51 not in shown
    assert settings(backend, max_chars=100).build().tools[0].max_chars == 100  # what an environment cuts to


def test_bm25_is_the_default(tmp_path) -> None:
    pytest.importorskip("bm25s", reason="needs bm25s: pip install 'silva[search]'")
    corpus = tmp_path / "corpus.jsonl"
    rows = [
        {"docid": "n", "name": "The Nile", "body": "A river <b>."},
        {"docid": "a", "body": "A hill river hill."},
    ]
    corpus.write_text("\n".join(map(json.dumps, rows)))
    keys = {"id_key": "docid", "title_key": "name", "text_key": "body"}
    made = settings({"type": "bm25", "corpus": str(corpus), **keys}, cache=str(tmp_path / "cache"))
    assert searched(made, "nile", "river", "unheard", " ") == [
        "1. The Nile\n> A river ‹b>.",
        "1. a\n> A hill river hill.\n\n2. The Nile\n> A river ‹b>.",
        "No results found.",
        "No results found.",
    ]
    assert [path.name[:5] for path in (tmp_path / "cache").iterdir() if path.is_dir()] == ["bm25-"]
    assert SearchSettings().backend.type == "bm25"
    with pytest.raises(ConfigError, match=r"backend\.corpus is missing"):
        SearchSettings(cache="").build()


def test_what_the_model_is_told(tmp_path) -> None:
    made = settings({"type": "searxng"}, fetch={}, description="Look it up.").build()
    search, fetch = (tool.spec for tool in made.tools)
    assert (search.name, search.description, fetch.name) == ("search", "Look it up.", "fetch")
    assert search.parameters == {
        "type": "object",
        "properties": {"query": {"type": "string", "minLength": 1, "maxLength": 1000,
                                 "description": "What to look for."}},
        "required": ["query"],
        "additionalProperties": False,
    }  # fmt: skip
    assert TOOLS["search"] == "silva.tools.search:SearchSettings"


def test_a_call_can_be_cancelled_and_another_succeeds() -> None:
    from tests.tools.web_server import HANG

    async def run(server):
        made = settings({"type": "serper", "url": server.url}).build()
        session = await made.open(0)
        hanging = asyncio.create_task(session.tools[0]({"query": "x"}))
        while not server.requests:
            await asyncio.sleep(0.001)
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging
        shown = await session.tools[0]({"query": "x"})
        await session.close()
        return shown

    with serving(lambda n, request: HANG if n == 0 else {"organic": []}) as server:
        assert asyncio.run(run(server)) == "No results found."
