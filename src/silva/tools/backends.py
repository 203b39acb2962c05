"""What search services are asked, and how their answers are read. Nothing is sent here.

A reader raises one of MALFORMED (web.py) for an answer of another form. No results are an empty list.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar
from urllib.parse import urlencode

from silva.tools.bm25 import Hit
from silva.tools.search import BrightDataBackend, RetrievalServerBackend, SearxngBackend, SerperBackend
from silva.tools.web import Call
from silva.wire.requests import Transient


class SearchForm(ABC):
    """How one service is asked. `asked`: settings on which an answer depends: the cache tells them apart."""

    asked: ClassVar[tuple[str, ...]] = ("url",)

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    @property
    def parameters(self) -> dict[str, str]:
        return {key: getattr(self.settings, key) for key in self.asked}

    @abstractmethod
    def call(self, query: str, k: int, key: str) -> Call: ...

    @abstractmethod
    def read(self, answer: Any) -> list[Hit]: ...


class Serper(SearchForm):
    """https://serper.dev: results of Google."""

    settings: SerperBackend
    asked = ("url", "country", "language")

    def call(self, query: str, k: int, key: str) -> Call:
        body = {"q": query, "num": k, **_given(gl=self.settings.country, hl=self.settings.language)}
        return Call("POST", self.settings.url, {"X-API-KEY": key}, {}, body)

    def read(self, answer: Any) -> list[Hit]:
        """An answer box and facts of the knowledge graph come first, as on the page."""
        hits = []
        if box := answer.get("answerBox"):
            text = _text(box.get("answer")) or _text(box.get("snippet"))
            hits.append(_hit(box.get("link"), box.get("title"), text))
        if (graph := answer.get("knowledgeGraph")) and graph.get("description"):
            hits.append(_hit(graph.get("descriptionLink"), graph.get("title"), graph["description"]))
        organic = answer["organic"] if not hits else answer.get("organic", [])
        return [*hits, *(_hit(row.get("link"), row.get("title"), row.get("snippet")) for row in organic)]


class BrightData(SearchForm):
    """https://brightdata.com, SERP API: parsed result pages of Google or Bing."""

    settings: BrightDataBackend
    asked = ("url", "engine", "country", "language")

    def call(self, query: str, k: int, key: str) -> Call:
        settings = self.settings
        if settings.engine == "google":
            asked = {"q": query, "num": str(k), **_given(gl=settings.country, hl=settings.language)}
            page = "https://www.google.com/search?"
        else:
            asked = {"q": query, "count": str(k), **_given(cc=settings.country, setlang=settings.language)}
            page = "https://www.bing.com/search?"
        body = {"zone": settings.zone, "url": page + urlencode(asked | {"brd_json": "1"}), "format": "raw"}
        return Call("POST", settings.url, _bearer(key), {}, body)

    def read(self, answer: Any) -> list[Hit]:
        """A page without results has general facts, but no list `organic`."""
        rows = answer.get("organic", []) if "general" in answer else answer["organic"]
        return [_hit(row.get("link"), row.get("title"), row.get("description")) for row in rows]


class Searxng(SearchForm):
    """https://docs.searxng.org: an instance whose settings list `json` under `search.formats`."""

    settings: SearxngBackend
    asked = ("url", "engines", "categories", "language")

    def call(self, query: str, k: int, key: str) -> Call:
        settings = self.settings
        asked = {"q": query, "format": "json"}
        asked |= _given(engines=settings.engines, categories=settings.categories, language=settings.language)
        return Call("GET", settings.url.rstrip("/") + "/search", _bearer(key), asked)

    def read(self, answer: Any) -> list[Hit]:
        """Nothing found because every engine failed is a fault, and no result."""
        hits = [_hit(row.get("url"), row.get("title"), row.get("content")) for row in answer["results"]]
        if not hits and (failed := answer.get("unresponsive_engines")):
            raise Transient(f"no engine answered: {failed!r:.200}")
        return hits


class RetrievalServer(SearchForm):
    """The retrieval server of Search-R1, and those that copy its form."""

    settings: RetrievalServerBackend

    def call(self, query: str, k: int, key: str) -> Call:
        body = {"queries": [query], "topk": k, "return_scores": True}
        return Call("POST", self.settings.url, _bearer(key), {}, body)

    def read(self, answer: Any) -> list[Hit]:
        [rows] = answer["result"]
        return [_passage(row) for row in rows]


def _passage(row: Mapping[str, Any]) -> Hit:
    """A document, alone or with its score: `contents` has the title, often in quotes, as its first line."""
    document = row.get("document", row)
    identity, score = str(document.get("id", "")), float(row.get("score") or 0.0)
    if "contents" not in document:
        return Hit(identity, _text(document.get("title")), _text(document["text"]), score)
    title, mark, text = _text(document["contents"]).partition("\n")
    if not mark:
        title, text = _text(document.get("title")), title
    return Hit(identity, title.strip().strip('"'), text, score)


def _hit(address: Any, title: Any, text: Any) -> Hit:
    return Hit(_text(address), _text(title), _text(text))


def _text(value: Any) -> str:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"got {type(value).__name__}, expected text")
    return value or ""


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def _given(**values: str) -> dict[str, str]:
    return {key: value for key, value in values.items() if value}


FORMS: Mapping[str, type[SearchForm]] = {
    "serper": Serper,
    "brightdata": BrightData,
    "searxng": Searxng,
    "retrieval_server": RetrievalServer,
}
